"""The URL of the store that gateways share is validated."""

import importlib.util
from typing import Any

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text

START = "backends: {a: {kind: echo}}\nmodels: {m: {backend: a}}\n"
FORMS = "write redis://HOST:6379/0, rediss://HOST:6379/0 for TLS, or unix:///PATH"
SIGNS = "signs in a password are written as %40"


def collect_issue_messages(state: str) -> list[str]:
    with pytest.raises(ConfigError) as excinfo:
        load_text(f"{START}state: {state}\n", "g", env={})
    return [one.message for one in excinfo.value.issues]


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1",
        "redis://127.0.0.1:6379/",
        "redis://[::1]:6379/15",
        "rediss://name:word@redis.internal:6380/0",
        "unix:///run/redis/redis.sock",
        "unix://:word@/run/redis.sock",
    ],
)
def test_valid_redis_url_is_accepted(url: str) -> None:
    state = load_text(f"{START}state: {{redis: '{url}'}}\n", "g", env={}).state
    assert state is not None
    assert state.redis.reveal() == url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:6379", f"this is not the URL of a Redis; {FORMS}"),
        ("valkey://127.0.0.1", f"this is not the URL of a Redis; {FORMS}"),
        ("redis://:6379/0", f"this is not the URL of a Redis; {FORMS}"),
        ("redis://h:0", f"this is not the URL of a Redis; {FORMS}"),
        ("redis://h/first", f"this is not the URL of a Redis; {FORMS}"),
        ("redis://h/0/1", f"this is not the URL of a Redis; {FORMS}"),
        ("unix://run/redis.sock", f"this is not the URL of a Redis; {FORMS}"),
        ("unix://", f"this is not the URL of a Redis; {FORMS}"),
        ("redis://h:70000", f"this is no URL; {FORMS}; {SIGNS}"),
        ("redis://[h", f"this is no URL; {FORMS}; {SIGNS}"),
        ("redis://:pass#word@h", f"this is no URL; {FORMS}; {SIGNS}"),
        (
            "redis://h?socket_timeout=9",
            "this has options, which are not taken from a URL; remove what follows ? or #",
        ),
        (
            "redis://h/0#first",
            "this has options, which are not taken from a URL; remove what follows ? or #",
        ),
    ],
)
def test_invalid_redis_url_is_rejected_without_being_shown(url: str, why: str) -> None:
    assert collect_issue_messages(f"{{redis: '{url}'}}") == [why]


def test_state_that_is_not_a_mapping_is_reported_once() -> None:
    assert collect_issue_messages("[redis]") == ["must be a mapping, not a list"]


def test_certificate_is_checked_even_if_the_url_is_missing() -> None:
    assert collect_issue_messages("{redis: {env: NO}, tls: {ca: /dev/nowhere}}") == [
        "NO is not set in the environment; set it",
        "'/dev/nowhere' is not a file; relative paths start at the configuration's folder",
    ]


def test_missing_redis_client_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str, *arguments: Any) -> Any:
        return None if name == "redis" else find(name, *arguments)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    assert collect_issue_messages("{redis: 'redis://h'}") == [
        "needs the client of Redis; install it with: pip install 'interlingua[redis]'"
    ]
