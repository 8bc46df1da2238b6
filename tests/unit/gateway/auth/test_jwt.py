"""JSON Web Tokens are verified with real signatures, of an issuer with scripted responses."""

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
CONFIG = JwtConfig(
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
    "iss": CONFIG.issuer,
    "aud": "gateway",
    "exp": NOW + 600,
    "sub": "ann",
    "models": ["chat", "gpt"],
    "realm": {"groups": "beta staff"},
}


def make_jwk(key: Any, algorithm: Any, **fields: Any) -> dict[str, Any]:
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), **fields}


def make_key_set(*keys: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"keys": keys})


EVERY = make_key_set(
    make_jwk(RSA, RSAAlgorithm, kid="r"),
    make_jwk(CURVE, ECAlgorithm, kid="e", alg="ES256", use="sig"),
    make_jwk(EDWARDS, OKPAlgorithm, kid="o"),
    make_jwk(SHORT, RSAAlgorithm, kid="short"),
)


def sign_token(
    key: Any = RSA, algorithm: str = "RS256", kid: str | None = "r", **claims: Any
) -> str:
    """Build a signed token; claims of None are left out."""
    payload = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    with warnings.catch_warnings(action="ignore", category=InsecureKeyLengthWarning):
        return jwt.encode(payload, key, algorithm, {} if kid is None else {"kid": kid})


class JwtTestBench:
    """An issuer with scripted responses, a clock, and a verifier."""

    def __init__(self, config: JwtConfig = CONFIG, answer: bytes | Exception = EVERY) -> None:
        self.answer = answer
        self.request_count = 0
        self.time = 0.0
        self.issuer = JwksClient(config, lambda: self.time, self._fetch)
        names = {"gpt": "chat-model"}
        self.tokens = JwtVerifier(config, names, self.issuer, lambda: NOW + self.time)
        self.hold: asyncio.Event | None = None

    async def _fetch(self) -> bytes:
        self.request_count += 1
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def holder(self, token: str) -> Principal | None:
        """Verify a token like the server does and return its principal."""
        digest = hashlib.sha256(token.encode()).hexdigest()
        try:
            return self.tokens.verify_token(token, digest)
        except KeysPending:
            await self.tokens.wait_keys()
        return self.tokens.verify_token(token, digest)

    async def refused(self, token: str) -> str:
        with pytest.raises(Unauthorized) as excinfo:
            await self.holder(token)
        assert not excinfo.value.missing
        assert token not in excinfo.value.message
        return excinfo.value.message


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"),
    [(RSA, "RS256", "r"), (CURVE, "ES256", "e"), (EDWARDS, "EdDSA", "o")],
)
async def test_valid_token_is_accepted(key: Any, algorithm: str, kid: str) -> None:
    principal = await JwtTestBench().holder(sign_token(key, algorithm, kid))
    assert principal == Principal(
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
async def test_claims_set_the_models_and_tags_of_the_principal(
    claims: dict[str, Any], models: set[str] | None, tags: set[str]
) -> None:
    principal = await JwtTestBench().holder(sign_token(**claims))
    assert principal is not None
    assert principal.models == models
    assert principal.tags == tags


async def test_token_without_configured_claims_is_valid_for_every_model() -> None:
    principal = await JwtTestBench(replace(CONFIG, claims=JwtClaimsConfig())).holder(sign_token())
    assert principal == Principal("jwt:ann", "")


def replace_token_part(part: int, text: str) -> str:
    """Return a valid token with one part replaced."""
    parts = sign_token().split(".")
    return ".".join([*parts[:part], text, *parts[part + 1 :]])


def encode_part(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


NONE = (
    encode_part(b'{"alg":"none","kid":"r"}') + "." + encode_part(msgspec.json.encode(CLAIMS)) + "."
)
PUBLIC = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
SECRET = encode_part(b'{"alg":"HS256","kid":"r"}') + "." + encode_part(msgspec.json.encode(CLAIMS))
CONFUSED = f"{SECRET}.{encode_part(hmac.digest(PUBLIC, SECRET.encode(), 'sha256'))}"
"""Algorithm confusion: the public key is used as a shared secret."""
DEEP = encode_part(b'{"alg":' + b"[" * 3000)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (sign_token(exp=NOW - 30), "the token has expired"),
        (sign_token(exp=None), "the token has no exp claim"),
        (sign_token(exp="soon"), "the token has an invalid exp or nbf claim"),
        (sign_token(exp=True), "the token has an invalid exp or nbf claim"),
        (sign_token(exp=float("nan")), "the token has an invalid exp or nbf claim"),
        (sign_token(nbf=NOW + 31), "the token is not valid yet"),
        (sign_token(aud="other"), "the token has another audience"),
        (sign_token(aud=None), "the token has no aud claim"),
        (sign_token(iss="https://evil.example.com"), "the token has another issuer"),
        (sign_token(iss=None), "the token has no iss claim"),
        (sign_token(sub=None), "the token has no valid name claim"),
        (sign_token(sub="a\nb"), "the token has no valid name claim"),
        (sign_token(sub="a" * 201), "the token has no valid name claim"),
        (sign_token(kid="unknown"), "the token's signing key is unknown"),
        (sign_token(kid=None), "the token's signing key is unknown"),
        (sign_token(CURVE, "ES256", "r"), "the token's signing key is unknown"),
        (sign_token(rsa.generate_private_key(65537, 2048)), "the token's signature is invalid"),
        (sign_token(SHORT, kid="short"), "the token's signature is invalid"),
        (sign_token(algorithm="RS512"), "the token's signing algorithm is not allowed"),
        (NONE, "the token's signing algorithm is not allowed"),
        (CONFUSED, "the token's signing algorithm is not allowed"),
        (replace_token_part(0, "eyJh"), "the token is malformed"),
        (replace_token_part(0, DEEP), "the token is malformed"),
        (replace_token_part(0, encode_part(b'{"alg":"RS256","kid":5}')), "the token is malformed"),
        (
            replace_token_part(0, encode_part(b'{"alg":["RS256"]}')),
            "the token's signing algorithm is not allowed",
        ),
        (replace_token_part(1, encode_part(b"[]")), "the token's signature is invalid"),
        (replace_token_part(2, ""), "the token's signature is invalid"),
    ],
)
async def test_invalid_token_is_rejected_with_a_reason(token: str, why: str) -> None:
    assert await JwtTestBench().refused(token) == why


