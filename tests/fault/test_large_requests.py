"""A request that takes long to decode or encode does not delay others (60).

Tokens are counted in the engine's process; decoding and encoding remain, and take seconds for a
request with hundreds of thousands of messages.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from backends.chat_template import ChatTemplate
from gateway.pipeline.strategies import TargetAttempt
from tests.conftest import RunningGateway, Serve
from tests.fault.gateway_process import build_config
from tests.fault.protocol_clients import create_raw_worker
from tests.support.fakes import make_reply

REPLY = make_reply(b'{"text_output": "Hello", "model_name": "m", "model_version": "1"}')
MANY = [{"role": "user", "content": "hi"}] * 19_000
HINDRANCES = {"read": (TargetAttempt, "prepare"), "written": (ChatTemplate, "render_prompt")}


class BlockedCall:
    """Blocks calls of ``where`` for a large request until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: tuple[type[Any], str]) -> None:
        self.begun, self._go = threading.Event(), threading.Event()
        owner, name = where
        real = getattr(owner, name)

        def held(*args: Any, **named: Any) -> Any:
            self.begun.set()
            if not self._go.wait(30):
                raise RuntimeError("nobody else could be served meanwhile")
            return real(*args, **named)

        monkeypatch.setattr(owner, name, held)

    def release(self) -> None:
        """Release the call, and block no more."""
        self._go.set()


async def send_chat(gateway: RunningGateway, messages: list[dict[str, str]]) -> httpx.Response:
    body = msgspec.json.encode({"model": "m", "messages": messages})
    headers = {"content-type": "application/json"}
    return await gateway.http.post("/v1/chat/completions", content=body, headers=headers)


@pytest.mark.fault(60)
@pytest.mark.parametrize("case", HINDRANCES)
async def test_large_request_processing_does_not_block_the_event_loop(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")

    async with create_raw_worker([REPLY]) as worker:
        pool = {"protocol": "triton", "workers": [worker.url], "chat_template": str(template)}
        text = build_config(admin=None, backends={"p": pool}, models={"m": {"backend": "p"}})
        gateway = await serve(text)
        held = BlockedCall(monkeypatch, HINDRANCES[case])
        task = asyncio.create_task(send_chat(gateway, MANY))

        assert await asyncio.to_thread(held.begun.wait, 10)

        others = [await gateway.http.get("/health") for _ in range(5)]
        held.release()
        response = await task

    assert {one.status_code for one in others} == {httpx.codes.OK}
    assert response.status_code == httpx.codes.OK, response.text
    assert response.json()["choices"][0]["message"]["content"] == "Hello"
    assert worker.requests[-1].body.count(b"hi") == len(MANY)


@pytest.mark.fault(60)
async def test_fallback_of_a_large_request_does_not_block_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, real = list[bool](), TargetAttempt.prepare

    def build_request(*args: Any, **about: Any) -> TargetAttempt:
        where.append(threading.current_thread() is threading.main_thread())
        return real(*args, **about)

    monkeypatch.setattr(TargetAttempt, "prepare", build_request)
    down = {"kind": "echo", "fail": {"mode": "unavailable"}}
    text = build_config(
        admin=None,
        backends={"down": down, "up": {"kind": "echo", "script": ["Hello"]}},
        models={"m": {"backend": "down", "fallback": ["n"]}, "n": {"backend": "up"}},
    )
    gateway = await serve(text)

    for messages in (MANY, MANY[:1]):
        response = await send_chat(gateway, messages)
        assert response.json()["choices"][0]["message"]["content"] == "Hello"

    assert where == [False, False, True, True]


@pytest.mark.fault(60)
async def test_invalid_large_request_returns_400(serve: Serve) -> None:
    """The error is found in another thread."""
    gateway = await serve(build_config(admin=None))
    response = await send_chat(gateway, [*MANY, {"role": "nobody", "content": "hi"}])

    assert response.status_code == httpx.codes.BAD_REQUEST
    assert response.json()["error"]["type"] == "invalid_request_error"
