import copy

import msgspec
import pytest

from protocols.core import units
from protocols.core.units import (
    SCALAR_TYPES,
    RateValue,
    Secret,
    get_client_network,
    has_dot_segment,
)


@pytest.mark.parametrize(
    ("unit", "text", "value", "written"),
    [
        ("duration", "500ms", 0.5, "0.5s"),
        ("duration", "2s", 2.0, "2s"),
        ("duration", "1.5s", 1.5, "1.5s"),
        ("duration", "90s", 90.0, "90s"),
        ("duration", "10m", 600.0, "10m"),
        ("duration", "60m", 3600.0, "1h"),
        ("duration", "0s", 0.0, "0s"),
        ("keep", "90d", 90 * 86400, "90d"),
        ("keep", "36h", 36 * 3600, "36h"),
        ("keep", "48h", 2 * 86400, "2d"),
        ("size", "512B", 512, "512B"),
        ("size", "16KiB", 16384, "16KiB"),
        ("size", "8MiB", 8 << 20, "8MiB"),
        ("size", "1GB", 10**9, "1GB"),
        ("size", "1000kB", 10**6, "1MB"),
        ("size", "1TiB", 1 << 40, "1TiB"),
        ("rate", "10/s", RateValue(10, 1), "10/s"),
        ("rate", "600/min", RateValue(600, 60), "600/min"),
        ("rate", "200k/h", RateValue(200_000, 3600), "200k/h"),
        ("rate", "5000k/day", RateValue(5_000_000, 86400), "5M/day"),
        ("budget", "5M/day", 5_000_000, "5M/day"),
        ("budget", "1500/day", 1500, "1500/day"),
        ("budget", "1000G/day", 10**12, "1000G/day"),
        ("weight", "90", 90, 90),
        ("weight", "90%", 90, 90),
        ("model", "*", "*", "*"),
        ("model", "openai/*", "openai/*", "openai/*"),
        ("model", "org/name:tag_1.0-x", "org/name:tag_1.0-x", "org/name:tag_1.0-x"),
        ("header", "X-User-Id", "X-User-Id", "X-User-Id"),
        ("sticky", "header:X-User-Id", "header:x-user-id", "header:x-user-id"),
        ("sticky", "body:User Name", "body:User Name", "body:User Name"),
        ("sticky", "key", "key", "key"),
        ("sticky", "address", "address", "address"),
        ("digest", "AB" * 32, "ab" * 32, "ab" * 32),
        ("prefix", "/a/b.c", "/a/b.c", "/a/b.c"),
        ("address", "LOCALHOST:80", "localhost:80", "localhost:80"),
        ("address", "[::1]:0", "[::1]:0", "[::1]:0"),
        ("worker", "HTTP://w", "HTTP://w", "HTTP://w"),
        ("worker", "https://w.example:1/base/", "https://w.example:1/base", None),
        ("worker", "http://localhost:8001", "http://localhost:8001", None),
        ("worker", "http://my_service-1:80", "http://my_service-1:80", None),
        ("origin", "https://App.example:443", "https://app.example", None),
        ("origin", "http://localhost:*", "http://localhost:*", None),
        ("origin", "https://*.example.org:8443", "https://*.example.org:8443", None),
        ("origin", "http://[::1]", "http://[::1]", None),
        ("origin", "*", "*", None),
        ("device", "cuda:1", "cuda:1", "cuda:1"),
        ("place", "w.local:8000", "w.local:8000", "w.local:8000"),
        ("service", "_http._tcp.w.svc", "_http._tcp.w.svc", "_http._tcp.w.svc"),
        ("nameserver", "10.0.0.2", "10.0.0.2", "10.0.0.2"),
        ("nameserver", "[::1]:5353", "[::1]:5353", "[::1]:5353"),
        ("network", "10.0.0.0/8", "10.0.0.0/8", "10.0.0.0/8"),
        ("network", "2001:db8::1", "2001:db8::1/128", "2001:db8::1/128"),
        ("collector", "http://c:4318/", "http://c:4318", None),
        ("share", "20%", 0.2, "20%"),
        ("share", "0.5", 0.5, "50%"),
        ("weights", "package:m", "package:m", "package:m"),
        ("file", "a.pem", "a.pem", "a.pem"),
    ],
)
def test_unit_is_parsed_and_formatted(unit: str, text: str, value: object, written: object) -> None:
    parsed = SCALAR_TYPES[unit].parse(text)
    assert parsed == value
    assert type(parsed) is type(value)
    if written is not None:
        assert SCALAR_TYPES[unit].format_value(parsed) == written
        assert SCALAR_TYPES[unit].parse(str(written)) == value


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        *[
            ("duration", text)
            for text in ("", "2", "s", "2 s", "-1s", "1e3s", "2S", "1h30m", "\u0661s")
        ],
        *[("duration", text) for text in ("169h", "999999999h", "2s\n")],
        *[
            ("size", text)
            for text in ("", "8", "8M", "8Mib", "8 MiB", "1.5GiB", "-1B", "0B", "2TiB")
        ],
        *[("keep", text) for text in ("", "90", "0d", "1.5d", "90m", "100000d", "1 d")],
        *[("rate", text) for text in ("", "5", "0/s", "5/m", "5 /s", "1.5/s", "5K/s", "1001G/s")],
        *[("budget", text) for text in ("", "5M", "0/day", "5M/h", "1001G/day")],
        *[("weight", text) for text in ("", "-1", "1.5", "101%", "10000000", "+5", "\u0665")],
        *[("model", text) for text in ("", "a b", "a..b", "a@1", "ü", "a" * 201, "a\n", "**")],
        *[("name", text) for text in ("", "a/b", "a:b", "a" * 101)],
        *[("digest", text) for text in ("", "ab" * 31, "xy" * 32, "ab" * 33)],
        *[("prefix", text) for text in ("", "/", "a", "/a/", "//a", "/a//b", "/.", "/..", "/a?b")],
        *[("address", text) for text in ("", ":", "a", "a:", "a:-1", "a b:1", "1.2.3:80", "[a]:1")],
        *[
            ("origin", text)
            for text in ("", "a.example", "https://a/", "https://*.*", "http://a:x")
        ],
        *[("device", text) for text in ("", "CPU", "cuda:", "cuda:1:2")],
        *[("worker", text) for text in ("", "http:", "//w", "http://w:0", "http://w//a", "w:80")],
        *[("worker", text) for text in ("http://[", "http://u@w", "http://w?a", "http:///a")],
        *[("worker", text) for text in ("http://1.2.3", "http://169.254.1.1", "http://w:")],
        *[("place", text) for text in ("", "w", "w:", "w:0", "w:65536", "1.2.3:1")],
        *[("service", text) for text in ("", "a b", "1.2.3")],
        *[("network", text) for text in ("", "10.0.0.1/8", "10.0.0.0/33", "proxy.local")],
        *[("nameserver", text) for text in ("", "dns.local", "dns.local:53", "10.0.0:53")],
        *[("collector", text) for text in ("", "http://u:p@c", "ftp://c")],
        *[("share", text) for text in ("", "101%", "1.5", "-1", "x")],
        *[("header", text) for text in ("", "a b", "a:", "ü")],
        *[("sticky", text) for text in ("", "header:", "body:", "user", "cookie:a")],
        ("weights", ""),
    ],
)
def test_invalid_unit_text_raises_value_error(unit: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        SCALAR_TYPES[unit].parse(text)


def test_bearer_token_with_invalid_header_characters_is_rejected() -> None:
    assert units.parse_bearer_token("sk-1").reveal() == "sk-1"
    for text in ("", "a b", "a\n", "ü"):
        with pytest.raises(ValueError, match="no header may have"):
            units.parse_bearer_token(text)


def test_timeout_of_zero_is_rejected() -> None:
    assert units.parse_timeout("1ms") == 0.001
    with pytest.raises(ValueError, match="more than 0s"):
        units.parse_timeout("0s")


def test_secret_is_hidden_except_through_reveal() -> None:
    secret = Secret("canary")
    shown = (repr(secret), str(secret), f"{secret}", f"{secret!r:>5}", f"{secret:>9}")

    assert not any("canary" in text for text in shown)
    assert "canary" not in repr({"a": [secret]})
    assert secret.reveal() == "canary"
    assert type(secret.reveal()) is str
    assert copy.deepcopy(secret).reveal() == "canary"
    with pytest.raises(TypeError):
        msgspec.json.encode(secret)


@pytest.mark.parametrize("name", [".", "..", "./a", "a/..", "%2e.", "%25252E%252f", "a%5C.."])
def test_a_dot_segment_is_found_plain_and_encoded(name: str) -> None:
    assert has_dot_segment(name)


@pytest.mark.parametrize("name", ["", "...", "a.b", "a..b", ".a/b.", "%2f", "100%"])
def test_other_dots_are_no_dot_segment(name: str) -> None:
    assert not has_dot_segment(name)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
        ("2001:db8::1", b"\x20\x01\x0d\xb8\x00\x00\x00\x00"),
        ("fe80::1%eth0", b"\xfe\x80\x00\x00\x00\x00\x00\x00"),
        ("", ""),
    ],
)
def test_client_network_is_an_ipv4_address_or_an_ipv6_network(
    address: str, network: str | bytes
) -> None:
    assert get_client_network(address) == network


def test_header_value_is_ascii_text_and_a_secret() -> None:
    value = units.parse_header_value("My app 1")
    assert (value.reveal(), repr(value)) == ("My app 1", "***")
    for text in ("", " a", "a ", "é", "a\r\nb"):
        with pytest.raises(ValueError, match="has characters beyond ASCII"):
            units.parse_header_value(text)
