"""``interlingua ab``: its sources, its output and its exit codes."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from gateway.cli.ab import ab
from gateway.observability.metrics.requests import MetricsCollector
from gateway.observability.record import RequestRecord, ignore_record
from protocols.core.events import Usage

RECORD = RequestRecord(
    "r",
    path="/v1/chat/completions",
    model="chat",
    version="1",
    split="rollout",
    duration=1.0,
    first_token=0.1,
    usage=Usage(3, 5),
    finish_reasons=("eos",),
)
RECORDS = [*[RECORD] * 40, *[replace(RECORD, version="2")] * 10]
CONFIG = """\
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends: {e: {kind: echo}}
models:
  chat:
    versions: {"1": {backend: e}, "2": {backend: e}}
    split: {name: rollout, weights: {"1": 4, "2": 1}}
  plain: {backend: e}
  unnamed: {versions: {"1": {backend: e}, "2": {backend: e}}, split: {weights: {"1": 1, "2": 1}}}
"""


def encode_records(records: list[RequestRecord]) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def render_metrics_page(records: list[RequestRecord]) -> bytes:
    metrics = MetricsCollector(ignore_record, dict)
    for record in records:
        metrics.record_request(record)
    return metrics.render_page()


def run_ab(*arguments: str | Path, stdin: bytes | None = None, **env: str) -> Result:
    command = [*map(str, arguments), "--model", "chat"]
    return CliRunner().invoke(ab, command, input=stdin, env=env)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "access.log"
    file.write_bytes(
        b"interlingua serves chat on http://127.0.0.1:8000\n" + encode_records(RECORDS)
    )
    return file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "gateway.yaml"
    file.write_text(CONFIG)
    return file


def test_access_log_is_compared(log: Path) -> None:
    result = run_ab(log)

    assert result.exit_code == 0

    first, _, _, _, requests, *_ = result.stdout.splitlines()
    assert first == "chat: version 2 compared with version 1, sent by the split rollout"
    assert requests.split() == ["requests", "40", "10"]
    assert "1 of 51 lines are not the record of a request." in result.stdout


def test_verdicts_follow_the_table(log: Path) -> None:
    lines = run_ab(log).stdout.splitlines()
    assert any(line.startswith("duration: ") for line in lines)
    assert any(line.startswith("failed: not enough data: about ") for line in lines)


def test_plan_prints_the_requests_that_a_test_needs(log: Path) -> None:
    result = run_ab(log, "--plan", "--difference", "5")
    assert result.exit_code == 0

    first, _, headings, failed, *_ = result.stdout.splitlines()
    assert first == "chat: to tell a difference of 5 % from version 1"
    assert headings.split() == ["now", "difference", "requests", "per", "version"]
    assert failed.split()[:1] == ["failed"]

    plan = json.loads(run_ab(log, "--plan", "--json").stdout)
    assert (plan["model"], plan["version"], plan["relative"]) == ("chat", "1", 0.1)


def test_model_may_be_an_alias_of_the_configuration(log: Path, config: Path) -> None:
    config.write_text(CONFIG.replace("  chat:", "  chat:\n    aliases: [gpt-4o]", 1))
    result = CliRunner().invoke(ab, [str(log), "--model", "gpt-4o", "--config", str(config)])

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("chat: version 2 compared with version 1")


def test_standard_input_is_compared() -> None:
    assert "order statistics\n" in run_ab("-", stdin=encode_records(RECORDS)).stdout
    assert (
        "order statistics, from buckets\n" in run_ab("-", stdin=render_metrics_page(RECORDS)).stdout
    )


def test_saved_metrics_page_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "metrics.txt"
    file.write_bytes(render_metrics_page(RECORDS))
    assert (
        "A page of metrics has only the bucket of each value"
        in run_ab(file, "--a", "2", "--b", "1").stdout
    )


def test_json_output_contains_the_comparison(log: Path) -> None:
    body = json.loads(run_ab(log, "--json", "--confidence", "90").stdout)

    assert (body["source"], body["model"]) == (str(log), "chat")

    comparison = body["comparison"]
    named = {name: comparison[name] for name in ("split", "a", "b", "confidence", "ratio")}
    assert named == {"split": "rollout", "a": "1", "b": "2", "confidence": 0.9, "ratio": None}

    [failed] = [row for row in comparison["rows"] if row["measure"] == "failed"]
    assert failed["method"] == "betting"
    assert failed["difference"]["value"] == 0.0
    assert len(body["notes"]) == 2


def test_request_shares_that_match_the_weights_pass(log: Path, config: Path) -> None:
    result = run_ab(log, "--config", config)
    assert result.exit_code == 0
    assert "The split sent 40 : 10 to the versions 1, 2 for the weights 4 : 1" in result.stdout


def test_request_shares_that_do_not_match_the_weights_exit_with_1(log: Path, config: Path) -> None:
    config.write_text(CONFIG.replace('"1": 4', '"1": 1'))
    result = run_ab(log, "--config", config)

    assert result.exit_code == 1
    assert "WARNING: the split sent 40 : 10" in result.stdout


def test_all_includes_requests_pinned_by_the_client(log: Path) -> None:
    log.write_bytes(encode_records([*RECORDS, replace(RECORD, split="", sticky="pinned")]))
    assert "Left out: 1 requests pinned by the client." in run_ab(log).stdout

    output = run_ab(log, "--all").stdout
    assert ["requests", "41", "10"] in map(str.split, output.splitlines())
    assert "Included, though not a random sample: 1 requests pinned by the client." in output


# --- since ----------------------------------------------------------------------------------------

NOW = datetime.now(UTC)


@pytest.mark.parametrize(
    ("since", "early"),
    [
        ("90m", 1),
        ("2d", 0),
        ((NOW - timedelta(minutes=90)).isoformat(), 1),
        ((NOW - timedelta(days=1)).astimezone().replace(tzinfo=None).isoformat(), 0),
    ],
    ids=["minutes", "days", "a time with its zone", "a time here"],
)
def test_since_filters_the_access_log(log: Path, since: str, early: int) -> None:
    began = NOW.timestamp()
    records = [replace(record, started_at=began) for record in RECORDS]
    log.write_bytes(encode_records([replace(RECORD, started_at=began - 7200), *records]))

    result = run_ab(log, "--since", since)

    assert ("1 of 51 lines are of requests before --since." in result.stdout) == bool(early)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--since", "yesterday"], "'yesterday' is neither a time, such as"),
        (["--a", "3"], "chat: version '3' was sent no requests; there is 1, 2"),
        (["--all", "--split", "rollout"], "--all can't be used with --split or --config"),
        (["--confidence", "100"], "100"),
    ],
)
def test_invalid_options_are_reported(log: Path, arguments: list[str], message: str) -> None:
    result = run_ab(log, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_unknown_model_is_reported(log: Path) -> None:
    result = CliRunner().invoke(ab, [str(log), "--model", "chart"])
    empty = CliRunner().invoke(ab, ["-", "--model", "chat"], input=b"")

    assert (result.exit_code, empty.exit_code) == (2, 2)
    assert "chart: no such model; the source has chat" in result.stderr
    assert "chat: no such model; the source has none" in empty.stderr


def test_reason_for_an_empty_comparison_is_reported(log: Path) -> None:
    log.write_bytes(encode_records([replace(RECORD, split="", sticky="pinned")]))
    result = run_ab(log)

    assert result.exit_code == 2
    assert "there is none that was sent requests" in result.stderr
    assert "Left out: 1 requests pinned by the client." in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CONFIG.replace("  chat:", "  chart:"), "has no split of the model 'chat'"),
        (CONFIG.replace("name: rollout", "name: next"), "has the split 'next', not 'rollout'"),
        (CONFIG.replace("name: rollout, ", ""), "has the split 'chat', not 'rollout'"),
        (CONFIG.replace("backends", "backend"), "gateway.yaml:2:1:"),
    ],
)
def test_configuration_without_the_split_is_rejected(
    log: Path, config: Path, text: str, message: str
) -> None:
    config.write_text(text)
    result = run_ab(log, "--config", config)

    assert result.exit_code == 2
    assert message in result.stderr


def test_since_is_rejected_for_a_metrics_page() -> None:
    result = run_ab("-", "--since", "1h", stdin=render_metrics_page(RECORDS))
    assert result.exit_code == 2
    assert "--since goes with a log" in result.stderr


@pytest.mark.parametrize(
    "text", [b"# HELP x y\nx{ 1\n", b"# HELP x y\ninterlingua_requests_total 1\n"]
)
def test_invalid_metrics_page_is_reported(text: bytes) -> None:
    result = run_ab("-", stdin=text)
    assert result.exit_code == 2
    assert "this page of metrics is not the gateway's, or is cut" in result.stderr


def test_missing_source_file_is_reported(tmp_path: Path) -> None:
    result = run_ab(tmp_path / "none.log")
    assert result.exit_code == 2
    assert "No such file" in result.stderr


# --- metrics pages --------------------------------------------------------------------------------


class MetricsPageHandler(BaseHTTPRequestHandler):
    """Serves a page at one path to clients with the key."""

    def do_GET(self) -> None:
        key = self.headers["Authorization"]
        good = self.path == "/metrics" and key in (None, "Bearer admin-key")
        self.send_response(200 if good else 401)
        self.end_headers()
        self.wfile.write(render_metrics_page(RECORDS) if good else b"")

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), MetricsPageHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_metrics_page_is_fetched_from_a_url(url: str) -> None:
    for where in (url, f"{url}/", f"{url}/metrics"):
        assert ["requests", "40", "10"] in map(str.split, run_ab(where).stdout.splitlines())
    assert run_ab(url, INTERLINGUA_ADMIN_KEY="admin-key").exit_code == 0


def test_failed_metrics_request_is_reported(url: str) -> None:
    wrong = run_ab(url, "--key", "other")
    away = run_ab("http://127.0.0.1:1")

    assert (wrong.exit_code, away.exit_code) == (2, 2)
    assert "/metrics: the response has the status 401, and no metrics" in wrong.stderr
    assert "http://127.0.0.1:1/metrics can't be read" in away.stderr


def test_ab_is_a_command_of_the_cli() -> None:
    from gateway.cli import main  # noqa: PLC0415 - everything comes with it

    assert isinstance(main, click.Group)
    assert main.get_command(click.Context(main), "ab") is ab
