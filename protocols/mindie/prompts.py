"""generate and generate_stream, and what they share with every endpoint that takes a prompt.

Source: MindIE-LLM 0695772, single_req_triton_text_infer_interface.cpp; in 1.0.RC1 the published
page of generate_stream.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Raw, Struct

from gateway.core.ports import Call
from gateway.core.types import GenerateRequest, Message
from protocols.mindie import tables
from protocols.mindie.checks import body, get, inner, read, wrong
from protocols.mindie.profiles import TEMPLATINGS, Setup
from protocols.mindie.requests import (
    build,
    check_media,
    has_media,
    parts_of,
    sampling,
    too_long,
    want,
)

LENGTH: Final = ", but the length of inputs is {length}"
_ID = re.compile(r"[a-zA-Z0-9_-]{1,256}")
_ID_TEXT = (
    "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 "
    "words in length."
)


class Words(Struct, frozen=True):
    """What an endpoint says of a prompt that is no text, of an empty list, and of the length."""

    wrong_type: str
    empty_list: str
    wrong_length: str


def check_id(got: Any, *, early: bool = False) -> str:
    """A client's name for its request. Raises InvalidParameter."""
    if not isinstance(got, str):
        raise wrong("id must be string type.", "id", "type")
    if not (got if early else _ID.fullmatch(got)):
        raise wrong(_ID_TEXT, "id")
    return got


def read_text(call: Call, setup: Setup, *, stream: bool) -> GenerateRequest:
    """The request: ``text_input`` and ``parameters``."""
    fields = body(call)
    name = setup.get_request_id(call)
    early = setup.profile.early
    client_id = None if (got := get(fields, "id")) is None else check_id(got, early=early)
    prompt = _text_input(fields, setup, name)
    parameters = inner(fields, "parameters")
    table = setup.profile.text_params
    values = read(table, parameters)
    sampling(values, setup, tokens=tables.DEFAULT_NEW_TOKENS)
    timing = parameters.get("perf_stat") is not None and get(parameters, "perf_stat") is True
    return build(
        values,
        setup,
        table,
        parameters,
        model=call.path_params["model"],
        stream=stream,
        want=want(values, timing=timing),
        client_id=client_id or name,
        **prompt,
    )


def _text_input(fields: Mapping[str, Raw], setup: Setup, name: str) -> dict[str, Any]:
    got = get(fields, "text_input")
    abnormal = f"The type of text_input is abnormal. The requestId is {name}"
    if got is None:
        raise wrong("The text_input not found", "text_input", "missing")
    if isinstance(got, list) and setup.profile.early:
        raise wrong(abnormal, "text_input", "type")
    said = "text_input must be necessary and data type must be string and length in (0, {limit}]"
    words = Words(abnormal, "Parameter text_input arr is empty", said + LENGTH)
    return read_prompt(fields, "text_input", setup, words)


def read_prompt(fields: Mapping[str, Raw], key: str, setup: Setup, words: Words) -> dict[str, Any]:
    """A prompt of text or of parts, as fields of the request. Raises InvalidParameter."""
    got, limit = get(fields, key), setup.profile.max_text_length
    if isinstance(got, list):
        if not got:
            raise wrong(words.empty_list, key, "empty")
        check_media(got)
    elif not isinstance(got, str):
        raise wrong(words.wrong_type, key, "type")
    measured = got if isinstance(got, str) else fields[key]
    if (length := too_long(measured, limit)) is not None:
        text = words.wrong_length.format(limit=limit, length=length)
        raise wrong(text, key, "too_long" if length else "empty")
    if isinstance(got, str):
        return {"kind": "completion", "prompts": (got,), "templating": setup.templating}
    if not has_media(got):
        text = "".join(item["text"] for item in got if isinstance(item, dict) and "text" in item)
        return {"kind": "completion", "prompts": (text,), "templating": setup.templating}
    # The server lays a prompt out around its media itself, as it would a user's message.
    said_by_user = (Message("user", parts_of(got)),)
    return {"kind": "chat", "messages": said_by_user, "templating": TEMPLATINGS["chat"]}
