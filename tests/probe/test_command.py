"""The probe command run against a worker process."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.tools.probe.runner import PROBES
from tests.integration.test_command import Command
from tests.probe.test_probes import PARROT

pytestmark = pytest.mark.slow

SECRET = "sk-of-great-worth"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway that plays the worker."""
    file = tmp_path_factory.mktemp("worker") / "worker.yaml"
    file.write_text(PARROT, "utf-8")
    worker = Command("serve", str(file))
    yield worker.serving()
    worker.close()


def run_probe_command(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", "probe", url, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def run_openai_probe(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_probe_command(url, "--protocol", "openai", *arguments)


def test_table_lists_each_probe_and_the_totals(url: str) -> None:
    result = run_openai_probe(url, "--model", "parrot")

    *rows, last = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout
    assert len(rows) == len(PROBES)
    assert re.fullmatch(r"\d\d passed, 0 failed, \d\d not offered", last)
    assert re.fullmatch(r"health +passed +/v1/models is answered 200", rows[0])

    columns = {re.match(r"\S+ +", row).end() for row in rows}  # type: ignore[union-attr]
    assert len(columns) == 1


def test_json_output_lists_each_probe_and_the_totals(url: str) -> None:
    result = run_openai_probe(
        url, "--model", "parrot", "--only", "stop", "--only", "top-k", "--json"
    )

    report: dict[str, Any] = json.loads(result.stdout)
    assert result.returncode == 0
    assert (report["protocol"], report["model"], report["url"]) == ("openai", "parrot", url)
    assert (report["passed"], report["failed"], report["not_offered"]) == (1, 0, 1)
    assert [(one["name"], one["outcome"]) for one in report["probes"]] == [
        ("stop", "passed"),
        ("top-k", "not offered"),
    ]


def test_write_option_saves_unsupported_parameters(url: str, tmp_path: Path) -> None:
    """A worker of another kind with the same protocol does not support all parameters."""
    file = tmp_path / "found.yaml"

    result = run_probe_command(
        f"{url}/mindie",
        "--protocol",
        "openai",
        "--model",
        "parrot",
        "--write",
        str(file),
    )

    written = file.read_text("utf-8")
    assert {"# protocol: openai", "# profile: openai", "# model: parrot"} <= {*written.splitlines()}
    assert result.returncode == 1
    assert "\n# quirk of " in written

    setting = msgspec.yaml.decode(written)
    unsupported = re.search(r"^not supported: (.*)$", result.stdout, re.MULTILINE)[1].split(", ")  # type: ignore[index]
    assert setting == {"unsupported_parameters": unsupported}


def test_results_are_printed_even_if_the_file_can_not_be_written(url: str, tmp_path: Path) -> None:
    file = tmp_path / "none" / "found.yaml"

    result = run_openai_probe(url, "--model", "parrot", "--only", "stop", "--write", str(file))

    assert result.returncode == 2
    assert "1 passed, 0 failed, 0 not offered" in result.stdout
    assert f"{file} can't be written: No such file or directory" in result.stderr


@pytest.mark.parametrize("source", ["variable", "file"])
def test_key_from_environment_or_file_is_never_printed(
    url: str, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(f"{SECRET}\n", "utf-8")
    if source == "variable":
        monkeypatch.setenv("INTERLINGUA_KEY", SECRET)
    arguments = [] if source == "variable" else ["--key-file", str(tmp_path / "key")]

    result = run_openai_probe(url, "--model", "parrot", *arguments)

    assert result.returncode == 0, result.stdout
    assert SECRET not in result.stdout + result.stderr


WRONG = [
    ([], "name the worker's model: --model NAME"),
    (["--model", "m", "--only", "nope"], "unknown probe nope; the probes are health, capacity"),
    (["--model", "m", "--alone"], "No such option"),
    (["--model", "m", "--profile", "x"], "openai has no profile x"),
    (["--model", "m", "--set", "nope=1"], "openai has no setting nope"),
    (["--model", "m", "--field", "a=b"], "openai does not support --field"),
    (["--model", "m", "--timeout", "0"], "0 is not in the range"),
    (["--model", "m"], "can't reach http://127.0.0.1:1"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda one: str(one)[-30:])
def test_usage_errors_exit_with_2_and_a_message(arguments: list[str], message: str) -> None:
    result = run_openai_probe("http://127.0.0.1:1", *arguments)

    assert result.returncode == 2
    assert message in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_unknown_field_option_is_a_usage_error(url: str) -> None:
    result = run_probe_command(
        url, "--protocol", "triton", "--model", "m", "--field", "nope=PROMPT"
    )  # fmt: skip

    assert result.returncode == 2
    assert "have no nope" in result.stderr
