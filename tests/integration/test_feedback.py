"""Feedback over sockets: with and without keys, in SQLite and PostgreSQL, in two processes."""

import asyncio
import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import httpx
import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from tests.conftest import RunningGateway, Serve
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.support.fakes import ScriptedWorker, make_reply
from tests.support.feedback_traffic import write_traffic
from tests.support.postgres_server import PostgresServer
from tests.support.waiting import wait_until

HELLO = [{"role": "user", "content": "hi"}]
CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, anthropic, ollama]}}]
backends: {{echo: {{kind: echo, script: [Hello, " world"]}}}}
models:
  chat:
    versions: {{"1": {{backend: echo}}, "2": {{backend: echo}}}}
    split: {{name: rollout, weights: {{"1": 1, "2": 1}}, sticky: [header:x-user-id]}}
observe: {{usage: {file}, feedback: {{requests: 1000/min, comment: 20}}}}
{more}
"""


def make_keys(**rights: str) -> str:
    keys = [
        f'{{name: {name}, sha256: "{hashlib.sha256(name.encode()).hexdigest()}"{rights_of_key}}}'
        for name, rights_of_key in rights.items()
    ]
    return f"keys: [{', '.join(keys)}]"


async def ask(client: httpx.AsyncClient, key: str = "", **headers: str) -> httpx.Response:
    if key:
        headers["Authorization"] = f"Bearer {key}"
    body = {"model": "chat", "messages": HELLO}
    response = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200
    return response


async def judge(client: httpx.AsyncClient, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"name": "thumbs_up", "value": True, **fields}
    return await client.post("/v1/feedback", json=body, headers=headers)


def read_feedback(
    file: Path, columns: str = "name, number", table: str = "feedback"
) -> list[tuple[Any, ...]]:
    """The rows; none while the gateway has not made the table yet."""
    with closing(sqlite3.connect(file)) as database:
        names = database.execute("SELECT name FROM sqlite_master").fetchall()
        if (table,) not in names:
            return []
        query = f"SELECT {columns} FROM {table} ORDER BY at"  # noqa: S608 - columns of the tests
        return database.execute(query).fetchall()


async def wait_for_rows(file: Path, count: int) -> list[tuple[Any, ...]]:
    await wait_until(lambda: len(read_feedback(file)) >= count)
    return read_feedback(file)


@pytest.fixture
async def keyless(serve: Serve, tmp_path: Path) -> RunningGateway:
    return await serve(CONFIG.format(file=tmp_path / "u.sqlite", more=""))


async def test_feedback_joins_the_request_without_keys(
    keyless: RunningGateway, tmp_path: Path
) -> None:
    response = await ask(keyless.http)
    sent = await judge(keyless.http, request_id=response.headers["x-request-id"])

    assert (sent.status_code, sent.json()["name"]) == (200, "thumbs_up")
    assert sent.headers["x-request-id"]
    assert await wait_for_rows(tmp_path / "u.sqlite", 1) == [("thumbs_up", 1.0)]


async def test_retries_and_corrections_count_once(keyless: RunningGateway, tmp_path: Path) -> None:
    response = await ask(keyless.http)
    name = response.headers["x-request-id"]
    sent = await asyncio.gather(*(judge(keyless.http, request_id=name) for _ in range(5)))

    assert {one.status_code for one in sent} == {200}

    by_response = await judge(keyless.http, response_id=response.json()["id"], value=False)
    assert by_response.status_code == 200

    await judge(keyless.http, request_id=name, name="stars", value=4)
    rows = await wait_for_rows(tmp_path / "u.sqlite", 2)
    assert sorted(rows) == [("stars", 4.0), ("thumbs_up", 0.0)]


async def test_ids_of_all_protocols_and_streams_name_the_response(
    keyless: RunningGateway, tmp_path: Path
) -> None:
    chat = {"model": "chat", "messages": HELLO}
    stream = await keyless.http.post("/v1/chat/completions", json={**chat, "stream": True})
    completion = await keyless.http.post("/v1/completions", json={"model": "chat", "prompt": "x"})
    message = await keyless.http.post("/v1/messages", json={**chat, "max_tokens": 5})
    streamed = await keyless.http.post(
        "/v1/messages", json={**chat, "max_tokens": 5, "stream": True}
    )
    response = await keyless.http.post("/v1/responses", json={"model": "chat", "input": "x"})
    events = await keyless.http.post(
        "/v1/responses", json={"model": "chat", "input": "x", "stream": True}
    )
    names = [
        msgspec.json.decode(stream.text.partition("data: ")[2].partition("\n")[0])["id"],
        completion.json()["id"],
        message.json()["id"],
        msgspec.json.decode(streamed.text.partition("data: ")[2].partition("\n")[0])["message"][
            "id"
        ],
        response.json()["id"],
        msgspec.json.decode(events.text.partition("data: ")[2].partition("\n")[0])["response"][
            "id"
        ],
    ]

    assert [name.partition("-")[0].partition("_")[0] for name in names] == [
        "chatcmpl",
        "cmpl",
        "msg",
        "msg",
        "resp",
        "resp",
    ]
    for name in names:
        assert (await judge(keyless.http, response_id=name)).status_code == 200

    ollama = await keyless.http.post("/api/chat", json={**chat, "stream": False})
    sent = await judge(keyless.http, request_id=ollama.headers["x-request-id"])
    assert sent.status_code == 200
    assert len(await wait_for_rows(tmp_path / "u.sqlite", 7)) == 7


WORKER_CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends: {{pool: {{protocol: openai, workers: ["{url}"], health: {{interval: 1h}}}}}}
models: {{chat: {{backend: pool, model: w}}}}
observe: {{usage: {file}, feedback: {{requests: 1000/min}}}}
"""
ANSWER: dict[str, Any] = {
    "id": "the-worker-s-id",
    "created": 7,
    "model": "w",
    "choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}],
}


