"""The admin API's sums and history of the usage rows, as JSON and CSV."""

import csv
import io
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.observability.record import RequestOutcome, RequestRecord
from gateway.observability.usage import SqliteUsageRecorder
from protocols.core.events import Usage
from tests.conftest import RunningGateway, Serve

pytestmark = pytest.mark.asyncio
CONFIG = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
admin: {address: "127.0.0.1:0"}
backends: {b: {kind: echo, script: [fine]}}
models: {m: {backend: b}}
"""
HOUR = 3600.0


def write_rows(file: Path) -> None:
    """Two requests of a minute ago, one of them failed, and one of three days ago."""
    now = time.time()
    recorder = SqliteUsageRecorder(str(file), 1e12, time.time)
    rows: list[tuple[float, str, RequestOutcome]] = [
        (now - 60, "=cmd", "ok"),
        (now - 60, "=cmd", "worker_error"),
        (now - 72 * HOUR, "b", "ok"),
    ]
    for number, (at, key, outcome) in enumerate(rows):
        recorder.record_usage(
            RequestRecord(
                f"r{number}",
                at,
                model="m",
                version="1",
                key=key,
                outcome=outcome,
                usage=Usage(10, 4),
                first_token=0.5,
            )
        )
    recorder.start()
    recorder.close(60)


@pytest.fixture
async def gateway(serve: Serve, tmp_path: Path) -> RunningGateway:
    file = tmp_path / "usage.sqlite"
    write_rows(file)
    return await serve(f"{CONFIG}observe: {{usage: {file}}}\n")


async def get(gateway: RunningGateway, path: str) -> httpx.Response:
    return await gateway.http.get(f"{gateway.admin}{path}")


async def test_sums_are_grouped_by_the_chosen_columns(gateway: RunningGateway) -> None:
    sums = (await get(gateway, "/-/usage?by=key,model&days=30")).json()

    assert sums["problem"] == ""
    assert sums["totals"] == [
        {
            "by": {"key": "=cmd", "model": "m"},
            "requests": 2,
            "errors": 1,
            "cancelled": 0,
            "prompt_tokens": 20,
            "completion_tokens": 8,
        },
        {
            "by": {"key": "b", "model": "m"},
            "requests": 1,
            "errors": 0,
            "cancelled": 0,
            "prompt_tokens": 10,
            "completion_tokens": 4,
        },
    ]
    few = (await get(gateway, "/-/usage?by=key&days=2")).json()["totals"]
    assert [total["by"] for total in few] == [{"key": "=cmd"}]


async def test_csv_has_a_line_for_each_group_and_no_formula(gateway: RunningGateway) -> None:
    response = await get(gateway, "/-/usage?by=key&format=csv")

    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    assert 'filename="usage.csv"' in response.headers["content-disposition"]
    assert list(csv.reader(io.StringIO(response.text))) == [
        ["key", "requests", "errors", "cancelled", "prompt_tokens", "completion_tokens"],
        ["'=cmd", "2", "1", "0", "20", "8"],
        ["b", "1", "0", "0", "10", "4"],
    ]


@pytest.mark.parametrize(("name", "requests"), [("6h", 2), ("7d", 3)])
async def test_history_has_the_intervals_with_requests(
    gateway: RunningGateway, name: str, requests: int
) -> None:
    history = (await get(gateway, f"/-/usage/history?range={name}")).json()
    [version] = history["versions"]

    assert (version["model"], version["version"]) == ("m", "1")
    assert sum(point["requests"] for point in version["points"]) == requests
    assert sum(point["errors"] for point in version["points"]) == 1
    assert sum(point["tokens"] for point in version["points"]) == 4 * requests
    assert {point["first_token"] for point in version["points"]} == {0.5}
    span = range(history["end"] - history["intervals"], history["end"])
    assert all(point["n"] in span for point in version["points"])


@pytest.mark.parametrize(
    ("path", "field", "message"),
    [
        ("/-/usage?by=secret", "by", "'secret' is not one of day, key, model"),
        ("/-/usage?days=0", "days", "Expected `int` >= 1"),
        ("/-/usage?days=x", "days", "Expected `int`, got `str`"),
        ("/-/usage?since=1", "since", "there is no such parameter"),
        ("/-/usage?days=1&days=2", "days", "it is given twice"),
        ("/-/usage?format=xml", "format", "Invalid enum value 'xml'"),
        ("/-/usage/history?range=1y", "range", "Invalid enum value '1y'"),
    ],
)
async def test_wrong_parameters_are_errors_that_name_them(
    gateway: RunningGateway, path: str, field: str, message: str
) -> None:
    response = await get(gateway, path)

    assert response.status_code == 400
    assert response.json()["error"] == {"message": message, "field": field}


async def test_too_many_groups_are_refused(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.admin.usage._MAX_GROUPS", 1)
    response = await get(gateway, "/-/usage?by=key&format=csv")

    assert response.status_code == 400
    assert response.json()["error"]["field"] == "days"


async def test_gateway_without_a_store_says_how_to_configure_one(serve: Serve) -> None:
    gateway = await serve(CONFIG)
    for path in ("/-/usage", "/-/usage/history"):
        assert "observe.usage" in (await get(gateway, path)).json()["problem"]


async def test_store_without_a_row_yet_has_no_usage(serve: Serve, tmp_path: Path) -> None:
    gateway = await serve(f"{CONFIG}observe: {{usage: {tmp_path / 'new.sqlite'}}}\n")
    results: list[Any] = [
        (await get(gateway, path)).json() for path in ("/-/usage", "/-/usage/history")
    ]

    assert [one["problem"] for one in results] == ["", ""]
    assert results[0]["totals"] == results[1]["versions"] == []


async def test_unreadable_store_is_an_error_of_the_service(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "broken.sqlite"
    gateway = await serve(f"{CONFIG}observe: {{usage: {file}}}\n")
    file.write_bytes(b"no database" * 100)
    response = await get(gateway, "/-/usage")

    assert response.status_code == 503
    assert "can't be read now (DatabaseError)" in response.json()["error"]["message"]
