"""Whatever is wrong with the request, its key, its path or the worker: W41 to W54."""

import gzip
import re

import msgspec

from gateway.conformance.cases import KEY, Case
from gateway.conformance.openai.shapes import (
    CHAT,
    HI,
    chat,
    failed,
    invalid,
    refused,
    talk,
    whole,
)

BODY = msgspec.json.encode({"model": "mock", "messages": [HI]})
BASIC = "Basic dG9rZW46c2stdGVzdA=="
SECONDS = re.compile(r"[1-9]\d*")
URL = re.compile(r"Invalid URL \(POST .*/v1/nope\)")


def keyed(id: str, **headers: str | None) -> Case:  # noqa: A002 - a Case's field
    """C with a key that is told otherwise."""
    told = {name.replace("_", "-"): text for name, text in headers.items()}
    return Case(id, "POST", CHAT, {"authorization": None} | told, BODY, body_is=whole())


def junk(id: str, body: bytes) -> Case:  # noqa: A002 - as above
    """A body that can't be read."""
    return Case(
        id, "POST", CHAT, body=body, **invalid(None, None, re.compile("We could not parse .*"))
    )


BODIES = (
    chat("W41", given={"foo": 1}, body_is=whole(), answer_headers={"x-interlingua-loss": None}),
    chat("W41 ignored", given={"foo": 1}, needs={"unknown": "ignore"}, body_is=whole()),
    chat(
        "W41 rejected",
        given={"foo": 1},
        needs={"unknown": "reject"},
        **invalid("unknown_parameter", "foo", "Unrecognized request argument supplied: foo"),
    ),
    junk("W42", b"{"),
    junk("W42 empty", b""),
    junk("W42 NaN", BODY[:-1] + b',"temperature":NaN}'),
    junk("W42 Infinity", BODY[:-1] + b',"temperature":Infinity}'),
    junk("W42 lone surrogate", BODY[:-1] + b',"user":"\\ud800"}'),
    junk("W42 no UTF-8", BODY[:-1] + b',"user":"\xff"}'),
    junk("W42 too deep", BODY[:-1] + b',"metadata":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    junk("W42 cut off", BODY[:-1]),
    Case("W42 two alike", "POST", CHAT, body=b'{"model":"none",' + BODY[1:], body_is=whole()),
    junk("W42 a mark in front", b"\xef\xbb\xbf" + BODY),
    junk("W43", b"[]"),
    junk("W43 a string", b'"mock"'),
    junk("W43 null", b"null"),
    Case("W44", "POST", CHAT, {"content-type": None}, BODY, body_is=whole()),
    Case(
        "W44 as a form",
        "POST",
        CHAT,
        {"content-type": "application/x-www-form-urlencoded"},
        BODY,
        body_is=whole(),
    ),
    Case(
        "W44 compressed",
        "POST",
        CHAT,
        {"content-encoding": "gzip"},
        gzip.compress(BODY),
        body_is=whole(),
    ),
    chat(
        "W45",
        given={"model": "none"},
        **refused(404, "model_not_found", "model", re.compile("The model `none` does not .*")),
    ),
    chat("W45 missing", given={"model": None}, **invalid("missing_required_parameter", "model")),
    chat("W45 empty", given={"model": ""}, **invalid("missing_required_parameter", "model")),
    chat("W45 a number", given={"model": 5}, **invalid("invalid_type", "model")),
)

KEYS = (
    chat(
        "W46",
        headers={"authorization": None},
        answer_headers={"www-authenticate": "Bearer"},
        **refused(401, None),
    ),
    chat(
        "W47",
        headers={"authorization": "Bearer sk-wrong-in-the-middle-0001"},
        **refused(401, "invalid_api_key", message=re.compile("(?!.*middle).*")),
    ),
    keyed("W48", api_key=KEY),
    keyed("W48 x-api-key", x_api_key=KEY),
    keyed("W48 basic", authorization=BASIC),
    keyed("W48 lower case", authorization=f"bearer {KEY}"),
)

PLACES = (
    Case(
        "W49",
        "GET",
        CHAT,
        answer_headers={"allow": "POST"},
        **refused(405, "method_not_supported"),
    ),
    Case("W50", "POST", "/v1/nope", body=BODY, **refused(404, "unknown_url", message=URL)),
    Case("W50 slash at the end", "POST", f"{CHAT}/", body=BODY, body_is=whole()),
    Case("W50 query", "POST", f"{CHAT}?api-version=1", body=BODY, body_is=whole()),
)

WORKERS = (
    chat(
        "W51",
        given={"model": "mock-down"},
        answer_headers={"retry-after": SECONDS},
        **failed(503, "service_unavailable"),
    ),
    chat("W52", given={"model": "mock-500"}, **failed(502, "bad_gateway")),
    chat("W52 later", given={"model": "mock-midfail"}, **failed(502, "bad_gateway")),
    chat("W52 cut", given={"model": "mock-cut"}, **failed(502, "bad_gateway")),
    chat(
        "W53",
        given={"model": "mock-429"},
        answer_headers={"retry-after": "2"},
        **failed(429, "rate_limit_exceeded", "requests"),
    ),
    chat(
        "W54",
        given={"model": "mock-ctx", "messages": [{"role": "user", "content": "word " * 20}]},
        **invalid("context_length_exceeded", "messages", re.compile(".*20.*8.*")),
    ),
    talk("W54 fits", {"role": "user", "content": "word " * 8}, body_is=whole(prompt=8)),
)

CASES = (*BODIES, *KEYS, *PLACES, *WORKERS)
