"""``interlingua explain`` of a file, and of a gateway that runs."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.cli.explain import explain_command
from gateway.explain.report import Explanation
from tests.conftest import Serve
from tests.fakes import ScriptedWorker, whole

GOOD = """\
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends: {a: {kind: echo}}
models: {chat: {backend: a}}
"""
ADMIN = 'admin: {address: "127.0.0.1:0"}\n'
PATH = "/v1/chat/completions"
BODY = '{"model":"chat","messages":[{"role":"user","content":"hi"}]}'


def run(*args: str, told: str | None = None, env: Mapping[str, str] | None = None) -> Result:
    return CliRunner().invoke(explain_command, list(args), input=told, env=env)


async def apart(*args: str, told: str | None = None, env: dict[str, str] | None = None) -> Result:
    return await asyncio.to_thread(run, *args, told=told, env=env)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "g.yaml"
    path.write_text(GOOD)
    return str(path)


def test_a_body_may_come_from_the_pipe(file: str) -> None:
    result = run(file, "--path", PATH, "--body", "-", told=BODY)

    assert result.exit_code == 0
    assert "target     chat@1: a, as chat\n" in result.output


def test_a_bad_file_is_complained_of(file: str) -> None:
    Path(file).write_text(GOOD.replace("echo", "ecco"))

    result = run(file, "--model", "chat")

    assert result.exit_code == 2
    assert f"{file}:2:22: 'ecco' is not a kind" in result.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["none.yaml", "--model", "chat"], "No such file"),
        (["FILE"], "give the --model"),
        (["FILE", "--model", "chat", "--key", "x"], "there is no key 'x'"),
        (["FILE", "--model", "chat", "--header", "x"], "write NAME: VALUE"),
        (["FILE", "--model", "chat", "--header", ": x"], "write NAME: VALUE"),
        (["FILE", "--model", "chat", "--listener", "x"], "known: 127.0.0.1:0"),
        (["FILE", "--model", "chat", "--random", "1"], "range"),
        (["FILE", "--id", "x"], "--id needs the URL"),
        (["http://127.0.0.1:1", "--model", "chat"], "give --id, or --path and --body"),
        (["http://127.0.0.1:1", "--id", "x"], "can't be read"),
        (["http://127.0.0.1:x", "--id", "x"], "can't be read"),
    ],
)
def test_wrong_usage_is_told(file: str, args: list[str], says: str) -> None:
    result = run(*(file if arg == "FILE" else arg for arg in args))

    assert result.exit_code == 2
    assert says in result.stderr


async def test_a_running_gateway_tells_what_became_of_a_request(serve: Serve) -> None:
    running = await serve(GOOD + ADMIN)
    headers = {"x-interlingua-explain": "1", "x-request-id": "odd/id?%"}
    await running.http.post(PATH, content=BODY, headers=headers)

    result = await apart(running.admin + "/", "--id", "odd/id?%")
    same = await apart(running.admin, "--id", "odd/id?%", "--json")

    assert result.exit_code == same.exit_code == 0
    assert "response   200 ok, " in result.output
    assert "tokens     1 prompt, 1 completion (" in result.output
    assert json.loads(same.output)["id"] == "odd/id?%"


async def test_a_running_gateway_explains_a_request_that_nobody_sent(serve: Serve) -> None:
    running = await serve(GOOD + ADMIN)

    good = await apart(running.admin, "--path", PATH, "--body", "-", told=BODY)
    bad = await apart(running.admin, "--path", PATH, "--body", "-", told="{")

    assert good.exit_code == 0
    assert "target     chat@1: a, as chat\n" in good.output
    assert bad.exit_code == 1
    assert "response   400 client_error, MalformedRequest\n" in bad.output


async def test_what_the_admin_listener_refuses_is_told(serve: Serve) -> None:
    digest = "6c4a4ba9c5fa8ff8e1fd14a4ab2c5c4ad1b2f4dd1a9e8ec6a4d7fe25a1c2a5c3"
    running = await serve(GOOD + f'admin: {{address: "127.0.0.1:0", sha256: "{digest}"}}\n')

    keyless = await apart(running.admin, "--id", "x")
    wrong = await apart(running.admin, "--id", "x", env={"INTERLINGUA_ADMIN_KEY": "no"})
    elsewhere = await apart(running.url, "--id", "x")

    assert keyless.exit_code == wrong.exit_code == elsewhere.exit_code == 2
    assert "the admin key is required" in keyless.stderr
    assert "the admin key is required" in wrong.stderr
    assert "x: " not in elsewhere.stderr
    assert "/-/explain: " in elsewhere.stderr


@pytest.mark.parametrize("reply", [whole(b"no"), whole(b"[]", "404 Not Found"), whole(b"[]")])
async def test_what_is_no_explanation_is_told(reply: bytes) -> None:
    async with ScriptedWorker([reply]) as worker:
        result = await apart(worker.url, "--path", "/nowhere")

    assert result.exit_code == 2
    assert ", and no explanation" in result.stderr


def test_the_explanation_reads_as_it_was_written(file: str) -> None:
    result = run(file, "--model", "chat", "--json")

    found = msgspec.json.decode(result.output, type=Explanation)
    assert msgspec.json.decode(msgspec.json.encode(found)) == json.loads(result.output)
