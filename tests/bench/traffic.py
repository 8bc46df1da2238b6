"""The requests of a load: varied ones, drawn from a seed, and one that is repeated.

Varied requests look as those of many users do behind an ingress: each has its own trace id and
request id, the headers of an SDK, one of several keys, one of twenty models and its own prompt.
Some ask for log probabilities, some carry tools, and some of these a turn with a tool's result.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, Final

from msgspec import Struct

from tests.bench.load_generator import Form
from tests.bench.responses import STYLES, WORDS

SEED: Final = 20
COUNT: Final = 3_000
"""How many distinct requests there are."""
KEYS: Final = tuple(f"sk-bench-{number}-0123456789abcdef" for number in range(5))
MODELS: Final = tuple(f"{style}-{number}" for style in STYLES for number in range(5))
PROMPT: Final = (20, 4_000)
"""Characters of a prompt, drawn so that short ones are as frequent as long ones on a log scale."""
TOOLS: Final = 0.1
"""The share of requests with tools; every second one of them has a turn with a tool's result."""
LOGPROBS: Final = 0.1

_HOST: Final = "llm.example.com"
_PYTHON_RELEASES: Final = ("1.99.9", "1.109.1", "2.6.1", "2.8.0")
_NODE_RELEASES: Final = ("5.12.2", "6.7.0")
_TEXT_SIZE: Final = 100_000
_STOPS: Final = (["<|im_end|>"], ["</s>", "\nUser:"])
"""Strings that no response has."""
_SYSTEM: Final = (
    "You are a helpful assistant.",
    "You are a support agent of an online shop. Answer in at most three sentences.",
    "Answer as a senior engineer would: be brief, be right, and name your sources.",
)


class Request(Struct, frozen=True):
    """One HTTP request. ``headers`` are lines, without those that tell the body's length."""

    path: str
    headers: Sequence[str]
    body: bytes

    def encode(self, headers: Sequence[str] = ()) -> bytes:
        """The bytes on the wire, with these headers added."""
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {_HOST}",
            *self.headers,
            *headers,
            f"Content-Length: {len(self.body)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


def encode_all(requests: Sequence[Request], headers: Sequence[str] = ()) -> bytes:
    """What the client program reads: each request behind its length and a line feed."""
    encoded = (request.encode(headers) for request in requests)
    return b"".join(b"%d\n%s" % (len(one), one) for one in encoded)


def repeated_request(path: str, body: Mapping[str, object]) -> Request:
    """The one request of a repeated load, with the first of the keys."""
    headers = [
        "Content-Type: application/json",
        "User-Agent: OpenAI/Python 1.99.0",
        "Accept: application/json",
        f"Authorization: Bearer {KEYS[0]}",
    ]
    return Request(path, headers, _compact(body))


@cache
def chat_requests(
    form: Form, prefix: str = "", *, keys: int = len(KEYS), full: bool = True, seed: int = SEED
) -> Sequence[Request]:
    """Varied requests of OpenAI's chat completions.

    ``prefix`` stands before the models' names. Without ``full`` there are no tools and no log
    probabilities, which not every worker can serve.
    """
    random, text = Random(seed), _text(seed)
    requests = []
    for number in range(COUNT):
        node = random.random() < 0.2
        body = _chat(random, text, form, full=full)
        body["model"] = prefix + random.choice(MODELS)
        first = ("model", "messages") if node else ("messages", "model")
        ordered = {name: body[name] for name in first} | body
        headers = [*_sdk_headers(random, node=node), *_ingress_headers(random, keys, number)]
        requests.append(Request("/v1/chat/completions", headers, _compact(ordered)))
    return requests


@cache
def generate_requests(form: Form, *, keys: int = len(KEYS), seed: int = SEED) -> Sequence[Request]:
    """Varied requests of Triton's generate extension."""
    random, text = Random(seed), _text(seed)
    suffix = "_stream" if form == "stream" else ""
    requests = []
    for number in range(COUNT):
        body = _generate(random, _prompt(random, text), form)
        headers = [
            "Content-Type: application/json",
            "User-Agent: python-requests/2.32.3",
            "Accept: */*",
            *_ingress_headers(random, keys, number),
        ]
        path = f"/v2/models/{random.choice(MODELS)}/generate{suffix}"
        encoded = json.dumps(body).encode()  # as requests does, with spaces
        requests.append(Request(path, headers, encoded))
    return requests


# --- bodies ---------------------------------------------------------------------------------------


def _chat(random: Random, text: str, form: Form, *, full: bool) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if random.random() < 0.6:
        messages.append({"role": "system", "content": random.choice(_SYSTEM)})
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        messages.append({"role": "user", "content": _part(random, text, 80)})
        messages.append({"role": "assistant", "content": _part(random, text, 200)})
    messages.append({"role": "user", "content": _prompt(random, text)})
    body: dict[str, Any] = {"messages": messages, **_sampling(random)}
    if random.random() < 0.3:
        body["user"] = f"user-{random.getrandbits(32):08x}"
    if full and random.random() < LOGPROBS:
        body |= {"logprobs": True, "top_logprobs": 2}
    if full and random.random() < TOOLS:
        body["tools"] = _tools(random)
        if random.random() < 0.5:
            messages += _tool_turn(random)
    if form == "stream":
        body["stream"] = True
        if random.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    return body


