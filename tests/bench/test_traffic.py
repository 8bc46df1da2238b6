"""Varied requests are distinct, reproducible by seed, and like those of real clients."""

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from tests.bench import traffic
from tests.bench.gateways import (
    FROM_MINDIE,
    FROM_TRITON,
    OPENAI,
    REPEATED_MODEL,
    TO_TRITON,
    ProtocolPair,
)
from tests.bench.loads import (
    BODY_SIZES,
    KEYS,
    MODELS,
    STYLE_BURSTS,
    Form,
    Traffic,
    make_model_names,
)
from tests.bench.responses import STYLES
from tests.bench.traffic import COUNT, PROMPT, Request

PAIRS = (OPENAI, TO_TRITON, FROM_TRITON, FROM_MINDIE)
EVERY = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: str(pair.name))
FORMS = pytest.mark.parametrize("form", ["unary", "stream"])


def parse_headers(request: Request) -> Mapping[str, str]:
    return dict(line.lower().split(": ", 1) for line in request.headers)


def make_varied_requests(pair: ProtocolPair, form: Form = "unary") -> Sequence[Request]:
    return pair.make_requests(Traffic(), form)


@EVERY
@FORMS
def test_varied_requests_are_distinct(pair: ProtocolPair, form: Form) -> None:
    requests = make_varied_requests(pair, form)
    assert len(requests) == COUNT
    for name in ("x-request-id", "traceparent"):
        assert len({parse_headers(request)[name] for request in requests}) == COUNT
    assert len({request.body for request in requests}) > COUNT * 0.99


@pytest.mark.parametrize(
    "make", [traffic.chat_requests, traffic.generate_requests, traffic.mindie_requests]
)
def test_same_seed_gives_the_same_requests(make: Callable[..., Sequence[Request]]) -> None:
    requests = [*make(Traffic(), "stream")]
    make.cache_clear()  # type: ignore[attr-defined]
    assert requests == [*make(Traffic(), "stream")]

    other = make(Traffic(), "stream", seed=21)
    assert not {request.body for request in requests} & {request.body for request in other}


@EVERY
def test_keys_and_models_alternate(pair: ProtocolPair) -> None:
    requests = make_varied_requests(pair)
    keys = Counter(parse_headers(request)["authorization"] for request in requests)
    assert {key.removeprefix("bearer ") for key in keys} == {*KEYS}

    names = Counter(get_model_name(pair, request) for request in requests)
    prefix = "triton-" if pair is TO_TRITON else ""
    assert {*names} == {prefix + model for model in MODELS}
    assert len(MODELS) == 20
    assert min(keys.values()) > COUNT / len(KEYS) / 2
    assert min(names.values()) > COUNT / len(MODELS) / 2

    same = sum(
        get_model_name(pair, one) == get_model_name(pair, two) for one, two in pairwise(requests)
    )
    assert same < COUNT * 0.1


def get_model_name(pair: ProtocolPair, request: Request) -> str:
    if pair in {FROM_TRITON, FROM_MINDIE}:
        return request.path.split("/")[-2]
    name: str = json.loads(request.body)["model"]
    return name


@EVERY
def test_single_key_load_uses_one_key(pair: ProtocolPair) -> None:
    requests = pair.make_requests(Traffic(keys=1), "unary")
    assert {parse_headers(request)["authorization"] for request in requests} == {
        f"bearer {KEYS[0]}".lower()
    }