async def test_clock_skew_within_the_leeway_is_accepted() -> None:
    assert await JwtTestBench().holder(sign_token(exp=NOW - 29, nbf=NOW + 29))


@pytest.mark.parametrize(
    "key",
    [
        "sk-plain",
        "a.b.c",
        sign_token() + ".x",
        "eyJh.é.c",
        sign_token(note="x" * 9000),
        "eyJ" * 300_000,
    ],
)
async def test_value_that_is_not_a_jwt_is_ignored_without_a_jwks_request(key: str) -> None:
    stage = JwtTestBench()
    assert await stage.holder(key) is None
    assert stage.request_count == 0


# --- caching of tokens ----------------------------------------------------------------------------


async def test_verified_token_is_cached_until_its_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, token = JwtTestBench(), sign_token(exp=NOW + 100)
    first = await stage.holder(token)
    monkeypatch.setattr(jwt, "decode", None)

    assert await stage.holder(token) is first

    monkeypatch.undo()
    stage.time = 130.0
    assert await stage.refused(token) == "the token has expired"


async def test_token_cache_evicts_the_oldest_entry_at_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.auth.jwt._MAX_CACHED_TOKENS", 2)
    stage = JwtTestBench()
    tokens = [sign_token(sub=name) for name in "abc"]

    first, second, third = [await stage.holder(token) for token in tokens]

    assert await stage.holder(tokens[2]) is third
    assert await stage.holder(tokens[1]) is second
    assert await stage.holder(tokens[0]) is not first


async def test_token_of_a_revoked_signing_key_is_rejected() -> None:
    stage, token = JwtTestBench(), sign_token()
    assert await stage.holder(token)

    stage.answer = make_key_set(make_jwk(CURVE, ECAlgorithm, kid="e"))
    stage.time = 40.0
    assert await stage.refused(sign_token(kid="new")) != ""
    assert await stage.refused(token) == "the token's signing key is unknown"


# --- requests to the issuer -----------------------------------------------------------------------


async def test_unknown_key_id_refreshes_the_jwks_after_the_minimum_interval() -> None:
    stage = JwtTestBench(answer=make_key_set(make_jwk(CURVE, ECAlgorithm, kid="e")))
    assert await stage.holder(sign_token(CURVE, "ES256", "e"))

    stage.answer = EVERY
    stage.time = 29.0
    assert await stage.refused(sign_token())
    assert stage.request_count == 1

    stage.time = 30.0
    assert await stage.holder(sign_token())
    assert stage.request_count == 2


async def test_many_unknown_key_ids_cause_one_jwks_request_per_30_seconds() -> None:
    stage = JwtTestBench()
    for n in range(50):
        await stage.refused(sign_token(kid=f"k{n}"))
        stage.time += 1.0
    assert stage.request_count == 2


