"""Databricks: cases W84 to W102.

D is a chat request for the endpoint ``mock``, P a completion and E an embeddings request, all on
the same path.
"""

import base64
import re
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.conformance.cases import Case, Response, expect

CHAT = "/serving-endpoints/chat/completions"
TEXT = "/serving-endpoints/completions"
EMBED = "/serving-endpoints/embeddings"
LIST = "/api/2.0/serving-endpoints"
CONFIG = "/.well-known/databricks-config"

HI = {"role": "user", "content": "say hi"}
BOT = {"role": "assistant", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
WORDS = " ".join(["word"] * 20)
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def invoke(id: str, body: dict[str, Any], *, at: str = "mock", **rest: Any) -> Case:  # noqa: A002 - a Case's field
    """Build a request to an endpoint's own path."""
    return Case(id, "POST", f"/serving-endpoints/{at}/invocations", body=body, **rest)


def chat(id: str, *, at: str = "mock", fields: dict[str, Any], **rest: Any) -> Case:  # noqa: A002 - as above
    """Build D with fields added or replaced."""
    return invoke(id, {"messages": [HI]} | fields, at=at, **rest)


def client_error(status: int, code: str, message: Any = str) -> dict[str, Any]:
    """Expect an error with exactly these two keys."""
    return {"status": status, "body_is": {"error_code": code, "message": message}}


def invalid_parameter(message: Any = str) -> dict[str, Any]:
    """Expect an error for an invalid parameter."""
    return client_error(400, "INVALID_PARAMETER_VALUE", message)


def tools(count: int, properties: int = 1) -> dict[str, Any]:
    """Build this many functions with this many parameters each."""
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(properties)},
    }
    functions = [{"name": f"f{i}", "description": "d", "parameters": schema} for i in range(count)]
    return {"tools": [{"type": "function", "function": one} for one in functions]}


def chat_response(text: str = "Hello world!", reason: str = "stop", **usage: int) -> dict[str, Any]:
    """Expect the response to D."""
    message = {"role": "assistant", "content": text}
    return {
        "id": re.compile("chatcmpl-.+"),
        "object": "chat.completion",
        "created": int,
        "model": "mock",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": USAGE | usage,
    }


