"""The addresses that traces and metrics are sent to are validated."""

import importlib.util
from typing import Any

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text

START = "backends: {a: {kind: echo}}\nmodels: {m: {backend: a}}\n"
MEND = "needs OpenTelemetry's client of OTLP; install it with: pip install 'interlingua[otel]'"
BOTH = "{traces: 'http://127.0.0.1:4318', metrics: {push: 'http://127.0.0.1:4318'}}"


def collect_issues(observe: str) -> list[str]:
    with pytest.raises(ConfigError) as excinfo:
        load_text(f"{START}observe: {observe}\n", "g", env={})
    return [f"{one.line}: {one.message}" for one in excinfo.value.issues]


@pytest.mark.parametrize("error", [None, ModuleNotFoundError()])
def test_missing_otel_extra_is_reported_for_traces_and_metrics(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    find = importlib.util.find_spec

    def without(name: str) -> Any:
        if name.startswith("opentelemetry"):
            if error is not None:
                raise error
            return None
        return find(name)

    monkeypatch.setattr("importlib.util.find_spec", without)
    assert collect_issues(BOTH) == [f"3: {MEND}", f"3: {MEND}"]


def test_installed_otel_extra_accepts_the_configuration() -> None:
    observe = load_text(f"{START}observe: {BOTH}\n", "g", env={}).observe
    assert observe.traces is not None
    assert (observe.traces.otlp, observe.traces.sample) == ("http://127.0.0.1:4318", 0.05)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:4318", "does not start with http:// or https://"),
        ("http://me@h:4318", "contains a user or password (give a key as auth: {bearer: ...})"),
        ("http://h:4318/?x", "has a query or a fragment"),
    ],
)
def test_invalid_otlp_url_error_shows_a_valid_url(url: str, why: str) -> None:
    [issue] = collect_issues(f"{{traces: '{url}'}}")
    assert issue.endswith(f"{why}; write a base URL, such as http://127.0.0.1:4318")


@pytest.mark.parametrize("part", ["traces", "metrics"])
def test_invalid_telemetry_section_is_reported_once(part: str) -> None:
    [issue] = collect_issues(f"{{{part}: [1]}}")
    assert "must be" in issue


def test_invalid_observe_section_is_reported_once() -> None:
    [issue] = collect_issues("[1]")
    assert "must be" in issue


def test_feedback_needs_the_database_of_usage_rows() -> None:
    text = "3: needs a database of usage rows; add observe.usage: {sqlite: FILE}"
    assert collect_issues("{feedback: {}}") == [text]

    loaded = load_text(f"{START}observe: {{usage: u.sqlite, feedback: {{}}}}\n", "g", env={})
    assert loaded.observe.feedback is not None
    assert loaded.observe.feedback.requests == (600, 60)
