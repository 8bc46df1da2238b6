import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli.config import check, schema

GOOD = """\
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends: {a: {kind: echo}}
models: {chat: {backend: a}, talk: {backend: a}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "g.yaml"
    path.write_text(GOOD)
    return path


def test_valid_file_passes_the_check(file: Path) -> None:
    result = CliRunner().invoke(check, [str(file)])
    assert result.exit_code == 0
    assert result.stdout == f"{file}: good: 1 listener, 1 backend, 2 models, 0 keys\n"


def test_issues_are_written_to_stderr_one_per_line(file: Path) -> None:
    file.write_text(GOOD.replace("kind: echo", "kind: ecco").replace("talk", "t/../k"))
    result = CliRunner().invoke(check, [str(file)])
    assert result.exit_code == 1
    assert result.stdout == ""

    first, second = result.stderr.splitlines()
    assert first == f"{file}:2:22: 'ecco' is not a kind; did you mean 'echo'? (at backends.a.kind)"
    assert second.startswith(f"{file}:3:30: 't/../k' holds '.' or '..'")


def test_issue_describes_the_suggested_key(file: Path) -> None:
    file.write_text(
        GOOD
        + "limits: {idle_timout: 3s, nonsense: 1}\n"
        + "observe: {usage: {sqlite: u.db, retentoin: 9d}}\n"
    )
    result = CliRunner().invoke(check, [str(file)])
    typo, meaning, unknown, other_typo, other_meaning = result.stderr.splitlines()

    assert "did you mean 'idle_timeout'?" in typo
    assert meaning == "    idle_timeout: How long a connection may wait for its next request."
    assert "there is no 'nonsense' here" in unknown
    assert "did you mean 'retention'?" in other_typo
    assert other_meaning == "    retention: The age at which rows are removed."

    listed = json.loads(CliRunner().invoke(check, [str(file), "--json"]).stdout)["issues"]
    assert [one.get("hint") for one in listed] == [meaning.strip(), None, other_meaning.strip()]


def test_json_output_lists_the_issues(file: Path) -> None:
    good = CliRunner().invoke(check, [str(file), "--json"])
    assert (good.exit_code, json.loads(good.stdout)) == (0, {"file": str(file), "issues": []})

    file.write_text(GOOD.replace("backend: a", "backend: b", 1))
    wrong = CliRunner().invoke(check, [str(file), "--json"])
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["issues"] == [
        {
            "line": 3,
            "column": 26,
            "message": "there is no backend 'b'; known: a",
            "path": "models.chat.backend",
        }
    ]


def test_unreadable_file_is_a_usage_error(tmp_path: Path) -> None:
    missing = CliRunner().invoke(check, [str(tmp_path / "none.yaml")])
    folder = CliRunner().invoke(check, [str(tmp_path)])

    assert (missing.exit_code, folder.exit_code) == (2, 2)
    assert "No such file" in missing.stderr
    assert CliRunner().invoke(check, []).exit_code == 2


def test_file_that_is_not_utf_8_is_reported(file: Path) -> None:
    file.write_bytes(b"a: \xff\n")
    result = CliRunner().invoke(check, [str(file)])

    assert result.exit_code == 1
    assert "1:4: the byte 0xff is not UTF-8" in result.stderr


def test_insecure_no_auth_flag_allows_a_public_listener(file: Path) -> None:
    file.write_text(GOOD.replace("127.0.0.1:0", "0.0.0.0:0"))
    assert CliRunner().invoke(check, [str(file)]).exit_code == 1
    assert CliRunner().invoke(check, [str(file), "--insecure-no-auth"]).exit_code == 0


def test_environment_variables_of_the_command_are_substituted(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(GOOD.replace("backend: a", 'backend: "${WHICH}"'))
    monkeypatch.setenv("WHICH", "a")
    assert CliRunner().invoke(check, [str(file)]).exit_code == 0

    monkeypatch.delenv("WHICH")
    assert CliRunner().invoke(check, [str(file)]).exit_code == 1


def test_schema_command_prints_json() -> None:
    result = CliRunner().invoke(schema)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["$ref"] == "#/$defs/Config"
