"""Marks for the prompt cache reach the workers that take them, in their place, or are reported."""

import json
from typing import Any, Final

import pytest

from protocols.anthropic.endpoints import Anthropic
from protocols.core.extra import remove_extra_fields
from protocols.core.interfaces import UpstreamAdapter, build_kept_keys_reader
from protocols.openai.endpoints import OpenAI
from tests.unit.protocols.anthropic.conftest import MakeCall

MARK: Final = {"type": "ephemeral", "ttl": "1h"}
PDF: Final = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
PNG: Final = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
CALL: Final = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
SEARCH: Final = {"type": "search_result", "title": "t", "source": "s"}
PLACES: Final = {
    "system[0]": "stable",
    "system[1]": "user's own",
    "tools[0]": "f",
    "messages[0].content[0]": "question",
    "messages[0].content[1]": "s\nfound",
    "messages[0].content[2]": "in a document",
    "messages[0].content[2].source.content[0]": "in a document",
    "messages[1].content[0]": "I call",
    "messages[2].content[0]": "sunny",
    "messages[2].content[0].content[0]": "warm",
    "messages[2].content[1]": "so?",
}
"""Where workers that take marks of texts and tools get each, by a word of the object there."""
LOST: Final = ("messages[0].content[3]", "messages[0].content[4]", "messages[1].content[1]")
"""Marks of an image, a file and a call."""


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


RESULT: Final = {"type": "tool_result", "tool_use_id": "a"}


def build_request(*marked: str) -> dict[str, Any]:
    """A request with a block of each kind, of which those at the paths are ``marked``."""
    parts = [text("in a document"), text("and more")]
    request: dict[str, Any] = {
        "system": [text("stable"), text("user's own"), text("today's")],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "messages": [
            {
                "role": "user",
                "content": [
                    text("question"),
                    {**SEARCH, "content": [text("found")]},
                    {"type": "document", "source": {"type": "content", "content": parts}},
                    {"type": "image", "source": PNG},
                    {"type": "document", "source": PDF},
                ],
            },
            {"role": "assistant", "content": [text("I call"), dict(CALL)]},
            {
                "role": "user",
                "content": [
                    {**RESULT, "content": [text("warm"), text("sunny")]},
                    text("so?"),
                ],
            },
        ],
    }  # fmt: skip
    for path in marked:
        target: Any = request
        for step in path.replace("[", ".").replace("]", "").split("."):
            target = target[int(step) if step.isdecimal() else step]
        target["cache_control"] = MARK
    return request


def translate(call: Any, worker: UpstreamAdapter, **rules: Any) -> tuple[Any, list[str]]:
    """The worker's body, and the fields that are reported."""
    request: Any = Anthropic(**rules).decode_request(call).bind_target("w", "anthropic")
    request, losses = remove_extra_fields(request, build_kept_keys_reader(worker)(request))
    reported = (*worker.unsupported_parameters(request, {}), *losses)
    fields = [one.field for one in reported if one.path != "messages"]
    return json.loads(worker.encode_request(request).body), fields


def find_marked(value: Any) -> list[Any]:
    """The objects in a body that are marked."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    marked = [one for item in inner for one in find_marked(item)]
    return [value, *marked] if isinstance(value, dict) and "cache_control" in value else marked


@pytest.mark.parametrize("worker", [OpenAI("openrouter"), Anthropic()], ids=["openrouter", "own"])
@pytest.mark.parametrize("place", PLACES)
def test_mark_reaches_workers_that_take_it_in_its_place(
    make: MakeCall, worker: UpstreamAdapter, place: str
) -> None:
    body, reported = translate(make(build_request(place)), worker)

    [marked] = find_marked(body)
    assert marked["cache_control"] == MARK
    assert PLACES[place] in json.dumps(marked, ensure_ascii=False).replace("\\n", "\n")
    assert reported == []


@pytest.mark.parametrize("place", LOST)
def test_mark_without_a_place_at_openrouter_is_reported(make: MakeCall, place: str) -> None:
    own, _ = translate(make(build_request(place)), Anthropic())
    assert len(find_marked(own)) == 1

    body, reported = translate(make(build_request(place)), OpenAI("openrouter"))

    assert find_marked(body) == []
    assert reported == [f"{place}.cache_control"]


def test_workers_without_marks_get_the_same_conversation(make: MakeCall) -> None:
    plain, _ = translate(make(build_request()), OpenAI("vllm"))

    body, reported = translate(make(build_request(*PLACES, *LOST)), OpenAI("vllm"))

    assert body == plain
    assert set(reported) == {f"{place}.cache_control" for place in (*PLACES, *LOST)}


def test_texts_around_a_mark_say_the_same(make: MakeCall) -> None:
    plain, _ = translate(make(build_request()), OpenAI("openrouter"))

    body, _ = translate(make(build_request("system[0]")), OpenAI("openrouter"))

    first, rest = body["messages"][0]["content"]
    assert first == {**text("stable"), "cache_control": MARK}
    assert first["text"] + rest["text"] == plain["messages"][0]["content"]


def test_mark_of_the_whole_request_reaches_workers_that_place_it(make: MakeCall) -> None:
    request = {**build_request(), "cache_control": MARK}

    body, reported = translate(make(request), OpenAI("openrouter"))
    assert (body["cache_control"], reported) == (MARK, [])

    body, reported = translate(make(request), OpenAI())
    assert ("cache_control" in body, reported) == (False, ["cache_control"])


@pytest.mark.parametrize("role", ["user", "tool"])
def test_mark_of_a_folded_system_message_is_kept(make: MakeCall, role: str) -> None:
    request = build_request()
    request["messages"] = request["messages"][: 1 if role == "user" else 3]
    if role == "tool":
        del request["messages"][2]["content"][1]
    system = {"role": "system", "content": [{**text("note"), "cache_control": MARK}]}
    request["messages"].append(system)

    body, reported = translate(make(request), OpenAI("openrouter"), mid_system="fold")

    [marked] = find_marked(body)
    assert marked["text"].endswith("<system-reminder>\nnote")
    assert body["messages"][-1]["content"][-1] == text("\n</system-reminder>")
    assert reported == []


def test_blank_text_has_no_mark(make: MakeCall) -> None:
    call = {"role": "user", "content": [{**text(""), "cache_control": MARK}, text("hi")]}

    body, reported = translate(make({"messages": [call]}), Anthropic())

    assert find_marked(body) == []
    assert reported == ["messages[0].content[0].cache_control"]


def test_result_of_a_tool_with_an_image_keeps_its_mark(make: MakeCall) -> None:
    request = build_request()
    marked = {**text("sunny"), "cache_control": MARK}
    request["messages"][2]["content"][0]["content"] = [marked, {"type": "image", "source": PNG}]

    body, reported = translate(make(request), OpenAI("openrouter"))

    result = next(one for one in body["messages"] if one["role"] == "tool")
    assert result["content"] == [marked, text("[image 1 of call a follows]")]
    assert reported == []
