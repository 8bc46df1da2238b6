"""Whose token it is: by real signatures, of an issuer whose every answer is scripted."""

import asyncio
import base64
import hashlib
import hmac
import warnings
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from jwt.warnings import InsecureKeyLengthWarning
from msgspec.structs import replace

from gateway.auth.api_keys import Authenticator, KeysPending, Principal
from gateway.auth.jwks import JwksClient, parse_key_set
from gateway.auth.jwt import JwtVerifier
from gateway.config.schema import JwtClaimsConfig, JwtConfig
from protocols.core.errors import Unauthorized

NOW = 1_700_000_000.0
TOLD = JwtConfig(
    issuer="https://login.example.com",
    audience=("gateway",),
    algorithms=("RS256", "ES256", "EdDSA"),
    claims=JwtClaimsConfig(models="models", tags="realm.groups"),
)
RSA = rsa.generate_private_key(65537, 2048)
SHORT = rsa.generate_private_key(65537, 1024)  # noqa: S505 - it is to be refused
CURVE = ec.generate_private_key(ec.SECP256R1())
EDWARDS = ed25519.Ed25519PrivateKey.generate()
CLAIMS: dict[str, Any] = {
    "iss": TOLD.issuer,
    "aud": "gateway",
    "exp": NOW + 600,
    "sub": "ann",
    "models": ["chat", "gpt"],
    "realm": {"groups": "beta staff"},
}


def public(key: Any, algorithm: Any, **more: Any) -> dict[str, Any]:
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), **more}


def jwks(*keys: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"keys": keys})


EVERY = jwks(
    public(RSA, RSAAlgorithm, kid="r"),
    public(CURVE, ECAlgorithm, kid="e", alg="ES256", use="sig"),
    public(EDWARDS, OKPAlgorithm, kid="o"),
    public(SHORT, RSAAlgorithm, kid="short"),
)


def signed(key: Any = RSA, algorithm: str = "RS256", kid: str | None = "r", **claims: Any) -> str:
    """A token; what is None is left out."""
    said = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    with warnings.catch_warnings(action="ignore", category=InsecureKeyLengthWarning):
        return jwt.encode(said, key, algorithm, {} if kid is None else {"kid": kid})


class Stage:
    """An issuer that answers as it is told, a clock, and who verifies."""

    def __init__(self, told: JwtConfig = TOLD, answer: bytes | Exception = EVERY) -> None:
        self.answer = answer
        self.asked = 0
        self.time = 0.0
        self.issuer = JwksClient(told, lambda: self.time, self._fetch)
        names = {"gpt": "chat-model"}
        self.tokens = JwtVerifier(told, names, self.issuer, lambda: NOW + self.time)
        self.hold: asyncio.Event | None = None

    async def _fetch(self) -> bytes:
        self.asked += 1
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def holder(self, token: str) -> Principal | None:
        """As the server asks."""
        digest = hashlib.sha256(token.encode()).hexdigest()
        try:
            return self.tokens.verify_token(token, digest)
        except KeysPending:
            await self.tokens.wait_keys()
        return self.tokens.verify_token(token, digest)

    async def refused(self, token: str) -> str:
        with pytest.raises(Unauthorized) as caught:
            await self.holder(token)
        assert not caught.value.missing
        assert token not in caught.value.message
        return caught.value.message


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"),
    [(RSA, "RS256", "r"), (CURVE, "ES256", "e"), (EDWARDS, "EdDSA", "o")],
)
async def test_a_good_token(key: Any, algorithm: str, kid: str) -> None:
    found = await Stage().holder(signed(key, algorithm, kid))
    assert found == Principal(
        "jwt:ann", "", frozenset({"chat", "chat-model"}), tags=frozenset({"beta", "staff"})
    )


@pytest.mark.parametrize(
    ("claims", "models", "tags"),
    [
        ({"models": "chat other", "realm": None}, {"chat", "other"}, set()),
        ({"models": ["*"], "realm": {"groups": ["a", 5, "no tag", "b"]}}, None, {"a", "b"}),
        ({"models": None, "realm": "text"}, set(), set()),
        ({"models": {"chat": 1}, "realm.groups": "direct"}, set(), {"direct"}),
    ],
)
async def test_what_a_token_says_of_its_holder(
    claims: dict[str, Any], models: set[str] | None, tags: set[str]
) -> None:
    found = await Stage().holder(signed(**claims))
    assert found is not None
    assert found.models == models
    assert found.tags == tags


async def test_without_such_claims_it_is_good_for_every_model() -> None:
    found = await Stage(replace(TOLD, claims=JwtClaimsConfig())).holder(signed())
    assert found == Principal("jwt:ann", "")


def broken(part: int, text: str) -> str:
    """A good token with another part."""
    parts = signed().split(".")
    return ".".join([*parts[:part], text, *parts[part + 1 :]])


