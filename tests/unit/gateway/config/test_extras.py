"""A missing optional package is named in the error, and so is an unreadable file."""

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text
from gateway.runtime.gateway import build_services
from gateway.runtime.snapshot import ConfigSnapshot

REST = "backends: {e: {kind: echo}}\nmodels: {m: {backend: e}}\n"
IDENTITY = 'identity: {issuer: "https://login.example.com", audience: [gateway]}\n'


def collect_issues(text: str) -> list[str]:
    with pytest.raises(ConfigError) as excinfo:
        load_text(text + REST, "g.yaml", env={})
    return str(excinfo.value).splitlines()


TOKENS = "1: tokens need a library; install it with: pip install 'interlingua[jwt]' (at identity)"
DATABASE = (
    "29: needs the client of PostgreSQL; install it with: pip install 'interlingua[postgres]'"
)


@pytest.mark.parametrize(
    ("text", "module", "message"),
    [
        ('observe: {usage: {postgres: "postgresql://h/d"}}\n', "asyncpg", DATABASE),
        ('observe: {usage: "postgresql://h/d"}\n', "asyncpg", DATABASE.replace("29", "18")),
        (IDENTITY, "jwt", TOKENS),
        (IDENTITY, "cryptography", TOKENS),
    ],
)
def test_missing_extra_is_named_in_the_error(
    text: str, module: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == module else there(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    [issue] = collect_issues(text)

    assert issue.startswith(f"g.yaml:1:{message}")


@pytest.mark.parametrize(
    "text",
    [
        "identity: 5\n",
        "identity: {issuer: 5, audience: [a], jwks: [], tls: 5}\n",
        'identity: {issuer: "https://a", audience: [a], tls: {ca: 5}}\n',
        'identity: {issuer: "http://[half", audience: [a]}\n',
        'identity: {issuer: "https://user@host", audience: [a]}\n',
        "observe: 5\n",
        "observe: {usage: [5]}\n",
        "observe: {usage: {postgres: [5]}}\n",
        "observe: {usage: {postgres: 5 5}}\n",
    ],
)
def test_invalid_value_is_reported_once(text: str) -> None:
    issues = collect_issues(text)
    assert len(issues) == len({one.split(": ")[0] for one in issues})


async def test_jwks_client_is_reused_if_the_issuer_is_unchanged() -> None:
    services = build_services()
    old = ConfigSnapshot(load_text(IDENTITY + REST, "g.yaml", env={}), services)
    changed = REST.replace("m:", "n:")
    same = ConfigSnapshot(load_text(IDENTITY + changed, "g.yaml", env={}), services, previous=old)
    other = IDENTITY.replace("gateway", "other") + REST
    new = ConfigSnapshot(load_text(other, "g.yaml", env={}), services, previous=same)

    assert old.jwks_client is not None
    assert same.jwks_client is old.jwks_client
    assert new.jwks_client is not old.jwks_client

    for one in (old, new):
        await one.aclose()