async def test_concurrent_requests_share_one_jwks_request() -> None:
    stage = JwtTestBench()
    stage.hold = asyncio.Event()
    tokens = [sign_token(sub=f"n{n}") for n in range(20)]

    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(stage.holder(token)) for token in tokens]
        await asyncio.sleep(0.01)
        stage.hold.set()

    assert [task.result() and task.result().name for task in waiting] == [  # type: ignore[union-attr]
        f"jwt:n{n}" for n in range(20)
    ]
    assert stage.request_count == 1


async def test_stale_keys_are_refreshed_in_the_background() -> None:
    stage = JwtTestBench()
    assert await stage.holder(sign_token())

    stage.time, stage.hold = 300.0, asyncio.Event()
    assert stage.tokens.verify_token(other := sign_token(sub="bob"), "d") is not None

    await asyncio.sleep(0)
    assert stage.request_count == 2

    stage.hold.set()
    await stage.issuer.wait_refresh()
    assert stage.tokens.verify_token(other, "d") is not None


@pytest.mark.parametrize("why", [OSError("no route"), TimeoutError(), RecursionError("deep")])
async def test_cached_keys_stay_valid_until_max_stale_while_the_issuer_is_down(
    why: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stage = JwtTestBench(replace(CONFIG, jwks_max_stale=3600.0))
    assert await stage.holder(sign_token())

    stage.answer = why
    stage.time = 3500.0
    assert await stage.holder(sign_token(sub="bob", exp=NOW + 10_000))

    await stage.issuer.wait_refresh()
    assert await stage.holder(sign_token(sub="eve", exp=NOW + 10_000))
    assert stage.request_count == 2
    assert "the keys of https://login.example.com can't be fetched: " in caplog.text

    stage.time = 3600.0
    assert await stage.refused(sign_token(sub="bob", exp=NOW + 10_000))
    assert "its keys are too old" in caplog.text

    stage.answer = EVERY
    stage.time = 3660.0
    assert await stage.holder(sign_token(sub="bob", exp=NOW + 10_000))


async def test_failed_first_jwks_request_is_retried_sooner() -> None:
    stage = JwtTestBench(answer=b"<html>")
    assert await stage.refused(sign_token())

    stage.time = 4.0
    assert await stage.refused(sign_token())
    assert stage.request_count == 1

    stage.time, stage.answer = 5.0, EVERY
    assert await stage.holder(sign_token())


async def test_closing_the_jwks_client_rejects_waiting_requests() -> None:
    stage = JwtTestBench()
    stage.hold = asyncio.Event()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(stage.refused(sign_token()))
        await asyncio.sleep(0.01)
        await stage.issuer.aclose()

    assert task.result()

    await stage.issuer.aclose()


# --- formats of keys ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the response is not a JWK set"),
        (b"\xff", "the response is not a JWK set"),
        (b'{"keys": [1]}', "the response is not a JWK set"),
        (make_key_set(), "it has no key for RS256"),
        (make_key_set({"kty": "oct", "k": "c2VjcmV0", "kid": "r"}), "it has no key for RS256"),
        (make_key_set({"kty": "oct", "k": "c2VjcmV0", "alg": "RS256"}), "it has no key for RS256"),
        (make_key_set({"kty": "RSA", "n": "!", "e": "AQAB"}), "it has no key for RS256"),
        (make_key_set(make_jwk(RSA, RSAAlgorithm, use="enc")), "it has no key for RS256"),
        (make_key_set(make_jwk(RSA, RSAAlgorithm, alg="RS512")), "it has no key for RS256"),
    ],
)
def test_jwks_without_a_usable_key_is_rejected(body: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_key_set(body, ["RS256"])


async def test_single_key_is_used_for_a_token_without_a_key_id() -> None:
    stage = JwtTestBench(answer=make_key_set(make_jwk(RSA, RSAAlgorithm)))
    assert await stage.holder(sign_token(kid=None))


# --- tokens and API keys together -----------------------------------------------------------------


async def test_api_keys_and_tokens_are_both_accepted() -> None:
    stage = JwtTestBench()
    app = Principal("app", hashlib.sha256(b"sk-app").hexdigest())
    ring = Authenticator([app], stage.tokens)
    token = {"authorization": f"Bearer {sign_token()}"}

    with pytest.raises(KeysPending):
        ring.authenticate(token)

    await ring.wait_keys()
    holder = ring.authenticate(token)
    assert holder is not None
    assert ring.authenticate(token) is holder
    with pytest.raises(Unauthorized):
        ring.authenticate({"api-key": sign_token(exp=1)})
    assert ring.authenticate({"api-key": "sk-app"}) is app
    with pytest.raises(Unauthorized, match="not known"):
        ring.authenticate({"api-key": "sk-other"})


def test_jwt_only_configuration_rejects_requests_without_a_token() -> None:
    with pytest.raises(Unauthorized) as excinfo:
        Authenticator([], JwtTestBench().tokens).authenticate({})
    assert excinfo.value.missing
