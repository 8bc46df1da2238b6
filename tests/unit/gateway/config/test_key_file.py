"""Files of API keys: their fields, and errors with line and column."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config.errors import MAX_ISSUES, ConfigError
from gateway.config.loader import LoadedConfig, load_file
from gateway.config.schema import ApiKeyConfig, KeyRateLimitConfig, RateLimitConfig

REST = """\
backends: {a: {kind: echo}}
models: {chat: {backend: a, aliases: [talk]}}
"""


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def build_line(name: str, **fields: Any) -> str:
    return json.dumps({"name": name, "sha256": digest(name), **fields})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gateway.yaml").write_text(REST + "keys_file: keys.jsonl\n")
    return tmp_path


def load(folder: Path, *lines: str, **env: str) -> LoadedConfig:
    (folder / "keys.jsonl").write_text("\n".join(lines))
    return load_file(str(folder / "gateway.yaml"), env=env)


def list_issues(folder: Path, *lines: str) -> list[str]:
    with pytest.raises(ConfigError) as excinfo:
        load(folder, *lines)
    assert str(folder / "keys.jsonl") in excinfo.value.files
    return str(excinfo.value).replace(f"{folder}/", "").splitlines()


def test_a_key_of_a_file_has_the_fields_of_a_key_in_the_configuration(folder: Path) -> None:
    limits = {"requests": "100/min", "budget": "5M/day", "models": {"chat": {"concurrent": 2}}}
    line = build_line(
        "ann", models=["chat"], protocol="openai", tags=["gold"], explain=True, limits=limits
    )
    loaded = load(folder, line, "", build_line("bob"), "")
    expected_limits = KeyRateLimitConfig(
        requests=(100, 60), budget=5_000_000, models={"chat": RateLimitConfig(concurrent=2)}
    )

    assert loaded.config.keys == (
        ApiKeyConfig("ann", digest("ann"), ("chat",), "openai", ("gold",), True, expected_limits),
        ApiKeyConfig("bob", digest("bob")),
    )


def test_keys_of_a_file_follow_those_of_the_configuration(folder: Path) -> None:
    with (folder / "gateway.yaml").open("a") as file:
        file.write(f"keys: [{{name: eve, sha256: {digest('eve')!r}}}]\n")
    loaded = load(folder, build_line("ann"))
    assert [key.name for key in loaded.config.keys] == ["eve", "ann"]


def test_a_change_of_the_file_reloads_the_configuration(folder: Path) -> None:
    assert str(folder / "keys.jsonl") in load(folder, build_line("ann")).files


def test_an_environment_variable_in_the_file_is_expanded(folder: Path) -> None:
    loaded = load(folder, build_line("ann", protocol="${PROTOCOL}"), PROTOCOL="openai")
    assert loaded.config.keys[0].protocol == "openai"


def test_issues_have_the_line_and_column_of_the_file(folder: Path) -> None:
    lines = [
        build_line("ann"),
        '{"name": "b b", "sha256": "12"}',
        '{"name": "cat", "sha256": "' + digest("cat") + '", "model": ["chat"]}',
        '{"name": "dan"',
        '{"name": "eve", "sha256": "' + digest("eve") + '", "limits": {"requests": "1/year"}}',
        "[1]",
    ]
    issues = list_issues(folder, *lines)

    positions = [issue.split(": ")[0] for issue in issues]

    assert positions == [
        "keys.jsonl:2:10",
        "keys.jsonl:2:27",
        "keys.jsonl:3:95",
        "keys.jsonl:4:1",
        "keys.jsonl:5:118",
        "keys.jsonl:6:1",
    ]
    assert "(at name)" in issues[0]
    assert "there is no 'model' here; did you mean 'models'?" in issues[2]
    assert "is not a JSON object" in issues[3]
    assert "(at limits.requests)" in issues[4]
    assert "must be a mapping, not a list" in issues[5]


def test_references_to_unknown_names_are_located_in_the_file(folder: Path) -> None:
    limits = {"models": {"chit": {"requests": "1/s"}}}
    issues = list_issues(
        folder,
        build_line("ann", models=["talk", "chet"]),
        "",
        build_line("bob", protocol="opneai"),
        build_line("cat", limits=limits),
    )

    assert [issue.split(" (at")[0].split(": ", 1)[1] for issue in issues] == [
        "there is no model 'chet'; did you mean 'chat'?",
        "'opneai' is not a protocol; did you mean 'openai'?",
        "there is no model 'chit'; did you mean 'chat'?",
    ]
    assert [issue.split(":")[1] for issue in issues] == ["1", "3", "4"]


def test_a_name_or_digest_that_is_used_twice_is_refused(folder: Path) -> None:
    with (folder / "gateway.yaml").open("a") as file:
        file.write(f"keys: [{{name: ann, sha256: {digest('x')!r}}}]\n")
    again = build_line("bob").replace("bob", "bill")
    same_name, same_digest = list_issues(folder, build_line("ann"), build_line("bob"), again)
    message = "has the same name; each key has its own (at name)"

    assert same_name == f"keys.jsonl:1:10: keys[0] {message}"

    message = "has the same sha256; each key has its own (at sha256)"
    assert same_digest == f"keys.jsonl:3:28: line 2 of keys.jsonl {message}"


def test_a_file_without_a_key_is_refused_rather_than_admit_everyone(folder: Path) -> None:
    message = "the file has no key; add one, or remove keys_file"
    assert list_issues(folder, "", " ") == [f"keys.jsonl:1:1: {message}"]


def test_a_missing_file_is_an_issue_of_the_configuration(folder: Path) -> None:
    with pytest.raises(ConfigError) as excinfo:
        load_file(str(folder / "gateway.yaml"), env={})
    assert "gateway.yaml:3:12: 'keys.jsonl' is not a file" in str(excinfo.value)


def test_a_file_without_read_permission_is_an_issue_of_the_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_open = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "keys.jsonl":
            raise PermissionError(13, "Permission denied")
        return original_open(path, *args, **kwargs)

    (folder / "keys.jsonl").write_text(build_line("ann"))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError) as excinfo:
        load_file(str(folder / "gateway.yaml"), env={})

    message = "gateway.yaml:3:12: the file can't be read: Permission denied (at keys_file)"
    assert message in str(excinfo.value)


def test_a_file_that_is_not_utf_8_is_refused_at_its_byte(folder: Path) -> None:
    (folder / "keys.jsonl").write_bytes(build_line("ann").encode() + b"\n\xff\n")
    with pytest.raises(ConfigError) as excinfo:
        load_file(str(folder / "gateway.yaml"), env={})
    assert "keys.jsonl:2:1: the byte 0xff is not UTF-8" in str(excinfo.value)


def test_the_number_of_reported_issues_is_bounded(folder: Path) -> None:
    unknown_models = [build_line(f"key-{n}", models=["chet"]) for n in range(MAX_ISSUES + 10)]
    assert len(list_issues(folder, *unknown_models)) == MAX_ISSUES
    assert len(list_issues(folder, *["{}"] * (MAX_ISSUES + 10))) <= MAX_ISSUES + 1
