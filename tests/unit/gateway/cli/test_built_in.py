"""``serve`` and ``worker`` build valid configurations from their options."""

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import click
import pytest

from gateway.cli.built_in import (
    ADMIN_PORT,
    ServeOptions,
    build_serve_config,
    find_config_file,
    is_url,
)
from gateway.config.loader import load_bytes
from gateway.config.schema import map_model_tasks


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "model.safetensors").touch()
    return folder


def build(target: str | None, **options: Any) -> dict[str, Any]:
    """Build the configuration and load it, so that it must be valid."""
    built = build_serve_config(target, ServeOptions(**options))
    load_bytes(built.data, built.name, env={}, insecure=options.get("insecure", False))
    config: dict[str, Any] = json.loads(built.data)
    return config


def test_model_is_served_alone_under_the_name_of_its_folder(model_folder: Path) -> None:
    config = build(str(model_folder))
    assert config["models"] == {"tiny-llama": {"backend": "model"}}
    assert config["backends"]["model"]["path"] == str(model_folder)
    assert build_serve_config(str(model_folder), ServeOptions()).is_local_model


def test_served_model_name_replaces_the_name_of_the_model(model_folder: Path) -> None:
    config = build(str(model_folder), served_model_name="chat")
    assert [*config["models"]] == ["chat"]

    protocols = config["listeners"][0]["protocols"]
    models = {one["name"]: one["model"] for one in protocols if "model" in one}
    assert models == {"mindie": "chat", "tgi": "chat"}


def test_embedding_model_is_served_as_one(model_folder: Path) -> None:
    (model_folder / "modules.json").write_text("[]")
    cases = ((ServeOptions(), "embedding"), (ServeOptions(task="generate"), "chat"))
    for options, task in cases:
        built = build_serve_config(str(model_folder), options)
        config = load_bytes(built.data, built.name, env={}).config
        assert map_model_tasks(config.models, config.backends) == {"tiny-llama": task}


def test_model_of_the_hub_keeps_its_whole_name() -> None:
    assert [*build("owner/name")["models"]] == ["owner/name"]


@pytest.mark.parametrize(
    ("target", "worker"),
    [
        ("http://10.0.0.1:8001", "http://10.0.0.1:8001"),
        ("http://10.0.0.1:8001/v1/", "http://10.0.0.1:8001"),
        ("https://vllm.example", "https://vllm.example"),
        ("127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("localhost:8001", "http://localhost:8001"),
        ("[::1]:8001", "http://[::1]:8001"),
    ],
)
def test_worker_url_may_omit_the_scheme(target: str, worker: str) -> None:
    assert build(target)["backends"]["worker"]["workers"] == [worker]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("conformanc", "'conformanc' is no configuration file, worker"),
        ("ftp://10.0.0.1", "ftp://10.0.0.1: the URL does not start with http:// or https://"),
        ("/no/such/folder", "/no/such/folder does not exist"),
        ("./model.gguf", "./model.gguf does not exist"),
        ("package:no_such_package", "package no_such_package is not installed"),
    ],
)
def test_target_that_is_nothing_is_an_error_that_names_it(target: str, message: str) -> None:
    assert find_config_file(target) is None
    with pytest.raises(click.UsageError, match=message):
        build(target)


def test_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="contains no model"):
        build(str(tmp_path))


def test_missing_configuration_file_is_an_error() -> None:
    with pytest.raises(click.UsageError, match=r"no such file: gateway\.yaml"):
        find_config_file("gateway.yaml")


def test_a_file_is_a_configuration_unless_it_holds_weights(tmp_path: Path) -> None:
    for name, is_config in (("gateway.conf", True), ("model.gguf", False)):
        (tmp_path / name).write_text("")
        assert find_config_file(str(tmp_path / name)) == (
            str(tmp_path / name) if is_config else None
        )


def test_a_folder_whose_name_looks_like_an_address_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_url("model:1")

    (tmp_path / "model:1").mkdir()
    assert not is_url("model:1")


def test_host_and_port_are_those_of_the_listener() -> None:
    assert build("h:1")["listeners"][0]["address"] == "127.0.0.1:${PORT:-8000}"
    assert build("h:1", port=81)["listeners"][0]["address"] == "127.0.0.1:81"

    config = build("h:1", host="::", port=81, api_keys=["sk"])
    assert config["listeners"][0]["address"] == "[::]:81"


def test_api_keys_are_stored_as_digests() -> None:
    keys = build("h:1", api_keys=["sk-a", "sk-b"])["keys"]
    assert [key["sha256"] for key in keys] == [
        hashlib.sha256(key).hexdigest() for key in (b"sk-a", b"sk-b")
    ]


def test_public_host_needs_a_key_or_consent() -> None:
    with pytest.raises(
        click.UsageError, match=r"--host 0\.0\.0\.0 can be reached .* set --api-key"
    ):
        build("h:1", host="0.0.0.0")
    build("h:1", host="0.0.0.0", insecure=True)
    build("h:1", host="localhost")


def test_admin_listener_has_a_new_key_for_changes_on_loopback() -> None:
    first, second = (build_serve_config("h:1", ServeOptions(admin_port=0)) for _ in range(2))
    admin = json.loads(first.data)["admin"]

    assert first.admin_key is not None
    assert first.admin_key != second.admin_key
    assert admin == {
        "address": "127.0.0.1:0",
        "sha256": hashlib.sha256(first.admin_key.encode()).hexdigest(),
        "key_for": "changes",
    }


def test_admin_listener_takes_another_port_if_its_own_is_in_use() -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", ADMIN_PORT))
            holder.listen()
        except OSError:
            pass  # another process has this port

        assert build("h:1")["admin"]["address"] == "127.0.0.1:0"


def test_admin_listener_can_be_turned_off() -> None:
    assert "admin" not in build("h:1", admin_port=-1)
    assert build_serve_config("h:1", ServeOptions(admin_port=-1)).admin_key is None


def test_model_options_are_only_for_models() -> None:
    for options in ({"served_model_name": "x"}, {"task": "generate"}):
        with pytest.raises(click.UsageError, match="only for MODEL"):
            build("h:1", **options)


def test_texts_keep_characters_that_end_a_line_of_yaml() -> None:
    built = build_serve_config("conformance", ServeOptions())
    config = load_bytes(built.data, built.name, env={}).config
    script = config.backends["mock-uni"].script  # type: ignore[union-attr]

    assert script == ("a\u2028", "\u0085b\u00e9")
