"""``python -m tests.conformance`` against a gateway in a process of its own."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS
from tests.conformance import __main__ as command
from tests.conformance.cases import cases_of
from tests.conftest import ANY_FREE_PORT, CONFORMANCE, find_conformance_prefix
from tests.integration.test_command import Command

pytestmark = pytest.mark.slow

Outcomes = dict[str, str]

ROOT = Path(__file__).parents[2]
SPOKEN = [name for name in PROTOCOLS if ProtocolRegistry(PROTOCOLS).serves_clients(name)]
"""The protocols that clients can use."""


def run_conformance(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.conformance", url, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def parse_output(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(result.stdout)
    return body


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    """The URLs of ``interlingua serve conformance``: with every protocol, and with only one."""
    gateway = Command("serve", "conformance", env=ANY_FREE_PORT)
    yield gateway.read_urls()
    gateway.close()


def list_invocations(protocol: str) -> list[tuple[int, str, list[str]]]:
    """Return listener, path and arguments that the configuration documents for each protocol."""
    prefix = find_conformance_prefix(protocol)
    invocations = [(0, prefix, ["--protocol", protocol])]
    for port, path, rest in re.findall(r"# http://127.0.0.1:800(\d)(\S*) (--.*)", CONFORMANCE):
        arguments = rest.split()
        if arguments[1] == protocol:
            invocations.append((int(port), path, arguments))
    return invocations


@pytest.mark.parametrize("protocol", SPOKEN)
def test_every_case_passes_on_some_listener_and_none_fails(urls: list[str], protocol: str) -> None:
    passed = set[str]()
    for listener, path, arguments in list_invocations(protocol):
        result = run_conformance(urls[listener] + path, *arguments, "--json")

        outcomes = {case["id"]: case["outcome"] for case in parse_output(result)["cases"]}
        assert result.returncode == 0, result.stdout
        assert set(outcomes.values()) <= {"passed", "not applicable"}
        passed |= {one for one, outcome in outcomes.items() if outcome == "passed"}

    assert passed == {case.id for case in cases_of(protocol)}


def test_table_lists_each_case_and_the_totals(urls: list[str]) -> None:
    result = run_conformance(urls[0], "--protocol", "openai", "--only", "W41", "--only", "W1")

    *rows, last = result.stdout.splitlines()
    assert last == "2 passed, 0 failed, 2 not applicable"
    assert re.fullmatch(r"W1 +POST /v1/chat/completions +passed", rows[0])
    assert any(row.endswith("not applicable: needs unknown=reject") for row in rows)
    assert result.returncode == 0


def test_gateway_of_another_protocol_fails(urls: list[str]) -> None:
    """The cases of one protocol fail on a server of another."""
    result = run_conformance(urls[1], "--protocol", "triton")

    *rows, last = result.stdout.splitlines()
    assert result.returncode == 1
    assert re.fullmatch(r"[0-3] passed, \d\d failed, \d+ not applicable", last)
    assert any(re.search(r"failed: status: wanted 200, got 400", row) for row in rows)
    assert "Traceback" not in result.stderr


def test_wrong_key_fails(urls: list[str]) -> None:
    result = run_conformance(urls[0], "--protocol", "openai", "--only", "W1", "--key", "other")

    assert result.returncode == 1
    assert "wanted 200, got 401" in result.stdout


WRONG = [
    (["http://127.0.0.1:1", "--protocol", "openai"], "can't reach http://127.0.0.1:1"),
    (["127.0.0.1:1", "--protocol", "openai"], "does not start with http://"),
    (["http://127.0.0.1:1"], "Missing option '--protocol'"),
    (["http://127.0.0.1:1", "--protocol", "nope"], "'nope' is not one of"),
    (["http://127.0.0.1:1", "--protocol", "ovms", "--only", "OV-99"], "has no case OV-99"),
    (["http://127.0.0.1:1", "--protocol", "ovms", "--profile", "x"], "it has 2026, 2024"),
    (["http://127.0.0.1:1", "--protocol", "ovms", "--set", "v2=true"], "it has v1, kserve"),
    (["http://127.0.0.1:1", "--protocol", "ovms", "--set", "v1=5"], "v1 must be true or false"),
    # The cases expect the defaults of all other options, so no case applies here.
    (["http://127.0.0.1:1", "--protocol", "triton", "--set", "status=sane"], "0 passed, 0 failed"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda one: str(one)[-30:])
def test_usage_errors_exit_with_2_and_a_message(arguments: list[str], message: str) -> None:
    result = run_conformance(*arguments)

    assert result.returncode == 2
    assert message in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_protocol_without_cases_is_an_error() -> None:
    with pytest.raises(click.UsageError, match="there are no cases of unheard"):
        command._select_cases("unheard", ())