def part(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


NONE = part(b'{"alg":"none","kid":"r"}') + "." + part(msgspec.json.encode(CLAIMS)) + "."
PUBLIC = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
SECRET = part(b'{"alg":"HS256","kid":"r"}') + "." + part(msgspec.json.encode(CLAIMS))
CONFUSED = f"{SECRET}.{part(hmac.digest(PUBLIC, SECRET.encode(), 'sha256'))}"
"""The public key as if it were a secret that both sides have."""
DEEP = part(b'{"alg":' + b"[" * 3000)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (signed(exp=NOW - 30), "the token has expired"),
        (signed(exp=None), "the token has no exp claim"),
        (signed(exp="soon"), "the token has an invalid exp or nbf claim"),
        (signed(exp=True), "the token has an invalid exp or nbf claim"),
        (signed(exp=float("nan")), "the token has an invalid exp or nbf claim"),
        (signed(nbf=NOW + 31), "the token is not valid yet"),
        (signed(aud="other"), "the token has another audience"),
        (signed(aud=None), "the token has no aud claim"),
        (signed(iss="https://evil.example.com"), "the token has another issuer"),
        (signed(iss=None), "the token has no iss claim"),
        (signed(sub=None), "the token has no valid name claim"),
        (signed(sub="a\nb"), "the token has no valid name claim"),
        (signed(sub="a" * 201), "the token has no valid name claim"),
        (signed(kid="unknown"), "the token's signing key is unknown"),
        (signed(kid=None), "the token's signing key is unknown"),
        (signed(CURVE, "ES256", "r"), "the token's signing key is unknown"),
        (signed(rsa.generate_private_key(65537, 2048)), "the token's signature is invalid"),
        (signed(SHORT, kid="short"), "the token's signature is invalid"),
        (signed(algorithm="RS512"), "the token's signing algorithm is not allowed"),
        (NONE, "the token's signing algorithm is not allowed"),
        (CONFUSED, "the token's signing algorithm is not allowed"),
        (broken(0, "eyJh"), "the token is malformed"),
        (broken(0, DEEP), "the token is malformed"),
        (broken(0, part(b'{"alg":"RS256","kid":5}')), "the token is malformed"),
        (broken(0, part(b'{"alg":["RS256"]}')), "the token's signing algorithm is not allowed"),
        (broken(1, part(b"[]")), "the token's signature is invalid"),
        (broken(2, ""), "the token's signature is invalid"),
    ],
)
async def test_a_token_that_is_no_good(token: str, why: str) -> None:
    assert await Stage().refused(token) == why


async def test_clocks_may_be_apart_by_the_leeway() -> None:
    assert await Stage().holder(signed(exp=NOW - 29, nbf=NOW + 29))


@pytest.mark.parametrize(
    "key",
    ["sk-plain", "a.b.c", signed() + ".x", "eyJh.é.c", signed(note="x" * 9000), "eyJ" * 300_000],
)
async def test_what_is_no_token_is_nobodys_and_nobody_is_asked(key: str) -> None:
    stage = Stage()
    assert await stage.holder(key) is None
    assert stage.asked == 0


# --- what is remembered ---------------------------------------------------------------------------


async def test_a_known_token_is_looked_up_until_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, token = Stage(), signed(exp=NOW + 100)
    first = await stage.holder(token)
    monkeypatch.setattr(jwt, "decode", None)
    assert await stage.holder(token) is first
    monkeypatch.undo()
    stage.time = 130.0
    assert await stage.refused(token) == "the token has expired"


async def test_so_many_are_remembered_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.auth.jwt._MAX_CACHED_TOKENS", 2)
    stage = Stage()
    tokens = [signed(sub=name) for name in "abc"]
    first, second, third = [await stage.holder(token) for token in tokens]
    assert await stage.holder(tokens[2]) is third
    assert await stage.holder(tokens[1]) is second
    assert await stage.holder(tokens[0]) is not first


async def test_a_token_of_a_key_that_was_taken_back_is_no_good_any_more() -> None:
    stage, token = Stage(), signed()
    assert await stage.holder(token)
    stage.answer = jwks(public(CURVE, ECAlgorithm, kid="e"))
    stage.time = 40.0
    assert await stage.refused(signed(kid="new")) != ""
    assert await stage.refused(token) == "the token's signing key is unknown"


# --- when the issuer is asked ---------------------------------------------------------------------


async def test_a_new_key_is_found_by_one_more_look() -> None:
    stage = Stage(answer=jwks(public(CURVE, ECAlgorithm, kid="e")))
    assert await stage.holder(signed(CURVE, "ES256", "e"))
    stage.answer = EVERY
    stage.time = 29.0
    assert await stage.refused(signed())
    assert stage.asked == 1
    stage.time = 30.0
    assert await stage.holder(signed())
    assert stage.asked == 2


