"""Workers whose protocol requires a schema of an object for each tool get one, or none is sent."""

import json
from typing import Any, Final

import pytest
from msgspec import Raw

from protocols.anthropic.endpoints import Anthropic
from protocols.cohere.endpoints import Cohere
from protocols.core.errors import UnsupportedFeature
from protocols.core.interfaces import UpstreamAdapter
from protocols.core.request import AllowedTools, GenerationRequest, Message, TextPart, Tool
from protocols.openai.endpoints import OpenAI
from protocols.tgi.endpoints import TGI

WORKERS: Final[dict[str, UpstreamAdapter]] = {
    "anthropic": Anthropic(),
    "responses": OpenAI("openai", worker_api="responses"),
    "cohere": Cohere(),
    "tgi": TGI(),
}
EMPTY: Final = {"type": "object", "properties": {}}
SCHEMAS: Final[dict[str, tuple[Any, Any]]] = {
    "missing": (None, EMPTY),
    "empty": ({}, EMPTY),
    "without type": ({"anyOf": []}, {"anyOf": [], "type": "object"}),
    "null": ({"type": None}, {"type": "object"}),
    "one of several types": ({"type": ["object", "null"]}, {"type": "object"}),
    "complete": ({"type": "object", "x": 1}, {"type": "object", "x": 1}),
}


def build_request(*schemas: Any, **fields: Any) -> GenerationRequest:
    """A conversation with a tool for each schema."""
    raws = [None if one is None else Raw(json.dumps(one).encode()) for one in schemas]
    tools = tuple(Tool(f"f{i}", "d", raw) for i, raw in enumerate(raws))
    messages = (Message("user", (TextPart("hi"),)),)
    return GenerationRequest(model="m", kind="chat", messages=messages, tools=tools, **fields)


def find_schema(body: Any) -> Any:
    """The schema of the first tool in a worker's body."""
    tool = body["tools"][0]
    tool = tool.get("function", tool)
    return tool["input_schema"] if "input_schema" in tool else tool["parameters"]


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("worker", WORKERS)
def test_schema_is_that_of_an_object(worker: str, schema: str) -> None:
    sent, expected = SCHEMAS[schema]

    body = json.loads(WORKERS[worker].encode_request(build_request(sent)).body)

    assert find_schema(body) == expected


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": ["string", "null"]}, {"type": 7}])
@pytest.mark.parametrize("worker", WORKERS)
def test_schema_of_another_type_is_refused_by_its_path(worker: str, schema: Any) -> None:
    allowed = AllowedTools("auto", ("f1",))
    request = build_request(EMPTY, schema, tool_choice=allowed)

    with pytest.raises(UnsupportedFeature, match="must be 'object'") as raised:
        WORKERS[worker].encode_request(request)

    assert raised.value.param == "tools[1].function.parameters.type"
