"""42: invalid API keys (cut, huge, non-ASCII, with SQL in them) all get the same error."""

import asyncio
import hashlib
import hmac
import random
import secrets
import time
from bisect import bisect
from collections.abc import Sequence

import pytest

from gateway.auth.api_keys import Authenticator, Principal
from protocols.core.errors import Unauthorized
from tests.conftest import Serve
from tests.fault.gateway_process import build_config

KEY = "il-" + secrets.token_urlsafe(32)
CONFIGURATION = build_config(
    keys=[{"name": "app", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}],
    listeners=[{"address": "127.0.0.1:0", "protocols": ["openai", "triton"]}],
    limits={"header": "2MiB"},
)
WRONG = {
    "empty": b" ",
    "another": b"il-" + b"a" * 43,
    "cut": KEY[:-1].encode(),
    "longer": KEY.encode() + b"x",
    "upper": KEY.upper().encode(),
    "prefix": b"il-",
    "digest": hashlib.sha256(KEY.encode()).hexdigest().encode(),
    "latin": "schlüssel".encode("latin-1"),
    "utf-8": "ключ🔑".encode(),
    "not utf-8": b"\xff\xfe\x80",
    "sql": b"' OR '1'='1'; DROP TABLE keys; --",
    "format": b"%s%n{0}${jndi:ldap://x}",
    "a megabyte": b"k" * (1 << 20),
    "dots": b"eyJhbGciOiJub25lIn0.e30.",
}
TRIES = 20_000


async def send_with_header(port: int, header: bytes) -> bytes:
    """Send a request with this header and return the raw response."""
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"%s\r\ncontent-length: %d\r\n\r\n%s" % (header, len(body), body)
        )
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


@pytest.mark.fault(42)
@pytest.mark.parametrize("form", [b"authorization: Bearer %s", b"api-key: %s", b"x-api-key: %s"])
async def test_wrong_keys_get_the_same_401_and_are_never_echoed(
    form: bytes, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await serve(CONFIGURATION)
    assert (await send_with_header(gateway.port, form % KEY.encode())).startswith(b"HTTP/1.1 200 ")

    bodies = set[bytes]()
    for name, key in WRONG.items():
        response = await send_with_header(gateway.port, form % key)
        assert response.startswith(b"HTTP/1.1 401 "), (name, response[:200])
        _, _, body = response.partition(b"\r\n\r\n")
        assert b"invalid_api_key" in body or name == "empty", (name, body)
        if name != "empty":
            bodies.add(body)
            assert key not in response
            assert key.decode("latin-1") not in f"{caplog.text}{gateway.records}"
        assert gateway.records[-1].key == ""
    assert len(bodies) == 1, bodies


@pytest.mark.fault(42)
def test_wrong_keys_are_rejected_by_digest_comparison() -> None:
    """Keys are compared by digest, so a common prefix with a valid key makes no difference.

    The printed number is the probability that a key with a valid prefix takes longer than a random
    one: 0.5 if they can't be distinguished. It is not asserted, since load on the machine changes
    it.
    """
    ring = Authenticator([Principal("app", hashlib.sha256(KEY.encode()).hexdigest())])
    near = [KEY[:-1] + secrets.choice("abcdefgh") + "x" for _ in range(TRIES // 2)]
    far = [secrets.token_urlsafe(33)[: len(KEY) + 1] for _ in range(TRIES // 2)]
    times: dict[str, list[int]] = {"near": [], "far": []}
    pairs = [("near", key) for key in near] + [("far", key) for key in far]
    random.Random(42).shuffle(pairs)
    refused = 0

    for kind, key in pairs:
        headers = {"authorization": f"Bearer {key}"}
        began = time.perf_counter_ns()
        try:
            ring.authenticate(headers)
        except Unauthorized:
            refused += 1
        times[kind].append(time.perf_counter_ns() - began)

    assert refused == TRIES

    print(f"near took longer than far: {_longer(times['near'], times['far']):.3f}")  # noqa: T201


def _longer(some: Sequence[int], others: Sequence[int]) -> float:
    """Return the probability that a value of the first sample exceeds the second's."""
    ordered = sorted(others)
    return sum(bisect(ordered, one) for one in some) / (len(some) * len(others))


@pytest.mark.fault(42)
def test_key_digests_are_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    ring = Authenticator([Principal("app", digest.upper())])

    assert ring.authenticate({"api-key": KEY}) is not None
    assert compared == [(digest, digest)]
    with pytest.raises(Unauthorized):
        ring.authenticate({"api-key": KEY[:-1]})
    assert KEY not in repr(vars(ring))
