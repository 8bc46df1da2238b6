"""What a worse version does wrong, and the guardrail that rolls it back."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import Serve
from tests.integration.test_rollout import CONFIG, send_until, show_status
from tests.support.fakes import CHUNKED, END, ScriptedWorker, chunk, make_reply

_GUARDRAILS: Final = """
        errors: {max_increase: 5%}
        completion_tokens_p50: {max_increase: 20%}
        compare:
          json_valid: {max_decrease: 5%}
          tool_calls: {max_decrease: 5%}
          tool_arguments: {max_decrease: 5%}
          stop_strings: {max_decrease: 5%}
          not_truncated: {max_decrease: 5%}
          not_refused: {max_decrease: 5%}
          not_empty: {max_decrease: 5%}"""
_TOOLS: Final = {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]}
_BARE_TOOLS: Final = {"tools": [{"type": "function", "function": {"name": "look"}}]}
_GOOD_TEXT: Final = {"message": {"role": "assistant", "content": "It is dawn"}}


def make_call(arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"message": message, "finish_reason": "tool_calls"}


def make_answer(choice: dict[str, Any] | None, tokens: int = 3) -> bytes:
    choices = [] if choice is None else [{"index": 0, "finish_reason": "stop", **choice}]
    usage = {"prompt_tokens": 4, "completion_tokens": tokens, "total_tokens": 4 + tokens}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
    return make_reply(json.dumps({**body, "choices": choices, "usage": usage}).encode())


GOOD: Final = make_answer(_GOOD_TEXT)


def say(text: str, tokens: int = 3, **more: object) -> bytes:
    return make_answer({"message": {"role": "assistant", "content": text}, **more}, tokens)


@pytest.mark.parametrize(
    ("fields", "answers", "reason"),
    [
        pytest.param({}, (GOOD, say("")), "not_empty: 100.0% → 0.0%", id="empty text"),
        pytest.param({}, (GOOD, make_answer(None)), "errors: 0.0% → 100.0%", id="no choice"),
        pytest.param(
            {}, (GOOD, say("It", finish_reason="length")), "not_truncated: 100.0% → 0.0%", id="cut"
        ),
        pytest.param(
            {}, (GOOD, say("I'm sorry, but I can't help with that.")), "not_refused: 100.0% → 0.0%",
            id="refused",
        ),
        pytest.param(
            {"stop": ["dawn"]}, (say("It is "), say("It is dawn")), "stop_strings: 100.0% → 0.0%",
            id="stop string ignored",
        ),
        pytest.param(
            {}, (GOOD, make_answer(_GOOD_TEXT, 6)), "completion_tokens_p50: 3 → 6 tokens",
            id="twice the tokens",
        ),
        pytest.param(
            _TOOLS, (make_answer(make_call("{}")), GOOD), "tool_calls: 100.0% → 0.0%",
            id="no tool called",
        ),
        pytest.param(
            _TOOLS, (make_answer(make_call("{}")), make_answer(make_call('{"a'))),
            "tool_arguments: 100.0% → 0.0%", id="arguments are no JSON",
        ),
        pytest.param(
            _BARE_TOOLS, (make_answer(make_call("{}")), make_answer(make_call('{"a'))),
            "tool_arguments: 100.0% → 0.0%", id="arguments are no JSON, of a tool without a schema",
        ),
    ],
)  # fmt: skip
async def test_version_with_a_fault_is_rolled_back_by_the_guardrail_on_it(
    serve: Serve, tmp_path: Path, fields: dict[str, Any], answers: tuple[bytes, bytes], reason: str
) -> None:
    """Version 1 gives the first answer to each request, and version 2 the second one."""
    good, bad = answers
    async with ScriptedWorker([good]) as old, ScriptedWorker([bad]) as new:
        text = CONFIG.format(old=old.url, new=new.url, file=tmp_path / "u.sqlite", more="")
        text = text.replace("{errors: {max_increase: 5%}}", _GUARDRAILS)
        text = text.replace("[20, 50, 100]", "[50, 100]").replace("requests: 30", "requests: 9999")
        gateway = await serve(text)
        await send_until(gateway, lambda versions: not versions["2"], fields)
        code, printed = await show_status(tmp_path, text)
    assert code == 0
    assert printed.startswith(f"chat@2: rolled back\n  {reason}")


async def test_streams_of_a_version_that_end_at_once_are_empty(
    serve: Serve, tmp_path: Path
) -> None:
    """Version 2 sends the end of a stream without a text, with the status 200."""
    async with (
        ScriptedWorker(make_stream("It is dawn")) as old,
        ScriptedWorker(make_stream("")) as new,
    ):
        text = CONFIG.format(old=old.url, new=new.url, file=tmp_path / "u.sqlite", more="")
        text = text.replace("{errors: {max_increase: 5%}}", _GUARDRAILS)
        text = text.replace("[20, 50, 100]", "[50, 100]").replace("requests: 30", "requests: 9999")
        gateway = await serve(text)
        await send_until(gateway, lambda versions: not versions["2"], {"stream": True})
        _, printed = await show_status(tmp_path, text)
    assert "rolled back\n  not_empty: 100.0% → 0.0%" in printed


def make_stream(text: str) -> list[bytes]:
    deltas = [{"content": text}] if text else []
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": one, "finish_reason": None} for one in deltas
    ]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    chunks = [{"id": "x", "object": "chat.completion.chunk", "choices": [one]} for one in choices]
    lines = [f"data: {json.dumps(one)}\n\n".encode() for one in chunks]
    return [CHUNKED, *map(chunk, lines), chunk(b"data: [DONE]\n\n"), END]
