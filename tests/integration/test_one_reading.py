"""The gateway and its worker read one request in the same way, however it is written.

A key that may use one model sends names twice, in other spellings and in other characters: it
reaches no other model, and the worker gets nothing that it could read otherwise.
"""

import asyncio
import hashlib
import json
from typing import Any, Final

import pytest

from tests.conftest import RunningGateway, Serve
from tests.support.fakes import ScriptedWorker, make_reply

CONFIG: Final = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends:
  w: {{protocol: openai, workers: ["{url}"], health: {{interval: 1h}}, retries: {{max: 0}}}}
models: {{mock: {{backend: w}}, secret: {{backend: w}}}}
keys: [{{name: one, sha256: "{digest}", models: [mock]}}]
"""
ANSWER: Final = make_reply(
    b'{"id":"1","object":"chat.completion","created":1,"model":"mock","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"fine"},"finish_reason":"stop"}]}'
)
MESSAGES: Final = '"messages":[{"role":"user","content":"hi"}]'


async def serve_worker(serve: Serve, worker: ScriptedWorker) -> RunningGateway:
    digest = hashlib.sha256(b"sk-one").hexdigest()
    return await serve(CONFIG.format(url=worker.url, digest=digest))


def read_both_ways(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The body as servers read it that use the first, and the last, of equal names."""

    def keep_first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(reversed(pairs))

    return json.loads(body, object_pairs_hook=keep_first), json.loads(body)


@pytest.mark.parametrize("is_escaped", [False, True], ids=["plain", "escaped"])
@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("model", '"secret"', '"mock"'),
        ("model", '"mock"', '"secret"'),
        ("stream", "true", "false"),
        ("n", "5", "1"),
        ("max_tokens", "9", "5"),
        ("tools", "[]", "null"),
        ("messages", "[]", '[{"role":"user","content":"hi"}]'),
    ],
)
async def test_name_that_stands_twice_is_read_once(
    serve: Serve, name: str, first: str, last: str, *, is_escaped: bool
) -> None:
    """The last one counts, also for the worker; or the request is refused."""
    again = f'"\\u{ord(name[0]):04x}{name[1:]}"' if is_escaped else f'"{name}"'
    rest = "" if name == "messages" else f",{MESSAGES}"
    model = "" if name == "model" else '"model":"mock",'
    body = f'{{{model}"{name}":{first},{again}:{last}{rest}}}'
    async with ScriptedWorker([ANSWER]) as worker:
        gateway = await serve_worker(serve, worker)
        headers = {"authorization": "Bearer sk-one", "content-type": "application/json"}
        response = await gateway.http.post("/v1/chat/completions", content=body, headers=headers)
        received = [one.body for one in worker.requests if one.body]

    if last == '"secret"':
        assert (response.status_code, received) == (404, [])
    else:
        assert response.status_code == 200
        [sent] = received
        by_first, by_last = read_both_ways(sent)
        assert by_first == by_last
        assert by_last["model"] == "mock"
        assert by_last.get(name) == json.loads(last)


@pytest.mark.parametrize(
    "name",
    [
        "\uff4d\uff4f\uff43\uff4b",
        "mock\u200b",
        "\ufeffmock",
        "mo\u00adck",
        "m\u043eck",
        "MOCK",
        "mock ",
        "mock\x00",
        "mock\x00secret",
        "mock/../secret",
        "secret\u2044..",
        "\u202ekcom",
        "\ud800mock",
        ["mock"],
        {"mock": 1},
    ],
    ids=ascii,
)
async def test_model_name_that_only_looks_like_another_reaches_no_worker(
    serve: Serve, name: object
) -> None:
    async with ScriptedWorker([ANSWER]) as worker:
        gateway = await serve_worker(serve, worker)
        body = f'{{"model":{json.dumps(name)},{MESSAGES}}}'
        headers = {"authorization": "Bearer sk-one", "content-type": "application/json"}
        response = await gateway.http.post("/v1/chat/completions", content=body, headers=headers)

        assert response.status_code in (400, 404)
        assert not any(one.body for one in worker.requests)


async def send(port: int, data: bytes) -> bytes:
    """Send bytes and return what comes until the gateway closes the connection, or for a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await reader.readline()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


HEAD: Final = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
KEY: Final = b"Authorization: Bearer sk-one\r\n"
BODY: Final = b'{"model":"mock",' + MESSAGES.encode() + b"}"
LENGTH: Final = b"Content-Length: %d\r\n" % len(BODY)
DIGITS: Final = "".join(chr(0x0660 + int(digit)) for digit in str(len(BODY))).encode()
WIDE_DIGITS: Final = "".join(chr(0xFF10 + int(digit)) for digit in str(len(BODY))).encode()


@pytest.mark.parametrize(
    "headers",
    [
        KEY + b"Content-Length: " + DIGITS + b"\r\n",
        KEY + b"Content-Length: " + WIDE_DIGITS + b"\r\n",
        KEY + b"Content-Length: %d\xc2\xa0\r\n" % len(BODY),
        KEY + b"Content-Length: \xb2\r\n",
        KEY + b"Content-Length: 1_0\r\n",
        KEY + b"Content-Length:\xe2\x80\x8b%d\r\n" % len(BODY),
        KEY + LENGTH + b"Tran\xc5\xbffer-Encoding: chunked\r\n",
        KEY + b"Transfer-Encoding: chun\xe2\x84\xaaed\r\n",
        KEY + b"Transfer-Encoding: \x85chunked\r\n",
        KEY + LENGTH + b"Content\xe2\x80\x90Length: 5\r\n",
        KEY + LENGTH + b"Ho\xc5\xbft: other\r\n",
    ],
    ids=ascii,
)
async def test_header_in_other_characters_is_refused(serve: Serve, headers: bytes) -> None:
    """Digits and letters that some languages take for others, in what frames a request."""
    async with ScriptedWorker([ANSWER]) as worker:
        gateway = await serve_worker(serve, worker)
        status = await send(gateway.port, HEAD + headers + b"\r\n" + BODY)

        assert status.split(b" ")[1:2] in ([b"400"], [b"411"], [b"501"])
        assert not any(one.body for one in worker.requests)


@pytest.mark.parametrize(
    "header",
    [
        b"Authorization: Bearer\xc2\xa0sk-one",
        b"Authorization: Bearer sk-one\xc2\xa0",
        b"Authorization: Bearer \xef\xbd\x93k-one",
        b"Authorization: Bearer sk-one\xe2\x80\x8b",
        b"Authorization: \xe2\x84\xaaearer sk-one",
        b"Authorization: Bearer sk-one, Bearer sk-one",
        b"X-Api-Key: sk\xe2\x80\x90one",
    ],
    ids=ascii,
)
async def test_key_in_other_characters_is_no_key(serve: Serve, header: bytes) -> None:
    async with ScriptedWorker([ANSWER]) as worker:
        gateway = await serve_worker(serve, worker)
        status = await send(gateway.port, HEAD + LENGTH + header + b"\r\n\r\n" + BODY)

        assert status.split(b" ")[1] in (b"400", b"401")
        assert not any(one.body for one in worker.requests)
