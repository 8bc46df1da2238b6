"""``interlingua explain`` explains a request with a file or with a running gateway."""

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
from tests.support.fakes import ScriptedWorker, make_reply

GOOD = """\
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends: {a: {kind: echo}}
models: {chat: {backend: a}}
"""
ADMIN = 'admin: {address: "127.0.0.1:0"}\n'
PATH = "/v1/chat/completions"
BODY = '{"model":"chat","messages":[{"role":"user","content":"hi"}]}'


def run_explain(
    *args: str, body_text: str | None = None, env: Mapping[str, str] | None = None
) -> Result:
    return CliRunner().invoke(explain_command, list(args), input=body_text, env=env)


async def run_explain_in_thread(
    *args: str, body_text: str | None = None, env: dict[str, str] | None = None
) -> Result:
    return await asyncio.to_thread(run_explain, *args, body_text=body_text, env=env)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "g.yaml"
    path.write_text(GOOD)
    return str(path)


def test_body_option_reads_standard_input(file: str) -> None:
    result = run_explain(file, "--path", PATH, "--body", "-", body_text=BODY)

    assert result.exit_code == 0
    assert "target     chat@1: a, as chat\n" in result.output


def test_invalid_configuration_file_is_reported_with_its_position(file: str) -> None:
    Path(file).write_text(GOOD.replace("echo", "ecco"))

    result = run_explain(file, "--model", "chat")

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
def test_usage_errors_exit_with_2_and_a_message(file: str, args: list[str], says: str) -> None:
    result = run_explain(*(file if arg == "FILE" else arg for arg in args))

    assert result.exit_code == 2
    assert says in result.stderr


async def test_explain_shows_a_stored_request_of_a_running_gateway(serve: Serve) -> None:
    running = await serve(GOOD + ADMIN)
    headers = {"x-interlingua-explain": "1", "x-request-id": "odd/id?%"}
    await running.http.post(PATH, content=BODY, headers=headers)

    result = await run_explain_in_thread(running.admin + "/", "--id", "odd/id?%")
    same = await run_explain_in_thread(running.admin, "--id", "odd/id?%", "--json")

    assert result.exit_code == same.exit_code == 0
    assert "response   200 ok, " in result.output
    assert "tokens     1 prompt, 1 completion (" in result.output
    assert json.loads(same.output)["id"] == "odd/id?%"


async def test_explain_performs_a_dry_run_at_a_running_gateway(serve: Serve) -> None:
    running = await serve(GOOD + ADMIN)

    good = await run_explain_in_thread(running.admin, "--path", PATH, "--body", "-", body_text=BODY)
    bad = await run_explain_in_thread(running.admin, "--path", PATH, "--body", "-", body_text="{")

    assert good.exit_code == 0
    assert "target     chat@1: a, as chat\n" in good.output
    assert bad.exit_code == 1
    assert "response   400 client_error, MalformedRequest\n" in bad.output


async def test_admin_listener_errors_are_reported(serve: Serve) -> None:
    digest = "6c4a4ba9c5fa8ff8e1fd14a4ab2c5c4ad1b2f4dd1a9e8ec6a4d7fe25a1c2a5c3"
    running = await serve(GOOD + f'admin: {{address: "127.0.0.1:0", sha256: "{digest}"}}\n')

    keyless = await run_explain_in_thread(running.admin, "--id", "x")
    wrong = await run_explain_in_thread(
        running.admin, "--id", "x", env={"INTERLINGUA_ADMIN_KEY": "no"}
    )

    elsewhere = await run_explain_in_thread(running.url, "--id", "x")

    assert keyless.exit_code == wrong.exit_code == elsewhere.exit_code == 2
    assert "the admin key is required" in keyless.stderr
    assert "the admin key is required" in wrong.stderr
    assert "x: " not in elsewhere.stderr
    assert "/-/explain: " in elsewhere.stderr


@pytest.mark.parametrize(
    "reply", [make_reply(b"no"), make_reply(b"[]", "404 Not Found"), make_reply(b"[]")]
)
async def test_response_that_is_no_explanation_is_an_error(reply: bytes) -> None:
    async with ScriptedWorker([reply]) as worker:
        result = await run_explain_in_thread(worker.url, "--path", "/nowhere")

    assert result.exit_code == 2
    assert ", and no explanation" in result.stderr


def test_json_output_round_trips_through_the_explanation_type(file: str) -> None:
    result = run_explain(file, "--model", "chat", "--json")

    explanation = msgspec.json.decode(result.output, type=Explanation)
    assert msgspec.json.decode(msgspec.json.encode(explanation)) == json.loads(result.output)
