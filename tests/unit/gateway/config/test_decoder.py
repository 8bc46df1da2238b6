"""Scalars with unusual notations are decoded correctly or rejected."""

from pathlib import Path

import msgspec.inspect
import pytest
import yaml

from gateway.config.decoder import SourceLocation
from gateway.config.errors import (
    ConfigError,
    ConfigPath,
    IssueCollector,
    SourcePosition,
    format_path,
)
from gateway.config.loader import load_text
from gateway.config.registry import ProtocolRegistry
from gateway.config.scalar_decoder import ScalarDecoder
from gateway.config.validation_context import ValidationContext

MARK = yaml.Mark("g", 0, 0, 0, "", 0)
START = 'listeners: [{address: "127.0.0.1:0", protocols: [openai]}]\n'


def collect_issue_messages(backend: str) -> list[str]:
    text = f"{START}backends: {{a: {backend}}}\nmodels: {{m: {{backend: a}}}}\n"
    with pytest.raises(ConfigError) as excinfo:
        load_text(text, "g", env={})
    return [one.message for one in excinfo.value.issues]


@pytest.mark.parametrize(
    ("backend", "accepted"),
    [
        ("{kind: echo, delay: }", "has no value; give it one or remove the key"),
        ("{kind: echo, delay: [1s]}", "must be a string or a number, not a list"),
        ("{kind: [echo]}", "must be a string, not a list"),
        (
            "{kind: echo, fail: {mode: [disconnect]}}",
            "must be one of disconnect, error, rate_limit, unavailable, not a list",
        ),
        (
            "{kind: echo, fail: {mode: disconect}}",
            "must be one of disconnect, error, rate_limit, unavailable, not 'disconect'; ",
        ),
        ("{kind: echo, context: {}}", "must be a whole number, not a mapping"),
        ("{kind: echo, script: [a, ~]}", "has no value; give it one or remove the key"),
        (
            "{kind: torch, path: m, dtype: ''}",
            "must be one of auto, bfloat16, float16, float32, int8",
        ),
        (
            "{protocol: openai, workers: [{url: http://w, auth: {bearer: {env: [A]}}}]}",
            "must be a string, not a list",
        ),
        (
            "{protocol: openai, workers: [{url: http://w, auth: {bearer: }}]}",
            "has no value; give it one or remove the key",
        ),
        (
            '{kind: torch, path: m, prompt_lookup: "8"}',
            "must be the number 8, not the string '8'; remove the quotes",
        ),
        (
            "{kind: torch, path: m, prompt_lookup: 16}",
            "must be one of 1 to 15, auto, off, not '16'",
        ),
        (
            "{kind: torch, path: m, prompt_lookup: [8]}",
            "must be one of 1 to 15, auto, off, not a list",
        ),
        (
            "{kind: torch, path: m, prompt_lookup: Auto}",
            "must be one of 1 to 15, auto, off, not 'Auto'; did you mean auto?",
        ),
        ('{protocol: "", workers: [http://w]}', "is empty; give it a value or remove the key"),
    ],
)
def test_error_names_the_accepted_values(backend: str, accepted: str) -> None:
    (message,) = collect_issue_messages(backend)
    assert message.startswith(accepted)


def test_number_is_no_misspelt_number() -> None:
    """Given 16 where at most 15 is accepted, no number that looks like it is suggested."""
    (message,) = collect_issue_messages("{kind: torch, path: m, prompt_lookup: 16}")
    assert "did you mean" not in message


def test_quoted_number_is_accepted_only_from_the_environment() -> None:
    assert collect_issue_messages('{kind: echo, context: "5"}')[0].endswith("remove the quotes")
    text = f'{START}backends: {{a: {{kind: echo, context: "${{N:-5}}"}}}}\n'
    assert load_text(text + "models: {m: {backend: a}}\n", "g", env={}).backends


def test_secret_file_that_is_not_utf_8_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    backend = f"{{protocol: openai, workers: [{{url: http://w, auth: {{bearer: {{file: {tmp_path}"

    (message,) = collect_issue_messages(backend + "/token}}}]}")

    assert message.endswith("can't be read: it is not text")


def test_unsupported_field_type_raises_type_error() -> None:
    node = yaml.ScalarNode("", "1.5", MARK, MARK)
    with pytest.raises(TypeError, match="no configuration holds"):
        ScalarDecoder(IssueCollector("g"), {}).decode_plain(node, msgspec.inspect.NoneType(), ())


def test_configuration_paths_are_formatted() -> None:
    assert format_path(()) == ""
    assert (
        format_path(("backends", "gpu-1", "workers", 1, "url")) == "backends.gpu-1.workers[1].url"
    )
    assert format_path(("models", "a.b", "x")) == "models['a.b'].x"


def test_issue_of_a_missing_value_has_the_position_of_its_parent() -> None:
    complaints = IssueCollector("g")
    places: dict[ConfigPath, SourceLocation] = {
        (): SourceLocation(SourcePosition(1, 1)),
        ("models",): SourceLocation(SourcePosition(3, 9), SourcePosition(3, 1)),
    }
    context = ValidationContext(complaints, places, ProtocolRegistry({}))
    context.add_issue(("models", "chat", "backend"), "is missing")
    context.add_issue(("models",), "is wrong", key=True)
    positions = [(one.line, one.column, one.path) for one in complaints.issues]

    assert positions == [(3, 9, "models.chat.backend"), (3, 1, "models")]
