"""A web page of another origin can't use a listener without API keys, whatever it sends."""

import asyncio
import hashlib
from typing import Any

import httpx
import pytest

from tests.conftest import RunningGateway, Serve

URL = "/v1/chat/completions"
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
CONFIG = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai]
    {more}
backends: {{e: {{kind: echo, script: [noon]}}}}
models: {{chat: {{backend: e}}}}
{keys}
"""


async def start(serve: Serve, settings: str = "", keys: str = "") -> RunningGateway:
    return await serve(CONFIG.format(more=settings, keys=keys))


async def ask(http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await http.post(URL, json=CHAT, headers=headers)


async def test_request_without_origin_is_served(serve: Serve) -> None:
    assert (await ask((await start(serve)).http)).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", ""])
async def test_pages_of_other_origins_are_refused_without_keys(serve: Serve, origin: str) -> None:
    gateway = await start(serve)
    answers = [
        await ask(gateway.http, origin=origin),
        await gateway.http.get("/v1/models", headers={"origin": origin}),
        # a browser sends this request without a preflight
        await gateway.http.post(
            URL, content=b"{}", headers={"origin": origin, "content-type": "text/plain"}
        ),
    ]

    assert [answer.status_code for answer in answers] == [403] * 3
    assert "allow the origin in the listener's `cors`, or configure keys" in answers[0].text
    assert gateway.records == []


async def test_own_and_allowed_origins_are_served(serve: Serve) -> None:
    gateway = await start(serve, settings="cors: {origins: [https://app.example]}")
    own = gateway.url

    answers = [
        await ask(gateway.http, origin=origin)
        for origin in (own, "https://app.example", "https://evil.example")
    ]

    assert [answer.status_code for answer in answers] == [200, 200, 403]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1", 200), ("127.9.9.9:1", 200),
        ("[::1]:8000", 200), ("chat.localhost", 200), ("gateway.example", 200),
        ("Gateway.Example:8000", 200),
        ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("notlocalhost", 403),
        ("192.168.0.1", 403), ("x@localhost", 403),
    ],
)  # fmt: skip
async def test_host_must_name_this_machine_without_keys(
    serve: Serve, host: str, status: int
) -> None:
    gateway = await start(serve, settings="allowed_hosts: [gateway.example]")
    response = await ask(gateway.http, host=host)

    assert response.status_code == status
    if status == 403:
        assert "`allowed_hosts`" in response.text


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/v1/models", "localhost", 200),
        ("http://localhost:80/v1/models", "evil.example", 200),
        ("http://evil.example/v1/models", "localhost", 403),
        ("HTTP://EVIL.example:80/v1/models", "localhost", 403),
        ("http://evil.example?/v1/models", "localhost", 403),
        ("http://evil.example#/v1/models", "localhost", 403),
        ("http://localhost@evil.example/v1/models", "localhost", 400),
        ("http://localhost\\@evil.example/v1/models", "localhost", 400),
        ("http://?/v1/models", "localhost", 400),
        ("/v1/models", "", 403),
    ],
)
async def test_host_of_an_absolute_target_counts_instead_of_the_header(
    serve: Serve, target: str, host: str, status: int
) -> None:
    """RFC 9112, 3.2.2: the header Host is ignored then."""
    gateway = await start(serve)
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(gateway.url).port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(30):
        line = await reader.readline()
    writer.close()

    assert line.startswith(f"HTTP/1.1 {status} ".encode())


async def test_page_of_a_rebound_name_is_refused(serve: Serve) -> None:
    """DNS rebinding: the origin is the listener's, but the host name is not this machine's."""
    gateway = await start(serve)
    response = await ask(gateway.http, host="evil.example", origin="http://evil.example")

    assert response.status_code == 403


async def test_any_host_may_be_allowed(serve: Serve) -> None:
    gateway = await start(serve, settings='allowed_hosts: ["*"]')

    assert (await ask(gateway.http, host="evil.example")).status_code == 200


async def test_keys_are_enough(serve: Serve) -> None:
    digest = hashlib.sha256(b"sk-1").hexdigest()
    gateway = await start(serve, keys=f'keys: [{{name: k, sha256: "{digest}"}}]')
    headers: dict[str, Any] = {"origin": "https://evil.example", "host": "evil.example"}

    assert (await ask(gateway.http, **headers)).status_code == 401
    assert (await ask(gateway.http, authorization="Bearer sk-1", **headers)).status_code == 200


@pytest.mark.parametrize("name", ["Origin", "X-Api-Key", "Api-Key", "Content-Type"])
async def test_second_header_that_servers_may_read_differently_is_refused(
    serve: Serve, name: str
) -> None:
    gateway = await start(serve)
    response = await gateway.http.get("/v1/models", headers=[(name, "a"), (name.lower(), "b")])

    assert response.status_code == 400
    assert f"at most one header {name}" in response.text