@pytest.mark.parametrize("more", [{}, {"suffix": None}], ids=["passed through", "translated"])
async def test_worker_s_own_id_names_the_response(
    serve: Serve, tmp_path: Path, more: dict[str, Any]
) -> None:
    reply = make_reply(msgspec.json.encode(ANSWER))
    async with ScriptedWorker([reply]) as worker:
        gateway = await serve(WORKER_CONFIG.format(file=tmp_path / "u.sqlite", url=worker.url))
        body = {"model": "chat", "messages": HELLO, **more}
        answer = (await gateway.http.post("/v1/chat/completions", json=body)).json()
        judged = await judge(gateway.http, response_id=answer["id"])

    assert (answer["id"], answer["created"]) == ("the-worker-s-id", 7)
    assert judged.status_code == 200


async def test_unknown_id_gets_404_and_invalid_fields_their_names(keyless: RunningGateway) -> None:
    await ask(keyless.http)
    missing = await judge(keyless.http, request_id="nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "request_id"

    for fields, param in (
        ({"request_id": "r", "value": None}, "value"),
        ({"request_id": "r", "comment": "x" * 21}, "comment"),
        ({}, "request_id"),
    ):
        refused = await judge(keyless.http, **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    wrong = await keyless.http.get("/v1/feedback")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")

    noise = await keyless.http.post("/v1/feedback", content=b"\x00" * 1000)
    assert noise.status_code == 400

    large = await keyless.http.post("/v1/feedback", content=b" " * 100_000)
    assert large.status_code == 413


async def test_keys_judge_their_own_requests(serve: Serve, tmp_path: Path) -> None:
    keys = make_keys(
        web=", feedback: true",
        other=", feedback: true",
        mute="",
        ops=", feedback_on_all_keys: true",
    )
    gateway = await serve(CONFIG.format(file=tmp_path / "u.sqlite", more=keys))
    response = await ask(gateway.http, "web")
    name = response.headers["x-request-id"]

    assert (await judge(gateway.http, request_id=name)).status_code == 401
    assert (await judge(gateway.http, "wrong", request_id=name)).status_code == 401

    refused = await judge(gateway.http, "mute", request_id=name)
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "FeedbackForbidden")
    assert (await judge(gateway.http, "other", request_id=name)).status_code == 404
    assert (await judge(gateway.http, "web", request_id=name)).status_code == 200
    assert (await judge(gateway.http, "ops", request_id=name)).status_code == 200

    await wait_for_rows(tmp_path / "u.sqlite", 2)
    assert read_feedback(tmp_path / "u.sqlite", "key") == [("web",), ("ops",)]

    document = (await gateway.http.get("/openapi.json")).json()
    assert document["paths"]["/v1/feedback"]["post"]["security"] == [{"key": []}]


async def test_bug_gets_status_500_and_is_logged(
    keyless: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("gateway.pipeline.feedback.read_feedback", fail)
    response = await judge(keyless.http, request_id="r")

    assert (response.status_code, response.json()["error"]["type"]) == (500, "InternalError")
    assert "planted" in caplog.text
    assert keyless.records[-1].error == "InternalError"


async def test_limit_is_that_of_feedback(serve: Serve, tmp_path: Path) -> None:
    text = CONFIG.format(file=tmp_path / "u.sqlite", more="").replace("1000/min", "2/h")
    gateway = await serve(text)
    name = (await ask(gateway.http)).headers["x-request-id"]

    statuses = [(await judge(gateway.http, request_id=name)).status_code for _ in range(3)]

    assert statuses == [200, 200, 429]
    assert (await ask(gateway.http)).status_code == 200


async def test_gateway_without_feedback_has_no_such_path(serve: Serve) -> None:
    gateway = await serve(
        'listeners: [{address: "127.0.0.1:0", protocols: [openai]}]\n'
        "backends: {echo: {kind: echo}}\nmodels: {chat: {backend: echo}}"
    )
    assert (await judge(gateway.http, request_id="r")).status_code == 404

    document = (await gateway.http.get("/openapi.json")).json()
    assert "/v1/feedback" not in document["paths"]
    assert [one.error for one in gateway.records] == ["PathNotFound", ""]


async def test_ids_and_users_are_recorded_only_with_feedback_enabled(
    serve: Serve, keyless: RunningGateway
) -> None:
    await ask(keyless.http, **{"x-user-id": "ann"})
    record = keyless.records[-1]
    assert record.response_id == f"chatcmpl-{record.id}"
    assert len(record.user_hash) == 13

    await ask(keyless.http, **{"x-user-id": "ann"})
    assert keyless.records[-1].user_hash == record.user_hash

    plain = await serve(
        'listeners: [{address: "127.0.0.1:0", protocols: [openai]}]\n'
        "backends: {echo: {kind: echo}}\n"
        'models: {chat: {versions: {"1": {backend: echo}, "2": {backend: echo}}, '
        'split: {weights: {"1": 1, "2": 1}, sticky: [header:x-user-id]}}}'
    )
    await ask(plain.http, **{"x-user-id": "ann"})
    assert (plain.records[-1].response_id, plain.records[-1].user_hash) == ("", "")


# --- PostgreSQL and several processes -------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as postgres:
        yield postgres


async def read_postgres(server: PostgresServer) -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(server.url)
    try:
        rows = await connection.fetch("SELECT name, number FROM interlingua_feedback ORDER BY at")
    finally:
        await connection.close()
    return [tuple(row) for row in rows]


async def test_replicas_share_feedback_in_postgres(server: PostgresServer, tmp_path: Path) -> None:
    text = build_config(
        observe={"usage": {"postgres": server.url}, "feedback": {"requests": "1000/min"}}
    )
    (tmp_path / "other").mkdir()
    async with (
        GatewayProcess(tmp_path, text) as one,
        GatewayProcess(tmp_path / "other", text) as two,
    ):
        body = {"model": "m", "messages": HELLO}
        response = await one.http.post(f"{one.urls[0]}/v1/chat/completions", json=body)
        fields = {"name": "thumbs_up", "value": True, "response_id": response.json()["id"]}
        url = f"{two.urls[0]}/v1/feedback"
        for value in (True, True, False):
            sent = await two.http.post(url, json={**fields, "value": value})
            assert sent.status_code == 200, sent.text
        missing = await two.http.post(url, json={**fields, "response_id": "x"})

        assert missing.status_code == 404

        page = (await two.http.get(f"{two.urls[-1]}/metrics")).text
        assert 'interlingua_feedback_total{result="accepted"} 3.0' in page
        assert 'interlingua_feedback_total{result="RequestNotFound"} 1.0' in page

        server.pause()
        try:
            late = await two.http.post(url, json={**fields, "name": "late"}, timeout=60)
        finally:
            server.resume()
        assert late.status_code == 200

    assert sorted(await read_postgres(server)) == [("late", 1.0), ("thumbs_up", 0.0)]

    result = await run_ab(server.url, "m", "--outcome", "thumbs_up", "--all", "--plan")
    assert "thumbs_up" in result.stdout, result.output


async def test_processes_share_feedback_in_sqlite(tmp_path: Path) -> None:
    file = tmp_path / "u.sqlite"
    text = build_config(observe={"usage": str(file), "feedback": {}})
    async with GatewayProcess(tmp_path, text, "--processes", "2") as gateway:
        names = []
        for _ in range(6):
            async with httpx.AsyncClient(
                base_url=gateway.urls[0], timeout=30
            ) as client:  # on a new connection
                body = {"model": "m", "messages": HELLO}
                response = await client.post("/v1/chat/completions", json=body)
                names.append(response.headers["x-request-id"])

        for name in names:
            async with httpx.AsyncClient(base_url=gateway.urls[0], timeout=30) as client:
                assert (await judge(client, request_id=name)).status_code == 200
        assert len(await wait_for_rows(file, 6)) == 6


# --- the decision between two versions ------------------------------------------------------------


async def run_ab(source: str, model: str, *arguments: str) -> Result:
    return await asyncio.to_thread(
        CliRunner().invoke, main, ["ab", source, "--model", model, *arguments]
    )


CONFIG_OF_SPLIT = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends: {echo: {kind: echo}}
models:
  chat:
    versions: {"1": {backend: echo}, "2": {backend: echo}}
    split: {name: rollout, weights: {"1": %d, "2": %d}}
"""


async def test_version_with_3_percent_worse_feedback_is_found(tmp_path: Path) -> None:
    file = tmp_path / "u.sqlite"
    write_traffic(file, 16_000, {"1": 0.92, "2": 0.89})
    result = await run_ab(
        str(file), "chat", "--outcome", "thumbs_up", "--outcome", "why=reason0", "--by", "key",
        "--difference", "1",
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert "thumbs_up: version 2 is" in result.stdout
    assert "lower" in result.stdout.partition("thumbs_up: ")[2].partition("\n")[0]
    assert "higher" in result.stdout.partition("why=reason0: ")[2].partition("\n")[0]
    assert "failed: no difference of 1 percentage point or more" in result.stdout

    segments = [line.split()[:2] for line in result.stdout.splitlines() if " key" in line]
    assert sorted(segments) == [
        ["thumbs_up", "key0"],
        ["thumbs_up", "key1"],
        ["why=reason0", "key0"],
        ["why=reason0", "key1"],
    ]

    plan = await run_ab(str(file), "chat", "--outcome", "thumbs_up", "--plan", "--json")
    measures = msgspec.json.decode(plan.stdout)["measures"]
    assert [one["measure"] for one in measures][:2] == ["thumbs_up", "failed"]
    assert measures[0]["requests"] > 100


async def test_equal_versions_are_not_flagged(tmp_path: Path) -> None:
    file = tmp_path / "u.sqlite"
    write_traffic(file, 6000, {"1": 0.9, "2": 0.9}, seed=4)
    report = await run_ab(str(file), "chat", "--outcome", "thumbs_up", "--json")

    verdicts = {
        row["measure"]: row["verdict"]
        for row in msgspec.json.decode(report.stdout)["comparison"]["rows"]
    }

    assert verdicts["thumbs_up"] in ("no relevant difference", "not enough data")


async def test_user_of_a_sticky_split_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "u.sqlite"
    write_traffic(file, 3000, {"1": 0.9, "2": 0.5}, users=40)
    sticky = await run_ab(str(file), "chat", "--outcome", "thumbs_up", "--json")
    [row] = [
        one for one in msgspec.json.decode(sticky.stdout)["comparison"]["rows"]
        if one["measure"] == "thumbs_up"
    ]  # fmt: skip

    assert row["n"] <= 20
    assert "2960 further ones are left out" in sticky.stdout

    each = await run_ab(str(file), "chat", "--outcome", "thumbs_up", "--unit", "request")
    assert "thumbs_up: version 2 is" in each.stdout


async def test_sample_ratio_mismatch_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "u.sqlite"
    write_traffic(file, 2000, {"1": 0.9, "2": 0.9})
    for weights, exit_code in (((1, 1), 0), ((2, 1), 1)):
        config = tmp_path / "gateway.yaml"
        config.write_text(CONFIG_OF_SPLIT % weights)
        result = await run_ab(str(file), "chat", "--outcome", "thumbs_up", "--config", str(config))
        assert result.exit_code == exit_code, result.output
        assert ("WARNING" in result.stdout) == (exit_code == 1)


async def test_admin_listener_reports_all_experiments(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "u.sqlite"
    write_traffic(file, 8000, {"1": 0.9, "2": 0.8})
    settings = 'admin: {address: "127.0.0.1:0"}'
    gateway = await serve(CONFIG.format(file=file, more=settings))
    async with httpx.AsyncClient(base_url=gateway.admin, timeout=60) as admin:
        experiments = (await admin.get("/-/experiments")).json()
        [one] = experiments["experiments"]
        assert (one["model"], one["split"], one["unit"]) == ("chat", "rollout", "requests")
        assert one["is_plausible"]
        assert sum(version["assigned"] for version in one["versions"]) == 8000

        outcomes = [outcome["outcome"] for outcome in one["versions"][0]["outcomes"]]
        assert outcomes == ["thumbs_up", "why=reason0", "why=reason1"]

        rows = {row["measure"]: row for row in one["reports"][0]["comparison"]["rows"]}
        liked, reason = rows["thumbs_up"], rows["why=reason0"]
        assert liked["verdict"] == reason["verdict"] == "different"
        assert liked["difference"]["high"] < 0 < reason["difference"]["low"]
        [report] = one["reports"]
        assert report["decision"]["action"] == "choose"
        courses = {course["measure"]: course["points"] for course in report["courses"]}
        assert [*courses] == [*outcomes, "failed, or answered by a fallback"]
        last = courses["thumbs_up"][-1]
        assert last["n"] == 8000
        assert {name: last[name] for name in ("value", "low", "high")} == liked["difference"]
        assert report["comparison"]["segments"] == []
        assert (await admin.get("/-/experiments")).json() == experiments

        [one] = (await admin.get("/-/experiments?by=key")).json()["experiments"]
        segments = one["reports"][0]["comparison"]["segments"]
        assert {segment["segment"] for segment in segments} == {"key0", "key1"}
        for parameter, message in (("by=user", "'user' is not one of"), ("x=1", "no such")):
            refused = await admin.get(f"/-/experiments?{parameter}")
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"]

        file.unlink()


async def test_experiments_say_why_there_are_none(serve: Serve, tmp_path: Path) -> None:
    plain = (
        'listeners: [{address: "127.0.0.1:0", protocols: [openai]}]\n'
        'admin: {address: "127.0.0.1:0"}\n'
        "backends: {echo: {kind: echo}}\nmodels: {chat: {backend: echo}}\n"
    )
    gateway = await serve(plain)
    async with httpx.AsyncClient(base_url=gateway.admin, timeout=30) as admin:
        experiments = (await admin.get("/-/experiments")).json()
        assert experiments["experiments"] == []
        assert "observe.usage" in experiments["problem"]
    settings = 'admin: {address: "127.0.0.1:0"}'
    (tmp_path / "other.sqlite").write_text("no database" * 100)
    other = await serve(CONFIG.format(file=tmp_path / "other.sqlite", more=settings))
    async with httpx.AsyncClient(base_url=other.admin, timeout=30) as admin:
        refused = await admin.get("/-/experiments")
        assert refused.status_code == 503
        assert "can't be read now" in refused.json()["error"]["message"]
    empty = await serve(CONFIG.format(file=tmp_path / "none.sqlite", more=settings))
    async with httpx.AsyncClient(base_url=empty.admin, timeout=30) as admin:
        [one] = (await admin.get("/-/experiments")).json()["experiments"]
        assert one["problem"] == "fewer than two versions were sent requests"

        await ask(empty.http)
        await wait_until((tmp_path / "none.sqlite").exists)
        await judge(empty.http, request_id="r")  # waits until the row is written
        [one] = (await admin.get("/-/experiments")).json()["experiments"]

        assert one["problem"] == "fewer than two versions were sent requests"


async def test_wrong_outcomes_are_explained(tmp_path: Path) -> None:
    file, log = tmp_path / "u.sqlite", tmp_path / "access.log"
    write_traffic(file, 100, {"1": 0.9, "2": 0.9})
    log.write_text("{}\n")
    for source, arguments, text in (
        (file, ("--outcome", "stars"), "no feedback 'stars'; there is thumbs_up, why"),
        (file, ("--outcome", "why"), "--outcome why=CATEGORY"),
        (file, ("--outcome", "thumbs_up=yes"), "it has no categories"),
        (file, ("--by", "key"), "--by goes with --outcome"),
        (log, ("--outcome", "thumbs_up"), "needs the database"),
    ):
        result = await run_ab(str(source), "chat", *arguments)
        assert result.exit_code == 2
        assert text in result.output
