"""Varied requests: distinct, the same for the same seed, and as real clients send them."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from tests.bench import traffic
from tests.bench.gateways import FROM_TRITON, OPENAI, TO_TRITON, ProtocolPair
from tests.bench.load_generator import Form, Load
from tests.bench.traffic import COUNT, KEYS, MODELS, PROMPT, Request

PAIRS = (OPENAI, TO_TRITON, FROM_TRITON)
EVERY = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: str(pair.name))
FORMS = pytest.mark.parametrize("form", ["whole", "stream"])


def parse_headers(request: Request) -> Mapping[str, str]:
    return dict(line.lower().split(": ", 1) for line in request.headers)


def make_varied_requests(pair: ProtocolPair, form: Form = "whole") -> Sequence[Request]:
    return pair.requests(Load(name="any", form=form))


@EVERY
@FORMS
def test_varied_requests_are_distinct(pair: ProtocolPair, form: Form) -> None:
    requests = make_varied_requests(pair, form)
    assert len(requests) == COUNT
    for name in ("x-request-id", "traceparent"):
        assert len({parse_headers(request)[name] for request in requests}) == COUNT
    assert len({request.body for request in requests}) > COUNT * 0.99


@pytest.mark.parametrize("make", [traffic.chat_requests, traffic.generate_requests])
def test_same_seed_gives_the_same_requests(make: Callable[..., Sequence[Request]]) -> None:
    found = [*make("stream")]
    make.cache_clear()  # type: ignore[attr-defined]
    assert found == [*make("stream")]
    other = make("stream", seed=21)
    assert not {request.body for request in found} & {request.body for request in other}


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
    if pair is FROM_TRITON:
        return request.path.split("/")[3]
    found: str = json.loads(request.body)["model"]
    return found


@EVERY
def test_single_key_load_uses_one_key(pair: ProtocolPair) -> None:
    requests = pair.requests(Load(name="any"), keys=1)
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
    found = [parse_headers(request) for request in make_varied_requests(OPENAI)]
    languages = Counter(one["x-stainless-lang"] for one in found)
    assert languages["python"] > languages["js"] > 0
    for one in found:
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


@EVERY
def test_repeated_load_has_one_request(pair: ProtocolPair) -> None:
    [request] = pair.requests(Load(name="any", repeated=True))
    assert request.path == pair.path("whole")
    assert json.loads(request.body) == pair.body(pair.model, Load(name="any"))


def test_encoded_requests_have_a_length_prefix() -> None:
    requests = [Request("/a", ["X-Id: 1"], b"{}"), Request("/b", [], "é".encode())]
    first, second = (
        b"POST /a HTTP/1.1\r\nHost: llm.example.com\r\nX-Id: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /b HTTP/1.1\r\nHost: llm.example.com\r\nContent-Length: 2\r\n\r\n\xc3\xa9",
    )
    written = traffic.encode_all(requests)
    assert written == b"%d\n%s%d\n%s" % (len(first), first, len(second), second)
    assert b"X-Id: 1\r\nX-More: 2\r\n" in traffic.encode_all(requests, ["X-More: 2"])