async def test_a_flood_of_unknown_keys_is_one_look_in_half_a_minute() -> None:
    stage = Stage()
    for n in range(50):
        await stage.refused(signed(kid=f"k{n}"))
        stage.time += 1.0
    assert stage.asked == 2


async def test_many_that_come_at_once_wait_for_one_look() -> None:
    stage = Stage()
    stage.hold = asyncio.Event()
    tokens = [signed(sub=f"n{n}") for n in range(20)]
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(stage.holder(token)) for token in tokens]
        await asyncio.sleep(0.01)
        stage.hold.set()
    assert [task.result() and task.result().name for task in asking] == [  # type: ignore[union-attr]
        f"jwt:n{n}" for n in range(20)
    ]
    assert stage.asked == 1


async def test_old_keys_are_fetched_behind_a_request_that_does_not_wait() -> None:
    stage = Stage()
    assert await stage.holder(signed())
    stage.time, stage.hold = 300.0, asyncio.Event()
    assert stage.tokens.verify_token(other := signed(sub="bob"), "d") is not None
    await asyncio.sleep(0)
    assert stage.asked == 2
    stage.hold.set()
    await stage.issuer.wait_refresh()
    assert stage.tokens.verify_token(other, "d") is not None


@pytest.mark.parametrize("why", [OSError("no route"), TimeoutError(), RecursionError("deep")])
async def test_while_the_issuer_is_gone_its_keys_are_good_for_so_long(
    why: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(replace(TOLD, jwks_max_stale=3600.0))
    assert await stage.holder(signed())
    stage.answer = why
    stage.time = 3500.0
    assert await stage.holder(signed(sub="bob", exp=NOW + 10_000))
    await stage.issuer.wait_refresh()
    assert await stage.holder(signed(sub="eve", exp=NOW + 10_000))
    assert stage.asked == 2
    assert "the keys of https://login.example.com can't be fetched: " in caplog.text
    stage.time = 3600.0
    assert await stage.refused(signed(sub="bob", exp=NOW + 10_000))
    assert "its keys are too old" in caplog.text
    stage.answer = EVERY
    stage.time = 3660.0
    assert await stage.holder(signed(sub="bob", exp=NOW + 10_000))


async def test_without_keys_from_the_start_it_is_asked_again_sooner() -> None:
    stage = Stage(answer=b"<html>")
    assert await stage.refused(signed())
    stage.time = 4.0
    assert await stage.refused(signed())
    assert stage.asked == 1
    stage.time, stage.answer = 5.0, EVERY
    assert await stage.holder(signed())


async def test_when_it_is_let_go_whoever_waits_is_refused() -> None:
    stage = Stage()
    stage.hold = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(stage.refused(signed()))
        await asyncio.sleep(0.01)
        await stage.issuer.aclose()
    assert asking.result()
    await stage.issuer.aclose()


# --- keys, as they are written --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the response is not a JWK set"),
        (b"\xff", "the response is not a JWK set"),
        (b'{"keys": [1]}', "the response is not a JWK set"),
        (jwks(), "it has no key for RS256"),
        (jwks({"kty": "oct", "k": "c2VjcmV0", "kid": "r"}), "it has no key for RS256"),
        (jwks({"kty": "oct", "k": "c2VjcmV0", "alg": "RS256"}), "it has no key for RS256"),
        (jwks({"kty": "RSA", "n": "!", "e": "AQAB"}), "it has no key for RS256"),
        (jwks(public(RSA, RSAAlgorithm, use="enc")), "it has no key for RS256"),
        (jwks(public(RSA, RSAAlgorithm, alg="RS512")), "it has no key for RS256"),
    ],
)
def test_sets_that_verify_nothing(body: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_key_set(body, ["RS256"])


async def test_a_lone_key_needs_no_name() -> None:
    stage = Stage(answer=jwks(public(RSA, RSAAlgorithm)))
    assert await stage.holder(signed(kid=None))


# --- beside keys ----------------------------------------------------------------------------------


async def test_keys_and_tokens_stand_side_by_side() -> None:
    stage = Stage()
    app = Principal("app", hashlib.sha256(b"sk-app").hexdigest())
    ring = Authenticator([app], stage.tokens)
    token = {"authorization": f"Bearer {signed()}"}
    with pytest.raises(KeysPending):
        ring.authenticate(token)
    await ring.wait_keys()
    holder = ring.authenticate(token)
    assert holder is not None
    assert ring.authenticate(token) is holder
    with pytest.raises(Unauthorized):
        ring.authenticate({"api-key": signed(exp=1)})
    assert ring.authenticate({"api-key": "sk-app"}) is app
    with pytest.raises(Unauthorized, match="not known"):
        ring.authenticate({"api-key": "sk-other"})


def test_with_tokens_alone_nobody_is_let_in_without() -> None:
    with pytest.raises(Unauthorized) as caught:
        Authenticator([], Stage().tokens).authenticate({})
    assert caught.value.missing