@EVERY
def test_prompt_lengths_cover_the_configured_range(pair: ProtocolPair) -> None:
    sizes = sorted(
        len(get_prompt(json.loads(request.body))) for request in make_varied_requests(pair)
    )
    assert sizes[0] >= PROMPT[0]
    assert sizes[-1] <= PROMPT[1]
    assert sizes[0] < 30
    assert sizes[-1] > 3_900
    assert 200 < sizes[len(sizes) // 2] < 400


def get_prompt(body: Any) -> str:
    if "text_input" in body:
        return str(body["text_input"])
    return next(str(one["content"]) for one in body["messages"][::-1] if one["role"] == "user")


def test_some_chat_requests_have_tools_tool_results_and_logprobs() -> None:
    bodies = [json.loads(request.body) for request in make_varied_requests(OPENAI)]
    tools = [body for body in bodies if "tools" in body]
    turns = [body for body in tools if body["messages"][-1]["role"] == "tool"]

    assert 0.07 < len(tools) / COUNT < 0.13
    assert 0.3 < len(turns) / len(tools) < 0.7

    for body in turns:
        called, answered = body["messages"][-2:]
        assert called["tool_calls"][0]["id"] == answered["tool_call_id"]
    assert 0.07 < sum("logprobs" in body for body in bodies) / COUNT < 0.13

    plain = [json.loads(request.body) for request in make_varied_requests(TO_TRITON)]
    assert not any(body.keys() & {"tools", "logprobs"} for body in plain)


def test_headers_match_the_sdks() -> None:
    headers = [parse_headers(request) for request in make_varied_requests(OPENAI)]
    languages = Counter(one["x-stainless-lang"] for one in headers)

    assert languages["python"] > languages["js"] > 0

    for one in headers:
        agent = "openai/python" if one["x-stainless-lang"] == "python" else "openai/js"
        assert one["user-agent"] == f"{agent} {one['x-stainless-package-version']}"


@FORMS
def test_stream_load_requests_streams(form: Form) -> None:
    for pair in (OPENAI, TO_TRITON):
        bodies = [json.loads(request.body) for request in make_varied_requests(pair, form)]
        assert {body.get("stream", False) for body in bodies} == {form == "stream"}
        with_usage = sum("stream_options" in body for body in bodies)
        assert (COUNT / 3 < with_usage < COUNT) == (form == "stream")
    paths = {request.path.rpartition("/")[2] for request in make_varied_requests(FROM_TRITON, form)}

    assert paths == {"generate_stream" if form == "stream" else "generate"}


@pytest.mark.parametrize("size", [650, 40_000, 1_000_000])
@pytest.mark.parametrize("pair", [OPENAI, TO_TRITON, FROM_TRITON], ids=lambda one: str(one.name))
def test_repeated_load_has_one_request_of_its_size(pair: ProtocolPair, size: int) -> None:
    [request] = pair.make_requests(Traffic(kind="repeated", size=size), "unary")
    assert get_model_name(pair, request).removeprefix("triton-") == REPEATED_MODEL
    assert size * 0.8 < len(request.body) < size * 1.2


def test_tool_load_has_tools_in_every_request() -> None:
    bodies = [
        json.loads(request.body) for request in OPENAI.make_requests(Traffic(tools=1), "unary")
    ]
    assert all("tools" in body for body in bodies)

    turns = sum(body["messages"][-1]["role"] == "tool" for body in bodies)
    assert 0.4 < turns / COUNT < 0.6


@pytest.mark.parametrize("load", BODY_SIZES[:4], ids=lambda load: str(load.name))
def test_image_load_has_distinct_bodies_of_its_size(load: Any) -> None:
    requests = OPENAI.make_requests(load.traffic, "unary")
    assert 6 <= len({request.body for request in requests}) == len(requests) <= COUNT

    for request in requests[:6]:
        assert load.traffic.size * 0.8 < len(request.body) < load.traffic.size * 1.1 + 4_000
        parts = json.loads(request.body)["messages"][-1]["content"]
        assert [part["type"] for part in parts[:2]] == ["text", "image_url"]
        url = parts[1]["image_url"]["url"]
        assert b64decode(url.removeprefix("data:image/jpeg;base64,")).startswith(b"\xff\xd8")


def test_embedding_load_has_one_to_two_thousand_inputs() -> None:
    requests = OPENAI.make_requests(Traffic(kind="embeddings"), "unary")
    bodies = [json.loads(request.body) for request in requests]
    sizes = sorted(1 if isinstance(body["input"], str) else len(body["input"]) for body in bodies)

    assert sizes[0] == 1
    assert 1_500 < sizes[-1] <= 2_000
    assert 20 < sizes[len(sizes) // 2] < 100

    formats = Counter(body.get("encoding_format") for body in bodies)
    assert formats["base64"] > formats[None] > 0
    assert {request.path for request in requests} == {"/v1/embeddings"}


def test_style_loads_cover_every_worker_style() -> None:
    styles = [{name.rpartition("-")[0] for name in load.traffic.models} for load in STYLE_BURSTS]
    assert [*map(len, styles)] == [1] * len(styles)
    assert set.union(*styles) == {*STYLES}


def test_model_names_choose_every_worker_style_in_turn() -> None:
    names = make_model_names(1_000)
    assert len({*names}) == 1_000
    assert Counter(name.rpartition("-")[0] for name in names) == dict.fromkeys(STYLES, 250)


def test_encoded_requests_have_a_length_prefix() -> None:
    requests = [Request("/a", ["X-Id: 1"], b"{}"), Request("/b", [], "é".encode())]
    first, second = (
        b"POST /a HTTP/1.1\r\nHost: llm.example.com\r\nX-Id: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /b HTTP/1.1\r\nHost: llm.example.com\r\nContent-Length: 2\r\n\r\n\xc3\xa9",
    )

    written = traffic.encode_all(requests)

    assert written == b"%d\n%s%d\n%s" % (len(first), first, len(second), second)
    assert b"X-Id: 1\r\nX-More: 2\r\n" in traffic.encode_all(requests, ["X-More: 2"])
    assert b"X-Id" not in traffic.encode_all(requests, [], {"X-Id"})
