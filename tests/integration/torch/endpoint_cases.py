"""Every endpoint that generates text, with its parameters and a request body."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final, Literal

from msgspec import Struct

from protocols import PROTOCOLS
from protocols.core.interfaces import ClientRequest, Endpoint
from protocols.core.request import GenerationRequest
from protocols.params import Param

Json = dict[str, Any]
PROMPT: Final = "Hello"


def _chat(options: Json) -> Json:
    return {"model": "m", "messages": [{"role": "user", "content": PROMPT}], **options}


def _plain(options: Json) -> Json:
    return {"model": "m", "prompt": PROMPT, **options}


def _text_input(options: Json) -> Json:
    return {"text_input": PROMPT, "parameters": options}


def _inputs(options: Json) -> Json:
    return {"inputs": PROMPT, "parameters": options}


def _ids(options: Json) -> Json:
    data = list(PROMPT.encode())
    tensor = {"name": "input0", "shape": [1, len(data)], "datatype": "UINT32", "data": data}
    return {"inputs": [tensor], "outputs": [{"name": "output0"}], "parameters": options}


_BODIES: Final[Mapping[str, Callable[[Json], Json]]] = {
    "openai chat": _chat,
    "openai completion": _plain,
    "databricks invocations, of a conversation": _chat,
    "databricks invocations, of a completion": _plain,
    "databricks chat": _chat,
    "databricks completion": _plain,
    "triton vllm": lambda options: {
        "text_input": PROMPT,
        "sampling_parameters": json.dumps(options),
    },
    "triton trtllm": lambda options: {"text_input": PROMPT, **options},
    "triton llmapi": lambda options: {"text_input": PROMPT, **options},
    "triton plain": _text_input,
    "mindie text": _text_input,
    "mindie tokens": _ids,
    "mindie chat": _chat,
    "mindie completion": _plain,
    "mindie generate": _inputs,
    "mindie generate, of a prompt": lambda options: {"prompt": PROMPT, **options},
    "mindie native": _inputs,
    "ovms chat": _chat,
    "ovms completion": _plain,
}
EQUIVALENT_ENDPOINTS: Final = frozenset(
    {"triton generate_stream", "triton infer", "mindie text_stream", "mindie generate_stream",
     "mindie root"}
)  # fmt: skip
"""Endpoints with another's parameters and code; only the response framing differs."""
NOT_GENERATING: Final = re.compile(r"embed|rank|score|tokenize|classify")
"""Endpoints that generate no text."""
APART: Final = frozenset({"anthropic", "cohere", "ollama", "tgi"})
"""Protocols that set the same fields of the internal request in another way.

Their own tests (tests/unit/protocols) and those of the Responses API cover the parameters.
"""


class EndpointCase(Struct, frozen=True):
    """An endpoint of a client adapter in one profile, with its parameter table."""

    name: str
    adapter: Any
    endpoint: Endpoint
    rows: tuple[Param, ...]
    body: Callable[[Json], Json]

    def get_wire_name(self, field: str) -> str | None:
        """Return the parameter's name for a field, or None if the endpoint has none."""
        return next((row.wire for row in self.rows if row.field == field), None)

    def supports(self, *fields: str) -> bool:
        """Return whether the endpoint has parameters for all of these fields."""
        return all(self.get_wire_name(field) is not None for field in fields)

    def decode(self, options: Json) -> tuple[GenerationRequest, Mapping[str, str]]:
        """The request with these options, by wire name, and the field names for loss reports."""
        params = dict.fromkeys(("model", "name", "served", "version"), "m")
        body = json.dumps(self.body(options)).encode()
        headers = {"content-type": "application/json"}
        call = ClientRequest(self.endpoint, params, headers, "", body, self.endpoint.path)
        request = self.adapter.decode_request(call)
        assert isinstance(request, GenerationRequest)
        return request, self.adapter.field_names(call)

    @property
    def kind(self) -> Literal["chat", "text"]:
        """Return whether the endpoint takes chat messages or a prompt."""
        return "chat" if self.body is _chat else "text"


def list_endpoint_cases() -> Iterator[EndpointCase]:
    """Return every endpoint; of profiles with the same parameters only the first."""
    cases: list[tuple[str, str, tuple[Param, ...]]] = []
    for name, where in PROTOCOLS.items():
        module, _, kind = where.partition(":")
        family = getattr(import_module(module), kind)
        options = {"model": "m"} if name == "mindie" else {}
        for profile in family.profiles:
            adapter = family(profile, **options)
            for key, rows in getattr(adapter, "param_tables", {}).items():
                if name in APART or f"{name} {key}" == "openai response":
                    continue
                if NOT_GENERATING.search(key) or (name, key, rows) in cases:
                    continue
                cases.append((name, key, rows))
                manner = profile if name == "triton" else key
                if f"{name} {key}" not in EQUIVALENT_ENDPOINTS:
                    body = _BODIES[f"{name} {manner}"]
                    endpoint = _endpoint(adapter, key)
                    yield EndpointCase(f"{name} {profile} {key}", adapter, endpoint, rows, body)


def _endpoint(adapter: Any, key: str) -> Endpoint:
    variant = key.partition(",")[0]
    endpoint: Endpoint = next(one for one in adapter.endpoints if one.operation == variant)
    return endpoint
