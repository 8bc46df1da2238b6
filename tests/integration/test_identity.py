"""JSON Web Tokens of an issuer authenticate requests, over real sockets."""

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from gateway.auth.jwks import JwksClient
from gateway.config.loader import load_text
from gateway.config.schema import JwtConfig
from tests.conftest import RunningGateway, Serve
from tests.fault.gateway_process import build_config
from tests.integration.test_connect_check import collect_findings, create_certificate
from tests.support.tcp_server import run_server

FIRST, SECOND = (rsa.generate_private_key(65537, 2048) for _ in "ab")
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


def build_http_response(value: Any) -> bytes:
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def build_jwks_response(**keys: Any) -> bytes:
    jwks = [
        {**RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid}
        for kid, key in keys.items()
    ]
    return build_http_response({"keys": jwks})


class StubIssuer:
    """An issuer that serves pages by path and records its requests."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.requests.append(path)
            writer.write(self.pages.get(path, NOT_FOUND))
            await writer.drain()

    def token(self, key: Any = FIRST, kid: str = "one", **claims: Any) -> str:
        payload = {"iss": self.url, "aud": "gateway", "exp": 4e9, "sub": "ann", "models": "m"}
        return jwt.encode(payload | claims, key, "RS256", {"kid": kid})


@asynccontextmanager
async def run_issuer(tls: ssl.SSLContext | None = None) -> AsyncIterator[StubIssuer]:
    issuer = StubIssuer()
    async with run_server(issuer.answer, tls=tls) as url:
        issuer.url = url
        issuer.pages = {
            "/.well-known/openid-configuration": build_http_response(
                {"issuer": url, "jwks_uri": f"{url}/keys"}
            ),
            "/keys": build_jwks_response(one=FIRST),
        }
        yield issuer


def build_identity_config(url: str, **fields: Any) -> dict[str, Any]:
    claims = {"models": "models", "tags": "tags"}
    return {"issuer": url, "audience": ["gateway"], "claims": claims, **fields}


async def send_chat(
    gateway: RunningGateway, key: str, path: str = "/v1/chat/completions"
) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    return await gateway.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


async def test_jwt_authenticates_like_an_api_key(serve: Serve) -> None:
    """The issuer's keys are fetched and rotated, and a bad token gets the protocol's own error."""
    async with run_issuer() as one:
        listeners = [{"address": "127.0.0.1:0", "protocols": ["openai", "databricks"]}]
        gateway = await serve(
            build_config(identity=build_identity_config(one.url), listeners=listeners)
        )
        assert one.requests == []

        response = await send_chat(gateway, one.token())
        assert response.status_code == 200, response.text
        assert one.requests == ["/.well-known/openid-configuration", "/keys"]
        assert gateway.records[-1].key == "jwt:ann"

        refused = await send_chat(gateway, one.token(models="other"))
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"
        assert gateway.records[-1].error == "Forbidden"

        for wrong in (one.token(SECOND), one.token(exp=1), one.token(aud="x"), "eyJ.e.", "sk-x"):
            response = await send_chat(gateway, wrong)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert wrong not in response.text
        spoken = await send_chat(gateway, one.token(exp=1), "/serving-endpoints/m/invocations")
        assert (spoken.status_code, spoken.json()["message"]) == (401, "the token has expired")
        assert (await gateway.http.get("/v1/models")).status_code == 401
        assert len(one.requests) == 2


async def test_api_keys_work_during_an_issuer_outage_and_jwts_after_its_recovery(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.auth.jwks._MIN_REFRESH_INTERVAL_EMPTY", 0.2)
    monkeypatch.setattr("gateway.auth.jwks._MIN_REFRESH_INTERVAL", 0.2)
    async with run_issuer() as one:
        pages, one.pages = one.pages, {}
        keys = [{"name": "app", "sha256": hashlib.sha256(b"sk-app").hexdigest()}]
        gateway = await serve(build_config(identity=build_identity_config(one.url), keys=keys))

        assert (await send_chat(gateway, one.token())).status_code == 401
        assert f"the keys of {one.url} can't be fetched: " in caplog.text
        assert "openid-configuration answers 404" in caplog.text
        assert (await send_chat(gateway, "sk-app")).status_code == 200

        one.pages = pages
        await asyncio.sleep(0.25)
        assert (await send_chat(gateway, one.token())).status_code == 200

        rotated = one.token(SECOND, "two")
        assert (await send_chat(gateway, rotated)).status_code == 401

        one.pages["/keys"] = build_jwks_response(one=FIRST, two=SECOND)
        await asyncio.sleep(0.25)
        assert (await send_chat(gateway, rotated)).status_code == 200


async def refresh_keys(fields: dict[str, Any]) -> str:
    """Return the error of fetching this issuer's keys."""
    config = load_text(build_config(identity=fields), "gateway.yaml", env={})
    assert isinstance(config.identity, JwtConfig)
    issuer = JwksClient(config.identity, lambda: 0.0)
    await issuer.wait_refresh()
    return "" if issuer.find_key("one", "RS256") else "none"


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("/keys", build_http_response(b"{" * 100_000), "the response is not a JWK set"),
        ("/keys", build_http_response(b" " * 300_000), "gives more than 262144 bytes"),
        ("/keys", b"HTTP/1.1 302 Found\r\nlocation: /other\r\ncontent-length: 0\r\n\r\n", "302"),
        ("/keys", b"nonsense\r\n\r\n", "can't be fetched"),
        (
            "/.well-known/openid-configuration",
            build_http_response(b"<html>"),
            "is not a discovery document",
        ),
        (
            "/.well-known/openid-configuration",
            build_http_response({"issuer": "https://evil", "jwks_uri": "https://evil/keys"}),
            "is another's: 'https://evil'",
        ),
    ],
)
async def test_invalid_issuer_response_yields_no_keys_and_is_logged(
    path: str, answer: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_issuer() as one:
        one.pages[path] = answer
        assert await refresh_keys(build_identity_config(one.url)) == "none"
        assert why in caplog.text


async def test_the_connection_check_fetches_the_issuers_keys() -> None:
    async with run_issuer() as one:
        text = build_config(identity=build_identity_config(one.url))
        good = (await collect_findings(text))[f"issuer {one.url}"]
        assert (good.state, good.message) == ("ok", "has 1 keys for RS256, ES256")

        one.pages.clear()
        gone = (await collect_findings(text))[f"issuer {one.url}"]
        assert gone.state == "error"
        assert gone.message.startswith("cannot fetch its keys: ")


async def test_jwks_of_an_https_issuer_is_not_fetched_over_http(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pem = create_certificate(tmp_path, "issuer", days=10)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    async with run_issuer(context) as one:
        config = build_identity_config(one.url, tls={"ca": str(pem)})
        assert await refresh_keys(config) == ""
        assert await refresh_keys(build_identity_config(one.url)) == "none"
        assert "certificate verify failed" in caplog.text

        there = {"issuer": one.url, "jwks_uri": f"{one.url}/keys".replace("https", "http")}
        one.pages["/.well-known/openid-configuration"] = build_http_response(there)
        assert await refresh_keys(config) == "none"
        assert f"has its keys at {there['jwks_uri']!r}" in caplog.text
        assert await refresh_keys({**config, "jwks": f"{one.url}/keys"}) == ""
