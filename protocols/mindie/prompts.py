"""generate and generate_stream, and what they share with every endpoint that takes a prompt.

Source: MindIE-LLM 0695772, single_req_triton_text_infer_interface.cpp; in 1.0.RC1 the published
page of generate_stream.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Raw, Struct

from protocols.core.interfaces import ClientRequest
from protocols.core.request import GenerationRequest, Message
from protocols.mindie import tables
from protocols.mindie.checks import (
    build_param_error,
    get_field,
    read_body_fields,
    read_object_field,
    read_params,
)
from protocols.mindie.profiles import PROMPT_OPTIONS_BY_MODE, MindieConfig
from protocols.mindie.requests import (
    apply_sampling_defaults,
    build_request,
    build_response_options,
    check_media,
    get_invalid_length,
    has_media,
    read_parts,
)

LENGTH_ERROR_SUFFIX: Final = ", but the length of inputs is {length}"
_REQUEST_ID_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,256}")
_REQUEST_ID_ERROR = (
    "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 "
    "words in length."
)


class PromptErrorTexts(Struct, frozen=True):
    """What an endpoint says of a prompt that is no text, of an empty list, and of the length."""

    wrong_type: str
    empty_list: str
    wrong_length: str


def check_request_id(got: Any, *, early: bool = False) -> str:
    """A client's name for its request. Raises InvalidParameter."""
    if not isinstance(got, str):
        raise build_param_error("id must be string type.", "id", "type")
    if not (got if early else _REQUEST_ID_PATTERN.fullmatch(got)):
        raise build_param_error(_REQUEST_ID_ERROR, "id")
    return got


def read_text_request(
    call: ClientRequest, setup: MindieConfig, *, stream: bool
) -> GenerationRequest:
    """The request: ``text_input`` and ``parameters``."""
    fields = read_body_fields(call)
    name = setup.get_request_id(call)
    early = setup.profile.early
    client_id = (
        None if (got := get_field(fields, "id")) is None else check_request_id(got, early=early)
    )
    prompt = _read_text_input(fields, setup, name)
    parameters = read_object_field(fields, "parameters")
    table = setup.profile.text_params
    values = read_params(table, parameters)
    apply_sampling_defaults(values, setup, tokens=tables.DEFAULT_MAX_NEW_TOKENS)
    timing = parameters.get("perf_stat") is not None and get_field(parameters, "perf_stat") is True
    return build_request(
        values,
        setup,
        table,
        parameters,
        model=call.path_params["model"],
        stream=stream,
        want=build_response_options(values, timing=timing),
        client_id=client_id or name,
        **prompt,
    )


def _read_text_input(fields: Mapping[str, Raw], setup: MindieConfig, name: str) -> dict[str, Any]:
    got = get_field(fields, "text_input")
    abnormal = f"The type of text_input is abnormal. The requestId is {name}"
    if got is None:
        raise build_param_error("The text_input not found", "text_input", "missing")
    if isinstance(got, list) and setup.profile.early:
        raise build_param_error(abnormal, "text_input", "type")
    said = "text_input must be necessary and data type must be string and length in (0, {limit}]"
    words = PromptErrorTexts(
        abnormal, "Parameter text_input arr is empty", said + LENGTH_ERROR_SUFFIX
    )
    return read_prompt(fields, "text_input", setup, words)


def read_prompt(
    fields: Mapping[str, Raw], key: str, setup: MindieConfig, words: PromptErrorTexts
) -> dict[str, Any]:
    """A prompt of text or of parts, as fields of the request. Raises InvalidParameter."""
    got, limit = get_field(fields, key), setup.profile.max_text_length
    if isinstance(got, list):
        if not got:
            raise build_param_error(words.empty_list, key, "empty")
        check_media(got)
    elif not isinstance(got, str):
        raise build_param_error(words.wrong_type, key, "type")
    measured = got if isinstance(got, str) else fields[key]
    if (length := get_invalid_length(measured, limit)) is not None:
        text = words.wrong_length.format(limit=limit, length=length)
        raise build_param_error(text, key, "too_long" if length else "empty")
    if isinstance(got, str):
        return {"kind": "completion", "prompts": (got,), "templating": setup.templating}
    if not has_media(got):
        text = "".join(item["text"] for item in got if isinstance(item, dict) and "text" in item)
        return {"kind": "completion", "prompts": (text,), "templating": setup.templating}
    # The server lays a prompt out around its media itself, as it would a user's message.
    said_by_user = (Message("user", read_parts(got)),)
    return {"kind": "chat", "messages": said_by_user, "templating": PROMPT_OPTIONS_BY_MODE["chat"]}
