"""The requests of a load: varied ones, generated from a seed, and a repeated one.

Varied requests resemble those of many users behind an ingress: each has its own trace id and
request id, the headers of an SDK, one of several keys, one of many models and its own prompt. Some
request log probabilities, some have tools, and half of these a turn with a tool result.
"""

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from random import Random
from typing import Any, Final

from msgspec import Struct

from tests.bench.loads import KEYS, Form, Traffic, make_keys
from tests.bench.responses import WORDS

SEED: Final = 20
COUNT: Final = 3_000
"""The number of distinct requests of a load."""
PROMPT: Final = (20, 4_000)
"""Range of a prompt's characters, with log-uniform lengths."""
INPUTS: Final = (1, 2_000)
"""Range of an embedding request's texts, with log-uniform numbers."""

_FILE_SIZE: Final = 64_000_000
"""Maximum bytes of a load's requests; with large ones there are fewer than ``COUNT``."""
_IMAGE_SIZE: Final = 2_000_000
"""Maximum bytes of an image; a larger body has several."""
_HOST: Final = "llm.example.com"
_PYTHON_RELEASES: Final = ("1.99.9", "1.109.1", "2.6.1", "2.8.0")
_NODE_RELEASES: Final = ("5.12.2", "6.7.0")
_TEXT_SIZE: Final = 100_000
_STOPS: Final = (["<|im_end|>"], ["</s>", "\nUser:"])
"""Stop strings that no response contains."""
_SYSTEM: Final = (
    "You are a helpful assistant.",
    "You are a support agent of an online shop. Answer in at most three sentences.",
    "Answer as a senior engineer would: be brief, be right, and name your sources.",
)
_PROSE: Final = "Tell me, in plain words, what the brown fox did, and why the dog let it be. "
_CHAT: Final = "/v1/chat/completions"


class Request(Struct, frozen=True):
    """An HTTP request. ``headers`` are lines, without those of the body's length."""

    path: str
    headers: Sequence[str]
    body: bytes

    def encode(self, headers: Sequence[str] = (), removed: Collection[str] = frozenset()) -> bytes:
        """Encode the request with these headers added and others, by name, removed."""
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {_HOST}",
            *(line for line in self.headers if line.partition(":")[0] not in removed),
            *headers,
            f"Content-Length: {len(self.body)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


def encode_all(
    requests: Sequence[Request],
    headers: Sequence[str] = (),
    removed: Collection[str] = frozenset(),
) -> bytes:
    """Encode the client program's input: each request after its length and a line feed."""
    encoded = (request.encode(headers, removed) for request in requests)
    return b"".join(b"%d\n%s" % (len(one), one) for one in encoded)


def repeated_request(path: str, body: Mapping[str, object]) -> Request:
    """Build the request of a repeated load, with the first key."""
    headers = [
        "Content-Type: application/json",
        "User-Agent: OpenAI/Python 1.99.0",
        "Accept: application/json",
        f"Authorization: Bearer {KEYS[0]}",
    ]
    return Request(path, headers, _compact(body))


def repeated_chat(traffic: Traffic, form: Form, model: str) -> Sequence[Request]:
    """Build the request of a repeated load of chat completions."""
    return [repeated_request(_CHAT, chat_body(traffic.size, form, model))]


def repeated_generate(traffic: Traffic, form: Form, model: str) -> Sequence[Request]:
    """Build the request of a repeated load of Triton's generate extension."""
    return [repeated_request(_generate_path(model, form), generate_body(traffic.size, form))]


