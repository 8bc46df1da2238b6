"""The client's address is read from the forwarded headers of trusted proxies."""

import pytest

from gateway.http_server.forwarded import find_client
from gateway.http_server.overload import TrustedProxies

TRUSTED = TrustedProxies(("10.0.0.0/8", "2001:db8::/32"))


@pytest.mark.parametrize(
    ("hops", "client"),
    [
        (["192.0.2.7"], "192.0.2.7"),
        (["1.1.1.1", "192.0.2.7"], "192.0.2.7"),
        (["1.1.1.1", "192.0.2.7", "10.0.0.2"], "192.0.2.7"),
        (["1.1.1.1", "192.0.2.7", "2001:db8::2"], "192.0.2.7"),
        (["10.0.0.3", "10.0.0.2"], "10.0.0.3"),
        ([" 192.0.2.7:4711 "], "192.0.2.7"),
        (["[2001:DB9::7]:4711"], "2001:db9::7"),
        (["2001:db9::7"], "2001:db9::7"),
        (["::ffff:192.0.2.7"], "192.0.2.7"),
        (["192.0.2.7", "::ffff:10.0.0.2"], "192.0.2.7"),
        (["192.0.2.7", "unknown"], "10.0.0.1"),
        (["192.0.2.7", "unknown", "10.0.0.2"], "10.0.0.2"),
        (["", ""], "10.0.0.1"),
        (["127.0.0.1\r\nx: y"], "10.0.0.1"),
    ],
)
def test_nearest_address_that_is_no_proxy_is_the_client(hops: list[str], client: str) -> None:
    assert find_client("10.0.0.1", hops, TRUSTED) == client


def test_mapped_addresses_and_sockets_without_address() -> None:
    assert TRUSTED.has("::ffff:10.1.2.3")
    assert not TRUSTED.has("")
    assert not TrustedProxies().has("10.0.0.1")