def chunk(delta: dict[str, Any], reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """Expect one chunk of D's stream."""
    return {
        "id": re.compile("chatcmpl-.+"),
        "object": "chat.completion.chunk",
        "created": int,
        "model": "mock",
        "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
        **fields,
    }


def completion_response(
    *choices: tuple[int, str, str], prompt: int, completion: int
) -> dict[str, Any]:
    """Expect a completion: index, text and reason of each choice, and the usage."""
    return {
        "id": re.compile("cmpl-.+"),
        "object": "text_completion",
        "created": int,
        "model": str,
        "choices": [
            {"index": index, "text": text, "finish_reason": reason}
            for index, text, reason in choices
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }


def embeddings_response(*embeddings: Any, tokens: int) -> dict[str, Any]:
    """Expect embeddings; their usage has no completion tokens."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": one}
            for i, one in enumerate(embeddings)
        ],
        "model": str,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "id": str,
    }


def encode_base64_floats(*numbers: float) -> str:
    """Encode little-endian float32 in base64."""
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def check_only_data(answer: Response) -> None:
    """Chunks have one id and are data lines only: some clients fail on comments and names."""
    for line in answer.text.split("\n"):
        expect(not line or line.startswith("data: "), f"a line that is no data: {line!r}")
    expect(len({(one["id"], one["created"]) for one in answer.chunks}) == 1, "ids or times differ")


def check_indexes(*wanted: int) -> Any:
    """Every choice of a stream ends once, in order."""

    def check(answer: Response) -> None:
        ends = [one["choices"][0] for one in answer.chunks if one["choices"][0]["finish_reason"]]
        indexes = tuple(one["index"] for one in ends)
        expect(indexes == wanted, f"indexes: wanted {wanted}, got {indexes}")

    return check


def check_80_to_20(answers: Sequence[Response]) -> None:
    """Of 200 responses, the versions have their shares, and each shows the model of its header."""
    arms = Counter(answer.headers["served-model-name"] for answer in answers)
    expect(set(arms) == {"m-a", "m-b"}, f"arms: {dict(arms)}")
    share = arms["m-a"] / len(answers)
    expect(0.7 <= share <= 0.9, f"the share of m-a: wanted 80 % to within 10, got {share:.0%}")
    for response in answers:
        version = response.headers["served-model-name"]
        expect(response.json["model"] == version, f"{version} answered as {response.json['model']}")


ENTITY = {"name": str, "entity_name": str, "entity_version": str, "creation_timestamp": int}
ENTITIES = [ENTITY | {"name": "m-a", "entity_name": "m-a"}, ENTITY | {"name": "m-b"}]
ENDPOINT = {
    "name": "ep-ab",
    "id": str,
    "creation_timestamp": int,
    "last_updated_timestamp": int,
    "state": {"ready": "READY", "config_update": "NOT_UPDATING"},
    "task": "llm/v1/chat",
    "config": {"served_entities": ENTITIES},
    "tags": [],
}
ROUTES = [
    {"served_model_name": "m-a", "served_entity_name": "m-a", "traffic_percentage": 80},
    {"served_model_name": "m-b", "served_entity_name": "m-b", "traffic_percentage": 20},
]


def check_endpoint_list(answer: Response) -> None:
    """The list has every endpoint, each with a task and a state."""
    endpoints = {one["name"]: one for one in answer.json["endpoints"]}
    expect(
        {"mock", "org/m1", "ep-ab", "ep-emb", "ep-ppt"} <= set(endpoints), f"only {list(endpoints)}"
    )
    expect(endpoints["ep-emb"]["task"] == "llm/v1/embeddings", "ep-emb has another task")
    expect("foundation_model" in str(endpoints["ep-ppt"]), "ep-ppt is no foundation model")
    expect(
        len(endpoints["ep-ab"]["config"]["served_entities"]) == len(ENTITIES), "not two entities"
    )
    expect(list(endpoints["ep-ab"]) == list(ENDPOINT), f"keys: {list(endpoints['ep-ab'])}")


UNKNOWN: dict[str, Any] = {"inputs": {}}
UNKNOWN_ENDPOINT = client_error(
    404, "RESOURCE_DOES_NOT_EXIST", re.compile("The given endpoint does not.*")
)
STRICT = {"role_rules": "strict"}
AB = ["a", "b"]
PROMPT20 = {"prompt": WORDS}

CASES = (
    chat(
        "W84",
        fields={},
        body_is=chat_response(),
        answer_headers={"served-model-name": "1"},
    ),
    chat("W84 stream false", fields={"stream": False}, body_is=chat_response()),
    chat(
        "W85",
        fields={"stream": True},
        events=[
            chunk({"role": "assistant", "content": ""}),
            chunk({"content": "Hello"}),
            chunk({"content": " world"}),
            chunk({"content": "!"}),
            chunk({}, "stop", usage=USAGE),
            "[DONE]",
        ],
        answer_headers={"served-model-name": str},
        check=check_only_data,
    ),
    chat(
        "W86",
        fields={"temperature": 3},
        **invalid_parameter("temperature must be in [0, 2], got 3"),
    ),
    chat("W87", fields={"top_p": 0}, **invalid_parameter("top_p must be in (0, 1], got 0")),
    chat(
        "W88",
        fields=UNKNOWN,
        **client_error(400, "BAD_REQUEST", 'Bad request: json: unknown field "inputs"'),
    ),
    invoke(
        "W88 alone",
        UNKNOWN,
        **client_error(400, "BAD_REQUEST", 'Bad request: json: unknown field "inputs"'),
    ),
    chat("W89 33 tools", fields=tools(33), **invalid_parameter()),
    chat("W89 32 tools", fields=tools(32), body_is=chat_response()),
    chat(
        "W90 16 properties",
        fields=tools(1, 16),
        **invalid_parameter(re.compile(".*'f0'.*16.*15.*")),
    ),
    chat("W90 15 properties", fields=tools(1, 15), body_is=chat_response()),
    chat(
        "W91 system twice",
        fields={"messages": [SYSTEM, SYSTEM, HI]},
        needs=STRICT,
        **invalid_parameter(re.compile(".*system.*once.*")),
    ),
    chat(
        "W91 system second",
        fields={"messages": [HI, SYSTEM, HI]},
        needs=STRICT,
        **invalid_parameter(re.compile(".*system.*first.*")),
    ),
    chat(
        "W91 two users",
        fields={"messages": [HI, HI]},
        needs=STRICT,
        **invalid_parameter("messages[1].role must be assistant, got user"),
    ),
    chat(
        "W91 assistant last",
        fields={"messages": [HI, BOT]},
        needs=STRICT,
        **invalid_parameter("messages must end with a message of the role user"),
    ),
    chat("W91 in order", fields={"messages": [SYSTEM, HI, BOT, HI]}, needs=STRICT),
    chat("W91 lenient", fields={"messages": [HI, SYSTEM, HI]}),
    chat("W92", fields={"extra_params": {"top_k": "5"}}, body_is=chat_response()),
    chat("W92 out of range", fields={"extra_params": {"top_k": "0"}}, **invalid_parameter()),
    chat(
        "W92 takes effect",
        fields={"extra_params": {"max_tokens": "1"}},
        body_is=chat_response("Hello", "length", completion_tokens=1, total_tokens=3),
    ),
    chat(
        "W92 its own field wins",
        fields={"max_tokens": 3, "extra_params": {"max_tokens": "1"}},
        body_is=chat_response(),
    ),
    invoke(
        "W93",
        {"prompt": AB},
        body_is=completion_response(
            (0, "Hello world!", "stop"), (1, "Hello world!", "stop"), prompt=2, completion=6
        ),
    ),
    invoke(
        "W93 n 2",
        {"prompt": AB, "n": 2, "max_tokens": 1},
        body_is=completion_response(
            *((i, "Hello", "length") for i in (0, 1, 2, 3)), prompt=2, completion=4
        ),
    ),
    invoke(
        "W93 n 2, index of the prompt",
        {"prompt": AB, "n": 2, "max_tokens": 1},
        needs={"completion_index": "prompt"},
        body_is=completion_response(
            *((i, "Hello", "length") for i in (0, 0, 1, 1)), prompt=2, completion=4
        ),
    ),
    invoke(
        "W93 n 2, index of the prompt, stream",
        {"prompt": AB, "n": 2, "stream": True},
        needs={"completion_index": "prompt"},
        content_type="text/event-stream",
        check=check_indexes(0, 0, 1, 1),
    ),
    invoke(
        "W93 n 2, stream",
        {"prompt": AB, "n": 2, "stream": True},
        content_type="text/event-stream",
        check=check_indexes(0, 1, 2, 3),
    ),
    invoke(
        "W94",
        {"prompt": "a", "echo": True, "suffix": "<e>"},
        body_is=completion_response((0, "aHello world!<e>", "stop"), prompt=1, completion=3),
    ),
    invoke(
        "W95 truncate",
        PROMPT20 | {"error_behavior": "truncate"},
        at="ep-ppt",
        body_is=completion_response((0, "Hello world!", "length"), prompt=8, completion=3),
    ),
    invoke(
        "W95 error",
        PROMPT20 | {"error_behavior": "error"},
        at="ep-ppt",
        **client_error(
            400, "BAD_REQUEST", "Bad request: the prompt has 20 tokens, the model's limit is 8"
        ),
    ),
    invoke(
        "W95 silent",
        PROMPT20,
        at="mock-ctx",
        **client_error(
            400, "BAD_REQUEST", "Bad request: the prompt has 20 tokens, the model's limit is 8"
        ),
    ),
    *(
        invoke(
            f"W95 {how} on a provisioned endpoint",
            PROMPT20 | {"error_behavior": how},
            at="mock-ctx",
            **invalid_parameter("error_behavior is accepted by pay-per-token endpoints only"),
        )
        for how in ("truncate", "error")
    ),
    chat(
        "W95 n 2",
        at="ep-ppt",
        fields={"n": 2},
        **invalid_parameter(re.compile("n must be 1 .*, got 2")),
    ),
    chat("W95 n 1", at="ep-ppt", fields={"n": 1}, body_has={"object": "chat.completion"}),
    invoke(
        "W96",
        {"input": ["a b", "c"], "instruction": "q: "},
        at="ep-emb",
        body_is=embeddings_response([6, 3, 0.5, -0.25], [4, 2, 0.5, -0.25], tokens=5),
    ),
    Case(
        "W97 chat",
        "POST",
        CHAT,
        body={"model": "mock", "messages": [HI]},
        body_is=chat_response(),
        answer_headers={"served-model-name": "1"},
    ),
    Case(
        "W97 completions",
        "POST",
        TEXT,
        body={"model": "mock", "prompt": "a b"},
        body_is=completion_response((0, "Hello world!", "stop"), prompt=2, completion=3),
    ),
    Case(
        "W97 embeddings",
        "POST",
        EMBED,
        body={"model": "ep-emb", "input": "a b", "encoding_format": "base64"},
        body_is=embeddings_response(encode_base64_floats(3, 2, 0.5, -0.25), tokens=2),
    ),
    Case(
        "W97 unknown field",
        "POST",
        CHAT,
        body={"model": "mock", "messages": [HI], "inputs": {}},
        body_is=chat_response(),
    ),
    chat("W98", at="nope", fields={}, **UNKNOWN_ENDPOINT),
    Case("W98 by its name", "GET", f"{LIST}/nope", **UNKNOWN_ENDPOINT),
    Case(
        "W98 in the body",
        "POST",
        CHAT,
        body={"model": "nope", "messages": [HI]},
        **UNKNOWN_ENDPOINT,
    ),
    Case("W98 path", "POST", "/serving-endpoints/a/b/c", **client_error(404, "ENDPOINT_NOT_FOUND")),
    Case("W99", "GET", LIST, body_has={"endpoints": list}, check=check_endpoint_list),
    Case("W99 slash", "GET", f"{LIST}/", body_has={"endpoints": list}, check=check_endpoint_list),
    Case(
        "W100",
        "GET",
        f"{LIST}/ep-ab",
        body_has=ENDPOINT
        | {
            "config": {"served_entities": ENTITIES, "traffic_config": {"routes": ROUTES}},
            "permission_level": "CAN_QUERY",
        },
    ),
    Case("W101", "GET", CONFIG, headers={"authorization": None}, body_is={}),
    Case("W101 wrong token", "GET", CONFIG, headers={"authorization": "Bearer no"}, body_is={}),
    Case(
        "W101 everything else asks for one",
        "GET",
        LIST,
        headers={"authorization": None},
        **client_error(401, "UNAUTHENTICATED"),
    ),
    chat("W102", at="ep-ab", fields={}, times=200, across=check_80_to_20),
)
