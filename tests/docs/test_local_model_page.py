"""The page of the worker: its files load, and its options are the command's."""

import re
from pathlib import Path

import click
import msgspec
import pytest

from backends.pool.settings import PoolSettings
from backends.torch.settings import TorchSettings
from gateway.cli.worker import worker
from gateway.config.loader import load_text

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "howto" / "serve-a-local-model.md").read_text("utf-8")
ENV = {"INTERLINGUA_WORKER_KEY": "secret"}


def find_code_blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_documented_worker_configurations_are_valid(tmp_path: Path) -> None:
    gateway, _on_demand, listed, vectors = find_code_blocks("yaml")
    pool = load_text(gateway, "gateway.yaml", env=ENV).backends["far"]
    assert isinstance(pool, PoolSettings)
    assert (pool.profile, pool.workers[0].url) == ("interlingua", "http://10.0.0.21:8001")

    served = msgspec.yaml.decode((ROOT / "deploy" / "ray" / "serve.yaml").read_bytes())
    file = served["applications"][0]["args"]["file"]
    assert file in listed

    (tmp_path / "listed.json").touch()  # the file must exist
    whole = msgspec.yaml.decode(gateway)
    whole["backends"]["far"] |= msgspec.yaml.decode(
        listed.replace(file, str(tmp_path / "listed.json"))
    )
    text = msgspec.json.encode(whole).decode()

    assert isinstance(load_text(text, "gateway.yaml", env=ENV).backends["far"], PoolSettings)

    model = tmp_path / "my-embedder"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    text = f"{vectors}\nmodels: {{e: {{backend: vectors}}}}"
    engine = load_text(text, str(tmp_path / "gateway.yaml"), env={}).backends["vectors"]

    assert isinstance(engine, TorchSettings)
    assert engine.matryoshka == (64, 128, 256)


def test_documented_worker_options_exist() -> None:
    commands = "\n".join(find_code_blocks("(?:sh|console)"))
    options = {name for one in worker.params for name in one.opts}
    assert set(re.findall(r"--[a-z-]+", commands)) <= options
    assert {"--name", "--task"} <= options

    option = next(one for one in worker.params if one.name == "key")
    assert isinstance(option, click.Option)
    assert option.envvar in ENV


@pytest.mark.parametrize("file", re.findall(r"\]\(([^)h][^)]*)\)|(deploy/[\w./]+)", TEXT))
def test_linked_files_exist(file: tuple[str, str]) -> None:
    link, path = file
    assert (ROOT / path if path else ROOT / "docs" / "howto" / link).exists()