def chat_body(size: int, form: Form, model: str) -> dict[str, object]:
    """Build a conversation of about ``size`` bytes."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant. Be brief, and be right."},
        {"role": "user", "content": _PROSE * max(1, (size - 210) // len(_PROSE))},
    ]
    fields: Mapping[str, object] = {}
    if form == "stream":
        fields = {"stream": True, "stream_options": {"include_usage": True}}
    options = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512}
    return {"model": model, "messages": messages, **options, **fields}


def generate_body(size: int, form: Form) -> dict[str, object]:
    """Build a prompt of about ``size`` bytes."""
    prompt = _PROSE * max(1, (size - 100) // len(_PROSE))
    options = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512}
    return {"text_input": prompt, "stream": form == "stream", **options}


@lru_cache(maxsize=8)
def chat_requests(
    traffic: Traffic, form: Form, prefix: str = "", *, full: bool = True, seed: int = SEED
) -> Sequence[Request]:
    """Generate varied requests of OpenAI's chat completions.

    ``prefix`` precedes the models' names. Without ``full`` there are no tools and no log
    probabilities, which not every worker supports.
    """
    random, text, keys = Random(seed), _text(seed), make_keys(traffic.keys)
    requests = []
    for number in range(_count_requests(traffic)):
        node = random.random() < 0.2
        body = _chat(random, text, traffic, form, full=full)
        body["model"] = prefix + random.choice(traffic.models)
        first = ("model", "messages") if node else ("messages", "model")
        ordered = {name: body[name] for name in first} | body
        headers = [*_sdk_headers(random, node=node), *_ingress_headers(random, keys, number)]
        requests.append(Request(_CHAT, headers, _compact(ordered)))
    return requests


@lru_cache(maxsize=8)
def embedding_requests(traffic: Traffic, *, seed: int = SEED) -> Sequence[Request]:
    """Generate varied requests of OpenAI's embeddings; the Python SDK requests base64."""
    random, text, keys = Random(seed), _text(seed), make_keys(traffic.keys)
    requests = []
    for number in range(COUNT // 10):
        node = random.random() < 0.2
        inputs = [
            _part(random, text, random.randrange(20, 200)) for _ in range(_draw(random, INPUTS))
        ]
        body: dict[str, object] = {
            "input": inputs[0] if len(inputs) == 1 else inputs,
            "model": random.choice(traffic.models),
        }
        if not node:
            body["encoding_format"] = "base64"
        headers = [*_sdk_headers(random, node=node), *_ingress_headers(random, keys, number)]
        requests.append(Request("/v1/embeddings", headers, _compact(body)))
    return requests


@lru_cache(maxsize=8)
def generate_requests(traffic: Traffic, form: Form, *, seed: int = SEED) -> Sequence[Request]:
    """Generate varied requests of Triton's generate extension."""
    random, text, keys = Random(seed), _text(seed), make_keys(traffic.keys)
    return [
        _dumped_request(
            _generate_path(random.choice(traffic.models), form),
            _generate(random, _prompt(random, text), form),
            _ingress_headers(random, keys, number),
        )
        for number in range(COUNT)
    ]


@lru_cache(maxsize=8)
def mindie_requests(traffic: Traffic, form: Form, *, seed: int = SEED) -> Sequence[Request]:
    """Generate varied requests of MindIE's generate endpoint under ``/mindie``."""
    random, text, keys = Random(seed), _text(seed), make_keys(traffic.keys)
    return [
        _dumped_request(
            f"/mindie{_generate_path(random.choice(traffic.models), form)}",
            _mindie_generate(random, _prompt(random, text), number),
            _ingress_headers(random, keys, number),
        )
        for number in range(COUNT)
    ]


def _count_requests(traffic: Traffic) -> int:
    return min(COUNT, _FILE_SIZE // traffic.size) if traffic.kind == "images" else COUNT


def _generate_path(model: str, form: Form) -> str:
    return f"/v2/models/{model}/generate{'_stream' if form == 'stream' else ''}"


def _dumped_request(path: str, body: Mapping[str, object], headers: Sequence[str]) -> Request:
    """Encode like the requests library, with spaces in the JSON."""
    own = [
        "Content-Type: application/json",
        "User-Agent: python-requests/2.32.3",
        "Accept: */*",
    ]
    return Request(path, [*own, *headers], json.dumps(body).encode())


# --- bodies ---------------------------------------------------------------------------------------


def _chat(random: Random, text: str, traffic: Traffic, form: Form, *, full: bool) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if random.random() < 0.6:
        messages.append({"role": "system", "content": random.choice(_SYSTEM)})
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        messages.append({"role": "user", "content": _part(random, text, 80)})
        messages.append({"role": "assistant", "content": _part(random, text, 200)})
    images = traffic.kind == "images"
    prompt = _prompt(random, text)
    content = _image_parts(random, prompt, traffic.size) if images else prompt
    messages.append({"role": "user", "content": content})
    body: dict[str, Any] = {"messages": messages, **_sampling(random)}
    if random.random() < 0.3:
        body["user"] = f"user-{random.getrandbits(32):08x}"
    if full and random.random() < traffic.logprobs:
        body |= {"logprobs": True, "top_logprobs": 2}
    if full and random.random() < traffic.tools:
        body["tools"] = _tools(random)
        if random.random() < 0.5:
            messages += _tool_turn(random)
    if form == "stream":
        body["stream"] = True
        if random.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    return body


def _image_parts(random: Random, prompt: str, size: int) -> list[dict[str, object]]:
    """Build a prompt and JPEG images whose base64 has about ``size`` bytes in all."""
    prompt = prompt[: size // 10]
    parts: list[dict[str, object]] = [{"type": "text", "text": prompt}]
    left = size - 500
    while left > 0:
        data = b"\xff\xd8\xff\xe0" + random.randbytes(max(4, min(left, _IMAGE_SIZE) * 3 // 4))
        url = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
        left -= _IMAGE_SIZE
    return parts


def _mindie_generate(random: Random, prompt: str, number: int) -> dict[str, object]:
    sampling: dict[str, object] = {"max_new_tokens": random.choice((100, 128, 256, 512))}
    if random.random() < 0.7:
        sampling["temperature"] = round(random.uniform(0.1, 1.2), 2)
    if random.random() < 0.4:
        sampling["top_p"] = round(random.uniform(0.5, 0.99), 2)
    if random.random() < 0.2:
        sampling["seed"] = 1 + random.getrandbits(31)
    body: dict[str, object] = {"text_input": prompt, "parameters": sampling}
    return {"id": f"request-{number}", **body} if random.random() < 0.5 else body


def _generate(random: Random, prompt: str, form: Form) -> dict[str, object]:
    """Options are beside the prompt, in ``parameters``, or in vLLM's JSON string."""
    options: dict[str, object] = {"stream": form == "stream"}
    if random.random() < 0.5:
        options["exclude_input_in_output"] = True
    sampling = _sampling(random)
    match random.choice(("beside", "parameters", "string")):
        case "string":
            options["sampling_parameters"] = json.dumps(sampling)
            return {"text_input": prompt} | options
        case where:
            sampling.pop("stop", None)  # only the JSON string can have a list
            options |= sampling
            nested = where == "parameters"
            return {"text_input": prompt} | ({"parameters": options} if nested else options)


def _sampling(random: Random) -> dict[str, object]:
    """Draw sampling parameters that every protocol here has."""
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
    return _part(random, text, _draw(random, PROMPT))


def _draw(random: Random, limits: tuple[int, int]) -> int:
    least, most = limits
    size: float = least * (most / least) ** random.random()
    return round(size)


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
    """Encode like both SDKs."""
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


def _ingress_headers(random: Random, keys: Sequence[str], number: int) -> list[str]:
    trace, span = random.getrandbits(128) | 1, random.getrandbits(64) | 1
    address = f"10.{random.randrange(256)}.{random.randrange(256)}.{random.randrange(1, 255)}"
    return [
        f"Authorization: Bearer {random.choice(keys)}",
        f"x-request-id: {random.getrandbits(96):024x}{number:08x}",
        f"x-real-ip: {address}",
        f"x-forwarded-for: {address}",
        "x-forwarded-proto: https",
        f"traceparent: 00-{trace:032x}-{span:016x}-01",
    ]
