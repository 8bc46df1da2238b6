"""A request that takes long to read or to write holds up nobody else (60).

Tokens are counted where the model is, in another process; what is left here is to read a request
and to write it anew, which takes seconds where it has hundreds of thousands of messages.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from backends.chat_template import ChatTemplate
from gateway.pipeline.strategies import ResponseStrategy
from tests.conftest import Running, Serve
from tests.fakes import whole
from tests.fault.fronts import raw
from tests.fault.gateways import written

SAID = whole(b'{"text_output": "Hello", "model_name": "m", "model_version": "1"}')
MANY = [{"role": "user", "content": "hi"}] * 20_000
HINDRANCES = {"read": (ResponseStrategy, "__init__"), "written": (ChatTemplate, "render_prompt")}


class Held:
    """Holds up whoever calls ``where`` for a large request until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: tuple[type[Any], str]) -> None:
        self.begun, self._go = threading.Event(), threading.Event()
        owner, name = where
        real = getattr(owner, name)

        def held(*given: Any) -> Any:
            self.begun.set()
            if not self._go.wait(10):
                raise RuntimeError("nobody else could be served meanwhile")
            return real(*given)

        monkeypatch.setattr(owner, name, held)

    def let_go(self) -> None:
        """Go on, and hold up nobody any more."""
        self._go.set()


async def ask(front: Running, messages: list[dict[str, str]]) -> httpx.Response:
    body = msgspec.json.encode({"model": "m", "messages": messages})
    headers = {"content-type": "application/json"}
    return await front.http.post("/v1/chat/completions", content=body, headers=headers)


@pytest.mark.parametrize("case", HINDRANCES)
async def test_fault_60_what_takes_long_with_a_large_request_is_no_hindrance(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    async with raw([SAID]) as worker:
        pool = {"protocol": "triton", "workers": [worker.url], "chat_template": str(template)}
        text = written(admin=None, backends={"p": pool}, models={"m": {"backend": "p"}})
        front = await serve(text)
        held = Held(monkeypatch, HINDRANCES[case])
        asking = asyncio.create_task(ask(front, MANY))
        assert await asyncio.to_thread(held.begun.wait, 10)
        others = [await front.http.get("/health") for _ in range(5)]
        held.let_go()
        answer = await asking

    assert {one.status_code for one in others} == {httpx.codes.OK}
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    assert worker.requests[-1].body.count(b"hi") == len(MANY)


async def test_fault_60_who_answers_in_anothers_stead_is_no_hindrance_either(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, real = list[bool](), ResponseStrategy.__init__

    def made(*given: Any) -> None:
        where.append(threading.current_thread() is threading.main_thread())
        real(*given)

    monkeypatch.setattr(ResponseStrategy, "__init__", made)
    down = {"kind": "echo", "fail": {"mode": "unavailable"}}
    text = written(
        admin=None,
        backends={"down": down, "up": {"kind": "echo", "script": ["Hello"]}},
        models={"m": {"backend": "down", "fallback": ["n"]}, "n": {"backend": "up"}},
    )
    front = await serve(text)
    for messages in (MANY, MANY[:1]):
        answer = await ask(front, messages)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    assert where == [False, False, True, True]


async def test_fault_60_what_is_wrong_with_a_large_request_is_told(serve: Serve) -> None:
    """It was found in another thread."""
    front = await serve(written(admin=None))
    answer = await ask(front, [*MANY, {"role": "nobody", "content": "hi"}])
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["type"] == "invalid_request_error"
