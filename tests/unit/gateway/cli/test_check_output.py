"""``check`` prints warnings and colours beside its errors."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli.config import check

TEXT = """\
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends:
  a:
    protocol: openai
    workers: [{url: "http://api.example.com", auth: {bearer: s3cret}}]
    timeouts: {first_token: 2h}
  spare: {kind: echo}
models:
  chat: {backend: a, model: m, fallback: [talk]}
  talk: {backend: a, model: m}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "g.yaml"
    path.write_text(TEXT)
    return path


def invoke_check(file: Path, *options: str, color: bool = False) -> Result:
    return CliRunner().invoke(check, [str(file), *options], color=color)


def test_warnings_are_printed_with_their_places_and_the_file_is_good(file: Path) -> None:
    result = invoke_check(file)

    assert result.exit_code == 0

    *warnings, good = result.stdout.replace(f"{file}:", "").splitlines()
    assert [one.partition(" (at ")[0] for one in warnings] == [
        "5:21: warning: the credentials go to this worker without TLS; write https://",
        "6:29: warning: first_token (7200 s) never ends a request: total (3600 s) does before",
        "7:10: warning: no model uses this backend",
        "9:43: warning: 'talk' has the same backend and model, and fails with this one",
    ]
    assert good == " good: 1 listener, 2 backends, 2 models, 0 keys"


@pytest.mark.parametrize(
    ("listens", "worker", "what"),
    [
        ("0.0.0.0:4000", "http://localhost:4000", "a listener"),
        ("[::1]:4000", "http://127.0.0.1:4000/llm", "a listener"),
        ("127.0.0.1:80", "http://127.0.0.1", "a listener"),
        ("gpu7:4000", "http://gpu7:4000", "a listener"),
        ("127.0.0.1:4000", "http://127.0.0.1:8081", "the admin listener"),
        ("127.0.0.1:4000", "http://127.0.0.1:4001", ""),
        ("0.0.0.0:4000", "http://gpu7:4000", ""),
    ],
)
def test_worker_that_is_a_listener_of_the_gateway_is_named(
    file: Path, listens: str, worker: str, what: str
) -> None:
    file.write_text(
        f'listeners: [{{address: "{listens}", protocols: [openai]}}]\n'
        'admin: {address: "127.0.0.1:8081"}\n'
        f"keys: [{{name: a, sha256: {'0' * 64}}}]\n"
        f'backends: {{a: {{protocol: openai, workers: ["{worker}"]}}}}\n'
        "models: {m: {backend: a}}\n"
    )
    result = invoke_check(file)

    assert result.exit_code == 0
    assert result.stdout.count("warning") == bool(what)
    assert f"this is {what} of this gateway" in result.stdout or not what


def test_json_lists_the_warnings(file: Path) -> None:
    report = json.loads(invoke_check(file, "--json").stdout)

    assert report["issues"] == []
    assert [one["line"] for one in report["warnings"]] == [5, 6, 7, 9]


def test_settings_that_have_an_effect_give_no_warning(file: Path) -> None:
    file.write_text(
        TEXT.replace("http://api.", "https://api.")
        .replace("2h", "9m")
        .replace("  spare: {kind: echo}\n", "")
        .replace("talk: {backend: a, model: m}", "talk: {backend: a, model: other}")
    )

    assert invoke_check(file).stdout == f"{file}: good: 1 listener, 1 backend, 2 models, 0 keys\n"


@pytest.mark.parametrize("host", ["10.0.0.7", "127.0.0.1", "worker", "gpu.models.svc", "[fd00::1]"])
def test_credentials_inside_a_private_network_give_no_warning(file: Path, host: str) -> None:
    file.write_text(TEXT.replace("api.example.com", host))

    assert "the credentials go" not in invoke_check(file).stdout


def test_terminal_gets_colours_and_nothing_else_does(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coloured = invoke_check(file, color=True).stdout
    file.write_text(TEXT.replace("kind: echo", "kind: ecco"))
    error = invoke_check(file, color=True).stderr

    assert "\x1b[33mwarning: " in coloured
    assert "\x1b[32mgood\x1b[0m" in coloured
    assert f"\x1b[1m{file}:7:17\x1b[0m: \x1b[31m'ecco' is not a kind" in error

    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in invoke_check(file, color=True).stderr

    monkeypatch.delenv("NO_COLOR")
    assert "\x1b" not in invoke_check(file).stderr


def test_rollout_without_a_guardrail_gives_a_warning_that_says_what_to_add(file: Path) -> None:
    text = """\
backends: {a: {kind: echo}}
models:
  chat:
    versions: {"1": {backend: a}, "2": {backend: a}}
    split: {weights: {"1": 1, "2": 0}}
    rollout: {to: "2"}
observe: {usage: usage.sqlite}
"""
    file.write_text(text)
    [warning, _] = invoke_check(file).stdout.replace(f"{file}:", "").splitlines()
    fix = "guardrails: {errors: {max_increase: 1%}}"
    file.write_text(text.replace('to: "2"', f'to: "2", {fix}'))
    [good] = invoke_check(file).stdout.splitlines()

    assert warning.startswith("6:14: warning: the rollout has no guardrail, so that nothing stops")
    assert f"add one: {fix} (at models.chat.rollout)" in warning
    assert " good: " in good
