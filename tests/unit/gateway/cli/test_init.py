"""``interlingua init`` writes a valid file that matches the answers."""

import hashlib
import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.cli.init import SCHEMA_FILE
from gateway.config.loader import load_config
from gateway.config.schema import Config


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_init(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["init", *arguments])


def load(name: str = "gateway.yaml") -> Config:
    return load_config(name, env={})


def test_file_without_answers_is_a_pool_of_one_local_worker() -> None:
    assert run_init().exit_code == 0

    config = load()
    (backend,) = config.backends.values()
    assert [worker.url for worker in backend.workers] == ["http://127.0.0.1:8001"]  # type: ignore[union-attr]
    assert [*config.models] == ["chat"]
    assert config.keys == ()


def test_options_are_the_answers() -> None:
    result = run_init(
        "other.yaml", "--worker", "http://a:1", "--worker", "http://b:2", "--model", "support",
        "--worker-model", "llama3", "--candidate", 'llama"3.1', "--key",
    )  # fmt: skip
    assert result.exit_code == 0, result.output

    config = load("other.yaml")
    (backend,) = config.backends.values()
    assert [worker.url for worker in backend.workers] == ["http://a:1", "http://b:2"]  # type: ignore[union-attr]

    model = config.models["support"]
    assert {name: one.model for name, one in model.resolve_targets().items()} == {
        "1": "llama3", "2": 'llama"3.1'
    }  # fmt: skip
    assert model.resolve_weights() == {"1": 90, "2": 10}

    key = re.search(r"shown only now: (\S+)", result.output)
    assert key is not None
    assert config.keys[0].sha256 == hashlib.sha256(key[1].encode()).hexdigest()
    assert key[1] not in Path("other.yaml").read_text()


def test_existing_file_is_kept_unless_forced() -> None:
    Path("gateway.yaml").write_text("mine")
    result = run_init()

    assert result.exit_code == 2
    assert "gateway.yaml exists" in result.output
    assert Path("gateway.yaml").read_text() == "mine"
    assert run_init("--force").exit_code == 0
    assert load().version == 1


def test_invalid_answer_is_reported_and_nothing_is_written() -> None:
    result = run_init("--worker", "a:1")
    assert result.exit_code == 1
    assert "gateway.yaml:" in result.output
    assert not Path("gateway.yaml").exists()


def test_editors_find_the_schema_beside_the_file() -> None:
    run_init()
    first_line = Path("gateway.yaml").read_text().partition("\n")[0]
    assert first_line == f"# yaml-language-server: $schema=./{SCHEMA_FILE}"

    schema = json.loads(Path(SCHEMA_FILE).read_text())
    assert schema["$id"].startswith("urn:interlingua:")
    assert schema["title"] == "Interlingua configuration"


def test_terminal_prompts_for_missing_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cli.init._is_terminal", lambda: True)
    answers = "http://a:1 http://b:2\nsupport\nllama3\nnone\ny\n"
    result = CliRunner().invoke(main, ["init"], input=answers)

    assert result.exit_code == 0, result.output

    config = load()
    assert len(config.backends["workers"].workers) == 2  # type: ignore[union-attr]
    assert config.models["support"].model == "llama3"
    assert len(config.keys) == 1


def test_prompt_is_repeated_after_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cli.init._is_terminal", lambda: True)
    answers = "localhost\nhttp://a:1\na b\nsupport\nllama3\nnone\nn\n"
    result = CliRunner().invoke(main, ["init"], input=answers)

    assert result.exit_code == 0, result.output
    assert "Error: localhost does not start with http:// or https://" in result.output
    assert "Error: a b is not a name" in result.output
    assert set(load().models) == {"support"}


def test_help_lists_every_command_in_a_group() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    assert [line for line in text.splitlines() if line.endswith(":") and line[0] != " "] == [
        "Options:", "Serve:", "Write a configuration:", "Operate:", "Decide by evidence:"
    ]  # fmt: skip
    for name in main.list_commands(click.Context(main)):
        assert re.search(rf"^  {name} ", text, re.MULTILINE), name


def test_file_in_a_missing_folder_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "none" / "gateway.yaml"

    result = run_init(str(file), "--key")

    assert result.exit_code == 2
    assert f"{file} can't be written: No such file or directory" in result.stderr
    assert "API key" not in result.output
