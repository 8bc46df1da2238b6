"""CORS: preflight requests are answered, and every response has the right headers."""

import hashlib

import httpx
import pytest

from gateway.config.schema import CorsConfig
from gateway.http_server.cors import CorsPolicy
from tests.conftest import RunningGateway, Serve

APP = "https://app.example"
KEY = "sk-of-a-page"
CONFIG = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai]
    {cors}
backends: {{e: {{kind: echo, script: ["It", " is", " noon"]}}}}
models: {{chat: {{backend: e}}}}
keys: [{{name: page, sha256: "{digest}"}}]
"""
CORS = 'cors: {origins: [https://app.example, "http://localhost:*"], headers: [x-team]}'
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
URL = "/v1/chat/completions"


@pytest.fixture
async def http(serve: Serve) -> httpx.AsyncClient:
    return (await start(serve)).http


async def start(serve: Serve, cors: str = CORS) -> RunningGateway:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    return await serve(CONFIG.format(cors=cors, digest=digest))


async def preflight(
    http: httpx.AsyncClient,
    origin: str = APP,
    method: str = "POST",
    headers: str = "authorization,content-type",
    url: str = URL,
) -> httpx.Response:
    request_headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": headers,
    }
    return await http.options(url, headers=request_headers)


async def chat(
    http: httpx.AsyncClient, origin: str | None, key: str = KEY, *, stream: bool = False
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} | ({"origin": origin} if origin else {})
    return await http.post(URL, headers=headers, json=CHAT | {"stream": stream})


def list_vary(answer: httpx.Response) -> set[str]:
    return {name.strip().lower() for name in answer.headers.get("vary", "").split(",")}


async def test_preflight_of_an_allowed_origin_needs_no_key(http: httpx.AsyncClient) -> None:
    response = await preflight(http)
    assert (response.status_code, response.content) == (204, b"")
    assert response.headers["access-control-allow-origin"] == APP
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == "authorization, content-type"
    assert response.headers["access-control-max-age"] == "600"
    assert "origin" in list_vary(response)
    assert (await preflight(http, url="/nowhere")).status_code == 204


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (APP, True),
        ("http://localhost:5173", True),
        ("http://localhost", True),
        ("https://evil.example", False),
        ("http://app.example", False),
        ("https://app.example.evil", False),
        ("http://localhost.evil.example:80", False),
        ("http://localhost:80.evil", False),
        ("null", False),
    ],
)
async def test_only_configured_origins_pass_a_preflight(
    http: httpx.AsyncClient, origin: str, *, allowed: bool
) -> None:
    response = await preflight(http, origin)
    assert response.status_code == (204 if allowed else 403)
    assert response.headers.get("access-control-allow-origin") == (origin if allowed else None)
    assert "origin" in list_vary(response)


@pytest.mark.parametrize(
    ("method", "headers", "allowed"),
    [
        ("POST", "x-stainless-retry-count,api-key, X-Team", True),
        ("GET", "", True),
        ("DELETE", "openai-organization,x-interlingua-strict", True),
        ("POST", "x-other", False),
        ("PATCH", "", False),
        ("TRACE", "", False),
        ("POST", ",".join(["accept"] * 65), False),
    ],
)
async def test_only_headers_and_methods_of_clients_pass_a_preflight(
    http: httpx.AsyncClient, method: str, headers: str, *, allowed: bool
) -> None:
    response = await preflight(http, method=method, headers=headers)
    assert response.status_code == (204 if allowed else 403)
    assert ("access-control-allow-origin" in response.headers) == allowed

    if allowed and headers:
        names = [name.strip() for name in headers.lower().split(",")]
        assert response.headers["access-control-allow-headers"].split(", ") == names


async def test_options_without_preflight_headers_gets_the_endpoint_response(
    http: httpx.AsyncClient,
) -> None:
    for headers in ({}, {"origin": APP}, {"access-control-request-method": "POST"}):
        response = await http.options(URL, headers=headers)
        assert response.status_code == 405
        assert "access-control-allow-methods" not in response.headers


async def test_responses_name_the_origin_also_if_they_are_errors(http: httpx.AsyncClient) -> None:
    for key, status in ((KEY, 200), ("sk-wrong", 401)):
        response = await chat(http, APP, key)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == APP
        assert "origin" in list_vary(response)
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "openai-processing-ms"} & set(exposed) >= {"x-request-id"}
        assert set(exposed) <= set(response.headers)
    for origin in ("https://evil.example", None):
        response = await chat(http, origin)
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert "origin" in list_vary(response)


async def test_stream_names_the_origin_before_its_first_event(http: httpx.AsyncClient) -> None:
    headers = {"authorization": f"Bearer {KEY}", "origin": APP}
    async with http.stream("POST", URL, headers=headers, json=CHAT | {"stream": True}) as response:
        assert response.headers["access-control-allow-origin"] == APP
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        text = "".join([line async for line in response.aiter_text()])
    assert text.endswith("data: [DONE]\n\n")


async def test_without_cors_no_response_names_an_origin(serve: Serve) -> None:
    http = (await start(serve, cors="")).http
    assert (await preflight(http)).status_code == 405
    for response in (await preflight(http), await chat(http, APP)):
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert "vary" not in response.headers


async def test_any_origin_is_named_by_an_asterisk(serve: Serve) -> None:
    http = (await start(serve, cors='cors: {origins: ["*"], max_age: 1h}')).http
    for response in (await preflight(http, "null"), await chat(http, "https://any.example")):
        assert response.headers["access-control-allow-origin"] == "*"
    assert (await preflight(http)).headers["access-control-max-age"] == "3600"
    assert "vary" not in (await chat(http, None)).headers


@pytest.mark.parametrize(
    ("entry", "origin", "allowed"),
    [
        ("https://*.example.org", "https://a.example.org", True),
        ("https://*.example.org", "https://A.EXAMPLE.org", True),
        ("https://*.example.org", "https://example.org", False),
        ("https://*.example.org", "https://a.b.example.org", False),
        ("https://*.example.org", "https://evil/.example.org", False),
        ("https://a.example", "https://axexample", False),
        ("app://*", "app://obsidian", True),
        ("null", "null", True),
        ("http://[::1]:*", "http://[::1]:3000", True),
        ("https://a.example:8443", "https://a.example", False),
    ],
)
def test_an_asterisk_is_one_label_of_a_host_or_a_port(
    entry: str, origin: str, *, allowed: bool
) -> None:
    assert CorsPolicy(CorsConfig((entry,))).allows_origin(origin) is allowed


def test_any_request_header_may_be_allowed_by_an_asterisk() -> None:
    policy = CorsPolicy(CorsConfig((APP,), headers=("*",)))
    assert policy.build_preflight_headers(APP, "POST", "x-any") is not None
    assert policy.build_preflight_headers(APP, "POST", "x any") is None
    assert policy.build_preflight_headers(APP, "POST", "x-stainless-a b") is None
