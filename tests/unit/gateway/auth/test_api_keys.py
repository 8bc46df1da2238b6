"""A key is read from each header that clients use, and is stored only as a digest."""

import hashlib
from base64 import b64encode

import pytest

from gateway.auth.api_keys import Authenticator, Principal, may_explain
from protocols.core.errors import Unauthorized

KEY = "sk-test"
APP = Principal("app", hashlib.sha256(KEY.encode()).hexdigest(), frozenset({"chat"}))
RING = Authenticator([APP])


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer   {KEY} "},
        {"authorization": "Basic " + b64encode(f"token:{KEY}".encode()).decode()},
        {"api-key": KEY},
        {"x-api-key": KEY},
    ],
)
def test_api_key_is_read_from_every_supported_header(headers: dict[str, str]) -> None:
    assert RING.authenticate(headers) is APP


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}", "x-api-key": "placeholder"},
        {"authorization": "Bearer placeholder", "x-api-key": KEY},
        {"authorization": "Basic !!", "x-api-key": KEY},
        {"api-key": "placeholder", "x-api-key": KEY},
    ],
)
def test_any_of_several_credentials_is_enough(headers: dict[str, str]) -> None:
    assert RING.authenticate(headers) is APP


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "Bearer", "Bearer   ", "Basic ", ""])
@pytest.mark.parametrize("key", [KEY, f"{KEY} ", f" {KEY}", "", "unknown"])
@pytest.mark.parametrize("others", [{}, {"x-api-key": KEY}])
def test_key_that_is_found_early_is_that_of_all_credentials(
    scheme: str, key: str, others: dict[str, str]
) -> None:
    digests = {one: hashlib.sha256(one.encode()).hexdigest() for one in (KEY, f" {KEY}", "")}
    ring = Authenticator([Principal(name, digest) for name, digest in digests.items()])
    text = scheme + key
    headers = {"authorization": text, **others}

    principal = ring.find_principal(headers)

    assert principal is None or principal is ring.authenticate(headers)
    assert (principal is not None) == (text.startswith("Bearer ") and text[7:].strip() == KEY)


class RejectingVerifier:
    """A token verifier that rejects every token."""

    def verify_token(self, token: str, digest: str) -> Principal | None:
        del token, digest
        raise Unauthorized("the token has expired", missing=False)

    async def wait_keys(self) -> None:
        """Return at once."""


def test_invalid_token_does_not_hide_a_valid_key() -> None:
    ring = Authenticator([APP], RejectingVerifier())

    assert ring.authenticate({"authorization": "Bearer a.b.c", "x-api-key": KEY}) is APP
    with pytest.raises(Unauthorized, match="expired"):
        ring.authenticate({"authorization": "Bearer a.b.c", "x-api-key": "no"})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Basic !!"},
        {"authorization": "Basic " + b64encode(b"token").decode()},
    ],
)
def test_request_without_a_key_is_rejected_as_missing_key(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized) as e:
        RING.authenticate(headers)
    assert e.value.missing


@pytest.mark.parametrize("key", ["sk-wrong", "sk-test ' OR 1=1", "ü" * 1000, "\udcff", "x" * 10**6])
def test_error_for_an_unknown_key_does_not_contain_the_key(key: str) -> None:
    with pytest.raises(Unauthorized) as e:
        RING.authenticate({"authorization": f"Bearer {key}"})
    assert not e.value.missing
    assert key not in e.value.message


def test_no_configured_keys_allow_every_request() -> None:
    assert Authenticator([]).authenticate({}) is None
    assert Authenticator([]).allows_anonymous


def test_key_explains_only_with_right() -> None:
    assert may_explain(Principal("app", APP.sha256, explain=True), open_to_all=False)
    assert not may_explain(APP, open_to_all=True)
    assert may_explain(None, open_to_all=True)
    assert not may_explain(None, open_to_all=False)
