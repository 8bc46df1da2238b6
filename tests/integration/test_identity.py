"""Tokens of an issuer that answers over HTTP, at a gateway that serves."""

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
from tests.conftest import Running, Serve
from tests.fault.gateways import written
from tests.integration.test_connect_check import certificate, found
from tests.serving import serving

FIRST, SECOND = (rsa.generate_private_key(65537, 2048) for _ in "ab")
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


def page(value: Any) -> bytes:
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def jwks(**keys: Any) -> bytes:
    told = [
        {**RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid}
        for kid, key in keys.items()
    ]
    return page({"keys": told})


class Signer:
    """An issuer: its pages by their paths, and what was asked of it."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.asked.append(path)
            writer.write(self.pages.get(path, NOT_FOUND))
            await writer.drain()

    def token(self, key: Any = FIRST, kid: str = "one", **claims: Any) -> str:
        said = {"iss": self.url, "aud": "gateway", "exp": 4e9, "sub": "ann", "models": "m"}
        return jwt.encode(said | claims, key, "RS256", {"kid": kid})


@asynccontextmanager
async def signer(tls: ssl.SSLContext | None = None) -> AsyncIterator[Signer]:
    made = Signer()
    async with serving(made.answer, tls=tls) as url:
        made.url = url
        made.pages = {
            "/.well-known/openid-configuration": page({"issuer": url, "jwks_uri": f"{url}/keys"}),
            "/keys": jwks(one=FIRST),
        }
        yield made


def identity(url: str, **more: Any) -> dict[str, Any]:
    claims = {"models": "models", "tags": "tags"}
    return {"issuer": url, "audience": ["gateway"], "claims": claims, **more}


async def asked(gateway: Running, key: str, path: str = "/v1/chat/completions") -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    return await gateway.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


async def test_a_token_is_as_good_as_a_key(serve: Serve) -> None:
    """And its keys are found, rotated and refused in the dialect's words."""
    async with signer() as one:
        listeners = [{"address": "127.0.0.1:0", "protocols": ["openai", "databricks"]}]
        gateway = await serve(written(identity=identity(one.url), listeners=listeners))
        assert one.asked == []
        answer = await asked(gateway, one.token())
        assert answer.status_code == 200, answer.text
        assert one.asked == ["/.well-known/openid-configuration", "/keys"]
        assert gateway.records[-1].key == "jwt:ann"
        refused = await asked(gateway, one.token(models="other"))
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"
        assert gateway.records[-1].error == "Forbidden"
        for wrong in (one.token(SECOND), one.token(exp=1), one.token(aud="x"), "eyJ.e.", "sk-x"):
            answer = await asked(gateway, wrong)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert wrong not in answer.text
        spoken = await asked(gateway, one.token(exp=1), "/serving-endpoints/m/invocations")
        assert (spoken.status_code, spoken.json()["message"]) == (401, "the token has expired")
        assert (await gateway.http.get("/v1/models")).status_code == 401
        assert len(one.asked) == 2


async def test_keys_are_served_while_the_issuer_is_away_and_tokens_when_it_is_back(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.auth.jwks._MIN_REFRESH_INTERVAL_EMPTY", 0.2)
    monkeypatch.setattr("gateway.auth.jwks._MIN_REFRESH_INTERVAL", 0.2)
    async with signer() as one:
        pages, one.pages = one.pages, {}
        keys = [{"name": "app", "sha256": hashlib.sha256(b"sk-app").hexdigest()}]
        gateway = await serve(written(identity=identity(one.url), keys=keys))
        assert (await asked(gateway, one.token())).status_code == 401
        assert f"the keys of {one.url} can't be fetched: " in caplog.text
        assert "openid-configuration answers 404" in caplog.text
        assert (await asked(gateway, "sk-app")).status_code == 200
        one.pages = pages
        await asyncio.sleep(0.25)
        assert (await asked(gateway, one.token())).status_code == 200
        rotated = one.token(SECOND, "two")
        assert (await asked(gateway, rotated)).status_code == 401
        one.pages["/keys"] = jwks(one=FIRST, two=SECOND)
        await asyncio.sleep(0.25)
        assert (await asked(gateway, rotated)).status_code == 200


async def fetched(told: dict[str, Any]) -> str:
    """What is said of an issuer that gives no keys."""
    config = load_text(written(identity=told), "gateway.yaml", env={})
    assert isinstance(config.identity, JwtConfig)
    issuer = JwksClient(config.identity, lambda: 0.0)
    await issuer.wait_refresh()
    return "" if issuer.find_key("one", "RS256") else "none"


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("/keys", page(b"{" * 100_000), "the response is not a JWK set"),
        ("/keys", page(b" " * 300_000), "gives more than 262144 bytes"),
        ("/keys", b"HTTP/1.1 302 Found\r\nlocation: /other\r\ncontent-length: 0\r\n\r\n", "302"),
        ("/keys", b"nonsense\r\n\r\n", "can't be fetched"),
        ("/.well-known/openid-configuration", page(b"<html>"), "is not a discovery document"),
        (
            "/.well-known/openid-configuration",
            page({"issuer": "https://evil", "jwks_uri": "https://evil/keys"}),
            "is another's: 'https://evil'",
        ),
    ],
)
async def test_an_issuer_that_answers_something_else(
    path: str, answer: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with signer() as one:
        one.pages[path] = answer
        assert await fetched(identity(one.url)) == "none"
        assert why in caplog.text


async def test_the_connection_check_fetches_the_issuers_keys() -> None:
    async with signer() as one:
        text = written(identity=identity(one.url))
        good = (await found(text))[f"issuer {one.url}"]
        assert (good.state, good.message) == ("ok", "has 1 keys for RS256, ES256")
        one.pages.clear()
        gone = (await found(text))[f"issuer {one.url}"]
        assert gone.state == "error"
        assert gone.message.startswith("cannot fetch its keys: ")


async def test_keys_are_not_fetched_in_the_open_for_an_issuer_behind_tls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pem = certificate(tmp_path, "issuer", days=10)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    async with signer(context) as one:
        told = identity(one.url, tls={"ca": str(pem)})
        assert await fetched(told) == ""
        assert await fetched(identity(one.url)) == "none"
        assert "certificate verify failed" in caplog.text
        there = {"issuer": one.url, "jwks_uri": f"{one.url}/keys".replace("https", "http")}
        one.pages["/.well-known/openid-configuration"] = page(there)
        assert await fetched(told) == "none"
        assert f"has its keys at {there['jwks_uri']!r}" in caplog.text
        assert await fetched({**told, "jwks": f"{one.url}/keys"}) == ""