def _generate(random: Random, prompt: str, form: Form) -> dict[str, object]:
    """The options stand beside the prompt, in ``parameters``, or as vLLM's in a string of JSON."""
    options: dict[str, object] = {"stream": form == "stream"}
    if random.random() < 0.5:
        options["exclude_input_in_output"] = True
    sampling = _sampling(random)
    match random.choice(("beside", "parameters", "string")):
        case "string":
            options["sampling_parameters"] = json.dumps(sampling)
            return {"text_input": prompt} | options
        case where:
            sampling.pop("stop", None)  # only the string of JSON can hold a list
            options |= sampling
            nested = where == "parameters"
            return {"text_input": prompt} | ({"parameters": options} if nested else options)


def _sampling(random: Random) -> dict[str, object]:
    """Sampling parameters that every protocol here has."""
    options: dict[str, object] = {"max_tokens": random.choice((100, 128, 256, 512, 1024))}
    if random.random() < 0.7:
        options["temperature"] = round(random.uniform(0, 1.2), 2)
    if random.random() < 0.4:
        options["top_p"] = round(random.uniform(0.5, 1), 2)
    if random.random() < 0.2:
        options["seed"] = random.getrandbits(31)
    if random.random() < 0.15:
        options["stop"] = random.choice(_STOPS)
    return options


def _prompt(random: Random, text: str) -> str:
    shortest, longest = PROMPT
    return _part(random, text, round(shortest * (longest / shortest) ** random.random()))


def _part(random: Random, text: str, size: int) -> str:
    start = random.randrange(len(text) - size)
    return text[start : start + size]


@cache
def _text(seed: int) -> str:
    random = Random(seed)
    parts = [random.choice(WORDS) for _ in range(_TEXT_SIZE // 4)]
    return "".join(parts)


def _tools(random: Random) -> list[dict[str, Any]]:
    city = {"type": "string", "description": "The city, such as Paris."}
    unit = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    query = {"type": "string", "description": f"What to look for in index {random.randrange(99)}."}
    limit = {"type": "integer", "minimum": 1, "maximum": 50}
    return [
        _tool("get_weather", "Get the weather of a city.", {"city": city, "unit": unit}),
        _tool("search_orders", "Search the customer's orders.", {"query": query, "limit": limit}),
    ]


def _tool(name: str, description: str, properties: Mapping[str, object]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [next(iter(properties))],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_turn(random: Random) -> list[dict[str, Any]]:
    name = f"call_{random.getrandbits(96):024x}"
    arguments = json.dumps({"city": random.choice(("Paris", "Köln", "Zürich")), "unit": "celsius"})
    call = {
        "id": name,
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    result = json.dumps({"temperature": random.randrange(-10, 35), "sky": "clear"})
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": name, "content": result},
    ]


def _compact(body: Mapping[str, object]) -> bytes:
    """As both SDKs write it."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


# --- headers --------------------------------------------------------------------------------------


def _sdk_headers(random: Random, *, node: bool) -> list[str]:
    if node:
        release = random.choice(_NODE_RELEASES)
        agent, language, runtime, version = f"OpenAI/JS {release}", "js", "node", "v22.20.0"
    else:
        release = random.choice(_PYTHON_RELEASES)
        agent, language, runtime, version = (
            f"OpenAI/Python {release}",
            "python",
            "CPython",
            "3.12.3",
        )
    return [
        "Accept: application/json",
        "Accept-Encoding: gzip, deflate",
        "Content-Type: application/json",
        f"User-Agent: {agent}",
        f"x-stainless-lang: {language}",
        f"x-stainless-package-version: {release}",
        "x-stainless-os: Linux",
        "x-stainless-arch: x64",
        f"x-stainless-runtime: {runtime}",
        f"x-stainless-runtime-version: {version}",
        f"x-stainless-retry-count: {int(random.random() < 0.02)}",
        "x-stainless-read-timeout: 600",
    ]


def _ingress_headers(random: Random, keys: int, number: int) -> list[str]:
    trace, span = random.getrandbits(128) | 1, random.getrandbits(64) | 1
    address = f"10.{random.randrange(256)}.{random.randrange(256)}.{random.randrange(1, 255)}"
    return [
        f"Authorization: Bearer {KEYS[random.randrange(keys)]}",
        f"x-request-id: {random.getrandbits(96):024x}{number:08x}",
        f"x-real-ip: {address}",
        f"x-forwarded-for: {address}",
        "x-forwarded-proto: https",
        f"traceparent: 00-{trace:032x}-{span:016x}-01",
    ]
