"""Client bodies to the internal request: prompts, token ids, TGI and vLLM style, chat, completions.

Sources: MindIE-LLM 0695772, src/server/endpoint/single_req_infer_interface/*.cpp. Where the source
and the published pages differ on requests without a temperature: see ``apply_sampling_defaults``.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

from msgspec import Raw, Struct

from protocols.chat.tools import read_response_format, read_tool_choice, read_tools
from protocols.core.errors import MalformedRequest
from protocols.core.interfaces import ClientRequest
from protocols.core.request import (
    AudioPart,
    ContentPart,
    GenerationRequest,
    ImagePart,
    Message,
    ResponseOptions,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    VideoPart,
)
from protocols.mindie import params
from protocols.mindie.errors import MISSING_INPUT_ERROR, describe_unknown_model
from protocols.mindie.params import (
    PROMPT_OPTIONS_BY_MODE,
    RAW_PROMPT_OPTIONS,
    MindieConfig,
    MindieParamTable,
    build_param_error,
    collect_extra_fields,
    count_utf16_units,
    decode_fields,
    get_field,
    read_body_fields,
    read_first_object,
    read_object_field,
    read_params,
)
from protocols.params import ParsedParams

_MAX_MEDIA_PARTS = 20
MAX_BEAM_TOKENS = 128
PRIORITY_STEP = 51
"""Map priorities 1 to 5 to 0 to 204; in both, lower values go first."""
_MEDIA_KEYS = ("image_url", "audio_url", "video_url")


# --- text and media -------------------------------------------------------------------------------


def get_invalid_length(text: str | Raw, limit: int) -> int | None:
    """Return the length in UTF-16 units if the text is empty or longer than ``limit``."""
    found = text if isinstance(text, str) else bytes(text).decode()
    if found and len(found) * 2 <= limit:
        return None
    length = count_utf16_units(found)
    return None if 0 < length <= limit else length


def has_media(items: Sequence[Any]) -> bool:
    """Whether a list of parts holds more than text."""
    return any(isinstance(item, dict) and any(key in item for key in _MEDIA_KEYS) for item in items)


def check_media(items: Sequence[Any]) -> None:
    """Check a list of parts. Raises InvalidParameter for parts that the server rejects."""
    found = 0
    for item in items:
        if not isinstance(item, dict):
            continue
        if not isinstance(item.get("text", ""), str):
            raise build_param_error("Request param text must be string", "text", "type")
        media = [key for key in _MEDIA_KEYS if key in item]
        for key in media:
            if item[key] is None:
                raise build_param_error(f"Request param {key} null", key, "missing")
        found += bool(media)
        if found > _MAX_MEDIA_PARTS:
            text = f"The number of multimodal url should be no more than {_MAX_MEDIA_PARTS}"
            raise build_param_error(text, media[0], "too_long")


def read_parts(items: Sequence[Any]) -> tuple[ContentPart, ...]:
    """Convert the parts that ``check_media`` accepted; ignore items that are not parts."""
    parts: list[ContentPart] = []
    for item in items:
        match item:
            case {"image_url": got}:
                parts.append(ImagePart(_read_media_url(got)))
            case {"video_url": got}:
                parts.append(VideoPart(_read_media_url(got)))
            case {"audio_url": got}:
                parts.append(AudioPart(_read_media_url(got)))
            case {"text": str(text)}:
                parts.append(TextPart(text))
            case _:
                pass
    return tuple(parts)


def _read_media_url(got: Any) -> str:
    match got:
        case str(url) | {"url": str(url)}:
            return url
        case _:
            raise build_param_error("The type of inputs is abnormal", "inputs", "type")


# --- number of choices ----------------------------------------------------------------------------


class ChoiceCountErrors(Struct, frozen=True):
    """Error texts for conflicting ``best_of`` (b) and ``n`` values."""

    best_of_below_n: str
    best_of_not_n: str
    """For streams; empty if a stream may have more candidates than choices."""
    no_temperature: str
    """For several choices without a temperature, which would all be equal."""
    null_text: str = "None"


CHAT_COUNT_ERRORS = ChoiceCountErrors(
    "best_of must be greater than or equal to n, but best_of is {b}, n is {n}.",
    "best_of must be equal to n in stream mode, but best_of is {b}, n is {n}.",
    "best_of/n can not greater than 1 without using beam search when temperature is 0 or not set, "
    "but best_of is {b}, n is {n}.",
)
COMPLETION_COUNT_ERRORS = ChoiceCountErrors(
    "Best_of must be greater than or equal to n, but best_of is {b} and n is {n}.",
    "best_of must be equal to n, but best_of is {b} and n is {n}.",
    "Best_of and n shouldn't be greater than 1 when sampling is disabled, but best_of is {b} and "
    "n is {n}.",
    "null",
)
VLLM_STYLE_COUNT_ERRORS = ChoiceCountErrors(
    "best_of should greater than or equal to n, but best_of is {b}, n is {n}.",
    "",
    "Best_of/N can not greater than 1 when temperature is 0 or not set, but best_of is {b}, "
    "n is {n}.",
)


def resolve_choice_count(values: ParsedParams, count_errors: ChoiceCountErrors) -> None:
    """Set ``n`` to the number of candidates. Raises InvalidParameter."""
    n, best = values.get("n"), values.get("best_of")
    if values.get("request.beams"):
        _resolve_beam_width(values)
        return
    b, shown = best or count_errors.null_text, n or count_errors.null_text
    if best is not None and values.get("stream") and count_errors.best_of_not_n and best != n:
        text = CHAT_COUNT_ERRORS.best_of_not_n if n is None else count_errors.best_of_not_n
        raise build_param_error(text.format(b=b, n=n), "best_of", "conflict")
    if best is not None and n is not None and best < n:
        raise build_param_error(
            count_errors.best_of_below_n.format(b=b, n=n), "best_of", "conflict"
        )
    answers = best or n or 1
    if answers > 1 and not values.get("sampling.temperature"):
        raise build_param_error(count_errors.no_temperature.format(b=b, n=shown), "n", "conflict")
    values["best_of"] = None
    values["n"] = answers if best or n else None


def _resolve_beam_width(values: ParsedParams) -> None:
    most = values.get("stopping.max_tokens")
    if most is None or most > MAX_BEAM_TOKENS:
        raise build_param_error(
            f"Please set the max_tokens to be not larger than {MAX_BEAM_TOKENS} when the "
            "use_beam_search is on.",
            "max_tokens",
            "conflict",
        )
    n = values.get("n") or 1
    values["sampling.beam_width"] = max(values.get("best_of") or 1, n)
    values["best_of"] = None


# --- the internal request -------------------------------------------------------------------------


def build_request(
    values: ParsedParams,
    setup: MindieConfig,
    table: MindieParamTable,
    fields: Mapping[str, Raw],
    **more: Any,
) -> GenerationRequest:
    """Build the request from the values that ``table`` read from ``fields``.

    ``more`` are fields of the request; ``known`` are wire fields that are read elsewhere.
    """
    if (priority := values.get("priority")) is not None:
        values["priority"] = (priority - 1) * PRIORITY_STEP
    if (seconds := values.get("timeout")) is not None:
        values["timeout"] = float(seconds)
    if setup.max_iter_times is not None:
        max_tokens = values.get("stopping.max_tokens") or setup.max_iter_times
        values["stopping.max_tokens"] = min(max_tokens, setup.max_iter_times)
    known = more.pop("known", ())
    return GenerationRequest(
        **{
            **values.build_request_arguments(),
            "extra": collect_extra_fields(table, fields, known),
            **more,
        }
    )


def apply_sampling_defaults(
    values: ParsedParams, setup: MindieConfig, *, tokens: int | None
) -> None:
    """Set the defaults of the endpoints that are not OpenAI-style.

    ``tokens`` is the default of max_tokens. A request without sampling is greedy; in the early
    releases that is every request with neither ``do_sample`` nor a temperature (inferred from the
    published default of ``do_sample``, not measured).
    """
    if tokens is not None and values.get("stopping.max_tokens") is None:
        values["stopping.max_tokens"] = tokens
    do_sample = values.get("sampling.do_sample")
    silent = setup.profile.early and values.get("sampling.temperature") is None
    if do_sample is False or (do_sample is None and silent):
        values["sampling.temperature"] = 0.0


def build_response_options(
    values: ParsedParams, *, token_ids: bool = False, timing: bool = False
) -> ResponseOptions:
    """Build the response options."""
    details = bool(values.get("request.details") or values.get("request.prefill"))
    return ResponseOptions(details=details, timing=details or timing, token_ids=token_ids)


# generate and generate_stream, and what all prompt endpoints share.
#
# Source: MindIE-LLM 0695772, single_req_triton_text_infer_interface.cpp; in 1.0.RC1 the published
# page of generate_stream.

LENGTH_ERROR_SUFFIX: Final = ", but the length of inputs is {length}"
_REQUEST_ID_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,256}")
_REQUEST_ID_ERROR = (
    "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 "
    "words in length."
)


class PromptErrorTexts(Struct, frozen=True):
    """An endpoint's error texts for a prompt of a wrong type, an empty list and a wrong length."""

    wrong_type: str
    empty_list: str
    wrong_length: str


def check_request_id(got: Any, *, early: bool = False) -> str:
    """Read the client's request id. Raises InvalidParameter."""
    if not isinstance(got, str):
        raise build_param_error("id must be string type.", "id", "type")
    if not (got if early else _REQUEST_ID_PATTERN.fullmatch(got)):
        raise build_param_error(_REQUEST_ID_ERROR, "id")
    return got


def read_text_request(
    call: ClientRequest, setup: MindieConfig, *, stream: bool
) -> GenerationRequest:
    """Read a generate request: ``text_input`` and ``parameters``."""
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
    apply_sampling_defaults(values, setup, tokens=params.DEFAULT_MAX_NEW_TOKENS)
    timing = parameters.get("perf_stat") is not None and get_field(parameters, "perf_stat") is True
    return build_request(
        values,
        setup,
        table,
        parameters,
        model=call.path_params["model"],
        stream=stream,
        response_options=build_response_options(values, timing=timing),
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
    error_text = (
        "text_input must be necessary and data type must be string and length in (0, {limit}]"
    )
    words = PromptErrorTexts(
        abnormal, "Parameter text_input arr is empty", error_text + LENGTH_ERROR_SUFFIX
    )
    return read_prompt(fields, "text_input", setup, words)


def read_prompt(
    fields: Mapping[str, Raw], key: str, setup: MindieConfig, words: PromptErrorTexts
) -> dict[str, Any]:
    """Convert a prompt (text or parts) to request fields. Raises InvalidParameter."""
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
    # The server places media in the prompt itself, as in a user message.
    said_by_user = (Message("user", read_parts(got)),)
    return {"kind": "chat", "messages": said_by_user, "templating": PROMPT_OPTIONS_BY_MODE["chat"]}


# Requests of the endpoints without a model name: native, TGI style and vLLM style.
#
# Source: MindIE-LLM 0695772, single_req_self_develop_infer_interface.cpp,
# single_req_tgi_text_infer_interface.cpp, single_req_vllm_infer_interface.cpp, and the choice
# between the last two in http_handler.cpp.

_MAX_TOKEN_ID = 1 << 20
_ADAPTER_ID_PATTERN = re.compile(r"[a-zA-Z0-9_./-]{1,256}")
_INPUTS_TYPE_ERROR = "The type of inputs is abnormal"
_INPUTS_EMPTY_ERROR = "Inputs arr is empty"
_REQUIRED_ERROR_SUFFIX = (
    " must be necessary and data type must be string and length in (0, {limit}]"
    + LENGTH_ERROR_SUFFIX
)
_NATIVE_ERRORS = PromptErrorTexts(
    _INPUTS_TYPE_ERROR, _INPUTS_EMPTY_ERROR, "Inputs" + _REQUIRED_ERROR_SUFFIX
)
_TGI_STYLE_ERRORS = PromptErrorTexts(
    _INPUTS_TYPE_ERROR,
    _INPUTS_EMPTY_ERROR,
    "Inputs length must be in (0, {limit}], but got {length}",
)
_VLLM_STYLE_ERRORS = PromptErrorTexts(
    "The type of prompt is abnormal", "Prompt arr is empty", "Prompt" + _REQUIRED_ERROR_SUFFIX
)


def detect_generate_style(call: ClientRequest) -> Literal["inputs", "prompt"]:
    """Whether a /generate request is TGI or vLLM style. Raises InvalidParameter for neither."""
    try:
        fields = read_body_fields(call)
        if get_field(fields, "prompt") is not None:
            return "prompt"
        if get_field(fields, "inputs") is not None:
            return "inputs"
    except MalformedRequest:
        pass
    raise build_param_error(MISSING_INPUT_ERROR, "inputs", "missing")


def read_native_request(call: ClientRequest, setup: MindieConfig, model: str) -> GenerationRequest:
    """Read an /infer or /infer_token request: text, or token ids."""
    fields = read_body_fields(call)
    if "inputs" in fields and "input_id" in fields:
        raise build_param_error("Input conflict.", "inputs", "conflict")
    if "inputs" in fields:
        if get_field(fields, "inputs") is None:
            raise build_param_error("Inputs must not be null", "inputs", "missing")
        prompt = read_prompt(fields, "inputs", setup, _NATIVE_ERRORS)
    elif "input_id" in fields:
        ids = _read_token_ids(get_field(fields, "input_id"))
        prompt = {"kind": "completion", "prompts": (ids,), "templating": RAW_PROMPT_OPTIONS}
    else:
        raise build_param_error("Not found inputs.", "inputs", "missing")
    parameters = read_object_field(fields, "parameters")
    values = read_params(params.NATIVE_PARAMS, parameters)
    if (stream := get_field(fields, "stream")) is not None and not isinstance(stream, bool):
        raise build_param_error("stream must be boolean type.", "stream", "type")
    apply_sampling_defaults(values, setup, tokens=params.DEFAULT_MAX_NEW_TOKENS)
    return build_request(
        values,
        setup,
        params.NATIVE_PARAMS,
        parameters,
        model=model,
        stream=bool(stream),
        response_options=build_response_options(values, token_ids=True, timing=bool(stream)),
        client_id=setup.get_request_id(call),
        **prompt,
    )


def _read_token_ids(got: Any) -> tuple[int, ...]:
    if got is None:
        raise build_param_error("Input_id should not be empty", "input_id", "missing")
    if not isinstance(got, list):
        raise build_param_error("Parameter input_id must be an array", "input_id", "type")
    if not all(type(one) is int for one in got):
        raise build_param_error("Parameter input_id must be integer", "input_id", "type")
    if not all(0 <= one <= _MAX_TOKEN_ID for one in got):
        raise build_param_error("Data element in param input_id is invalid", "input_id")
    if not 0 < len(got) <= _MAX_TOKEN_ID:
        text = f"Inputs token length must be in (0, {_MAX_TOKEN_ID}], but got {len(got)}"
        raise build_param_error(text, "input_id", "too_long" if got else "empty")
    return tuple(got)


def read_stream_flag(call: ClientRequest) -> bool:
    """Whether a request to / is streamed. Raises InvalidParameter or MalformedRequest."""
    stream = get_field(read_body_fields(call), "stream")
    if stream is not None and not isinstance(stream, bool):
        raise build_param_error("Stream must be boolean type.", "stream", "type")
    return bool(stream)


def read_tgi_style_request(
    call: ClientRequest, setup: MindieConfig, model: str, *, stream: bool
) -> GenerationRequest:
    """Read a request of the TGI-style endpoints."""
    fields = read_body_fields(call)
    if get_field(fields, "inputs") is None:
        text = "Request should contain 'inputs' and the type should be string."
        raise build_param_error(text, "inputs", "missing")
    prompt = read_prompt(fields, "inputs", setup, _TGI_STYLE_ERRORS)
    parameters = read_object_field(fields, "parameters")
    values = read_params(params.TGI_STYLE_PARAMS, parameters)
    if stream and values.get("request.prefill"):
        text = "The decoder_input_details must not be true when stream is true."
        raise build_param_error(text, "decoder_input_details", "conflict")
    apply_sampling_defaults(values, setup, tokens=params.DEFAULT_MAX_NEW_TOKENS)
    return build_request(
        values,
        setup,
        params.TGI_STYLE_PARAMS,
        parameters,
        known=("adapter_id",),
        model=model,
        adapter=_read_adapter(parameters, values),
        stream=stream,
        response_options=build_response_options(
            values, token_ids=stream or bool(values.get("request.details"))
        ),
        client_id=setup.get_request_id(call),
        **prompt,
    )


def _read_adapter(parameters: Mapping[str, Raw], values: ParsedParams) -> str | None:
    got = get_field(parameters, "adapter_id")
    if got is None:
        return None
    if not isinstance(got, str):
        raise build_param_error("adapter_id must be string type.", "adapter_id", "type")
    if not _ADAPTER_ID_PATTERN.fullmatch(got):
        raise build_param_error("The format of adapter_id is invalid.", "adapter_id")
    values.provided_fields.add("adapter_id")
    return got


def read_vllm_style_request(
    call: ClientRequest, setup: MindieConfig, model: str
) -> GenerationRequest:
    """Read a vLLM-style /generate request: its parameters are next to the prompt."""
    fields = read_body_fields(call)
    prompt = read_prompt(fields, "prompt", setup, _VLLM_STYLE_ERRORS)
    values = read_params(params.VLLM_STYLE_PARAMS, fields)
    resolve_choice_count(values, VLLM_STYLE_COUNT_ERRORS)
    return build_request(
        values,
        setup,
        params.VLLM_STYLE_PARAMS,
        fields,
        known=("prompt", "model"),
        model=model,
        client_id=setup.get_request_id(call),
        **prompt,
    )


# Chat messages.
#
# Source: MindIE-LLM 0695772, single_req_vllm_openai_infer_interface.cpp. For 1.0.RC1 (roles, no
# empty content) the published page.

Role = Literal["system", "user", "assistant", "tool"]
Fields = Mapping[str, Any]

ROLES: Final = ("system", "user", "assistant", "tool")
_FUNCTION_NAME_PATTERN = re.compile(r"[a-zA-Z0-9_\u4e00-\u9fa5-]{1,64}")
_MISSING_CONTENT_ERROR = "Request param contains not content or content null"


def read_messages(got: Any, *, full: bool, tools: bool) -> tuple[Message, ...]:
    """Read the messages. Raises InvalidParameter.

    ``full``: content must not be empty. ``tools``: the request has tools, for which the server has
    another error text if the messages are not a list.
    """
    if got is None:
        text = "is null" if tools else "contains not messages or messages null"
        text = f"Request param {'messages ' if tools else ''}{text}"
        raise build_param_error(text, "messages", "missing")
    if not isinstance(got, list) or not got:
        text = f"Request param messages {'is ' if tools else ''}not arr or arr is empty"
        raise build_param_error(text, "messages", "empty" if got == [] else "type")
    return tuple(
        _read_message(one if isinstance(one, dict) else {}, f"messages[{i}]", full=full)
        for i, one in enumerate(got)
    )


def check_function_name(name: str, at: str) -> None:
    """Check a function name. Raises InvalidParameter."""
    if not _FUNCTION_NAME_PATTERN.fullmatch(name):
        raise build_param_error(
            "The name of function must be a-z, A-Z, 0-9, common chinese characters, underscores "
            f"and dashe within max length of 64, unexpected function name: {name[:300]}",
            at,
        )


def _read_message(got: Fields, at: str, *, full: bool) -> Message:
    role = got.get("role")
    if role is None:
        raise build_param_error(
            "Request param contains not role or role null", f"{at}.role", "missing"
        )
    if role not in ROLES:
        text = "Request param contains role must be system, assistant, user or tool"
        raise build_param_error(text, f"{at}.role")
    match role:
        case "tool":
            call_id = _read_tool_call_id(got.get("tool_call_id"), f"{at}.tool_call_id")
            return Message("tool", _read_content(got, at, full=False), tool_call_id=call_id)
        case "assistant":
            return _read_assistant_message(got, at)
        case _:
            name = got.get("name")
            parts = _read_content(got, at, full=full)
            return Message(cast("Role", role), parts, name if isinstance(name, str) else None)


def _read_content(got: Fields, at: str, *, full: bool) -> tuple[ContentPart, ...]:
    at = f"{at}.content"
    match got.get("content"):
        case None:
            raise build_param_error(_MISSING_CONTENT_ERROR, at, "missing")
        case "" if full:
            raise build_param_error("Request param content len should not be 0", at, "empty")
        case str(text):
            return (TextPart(text),)
        case list(items):
            check_media(items)
            return read_parts(items) or (TextPart(""),)
        case _:
            raise build_param_error("The type of inputs is abnormal", at, "type")


def _read_assistant_message(got: Fields, at: str) -> Message:
    """Read an assistant message: content is optional next to tool calls, but may not be empty."""
    calls = got.get("tool_calls")
    if calls is not None:
        found = calls if isinstance(calls, list) else [calls]
        made = tuple(_read_tool_call(one, f"{at}.tool_calls[{k}]") for k, one in enumerate(found))
        return Message("assistant", _read_content_with_calls(got.get("content")), tool_calls=made)
    content = got.get("content")
    if isinstance(content, list) and not has_media(content):
        content = "".join(part.text for part in read_parts(content) if isinstance(part, TextPart))
    at = f"{at}.content"
    if content is None:
        raise build_param_error(_MISSING_CONTENT_ERROR, at, "missing")
    if not isinstance(content, str):
        raise build_param_error(
            'Request param "content" arguments expected to be a string', at, "type"
        )
    if not content:
        raise build_param_error('Request param "content" should not be empty', at, "empty")
    return Message("assistant", (TextPart(content),))


def _read_content_with_calls(content: Any) -> tuple[ContentPart, ...]:
    match content:
        case str(text) if text:
            return (TextPart(text),)
        case list(items):
            return read_parts(items)
        case _:
            return ()


def _read_tool_call_id(got: Any, at: str) -> str:
    if got is None:
        text = "Request param contains not tool_call_id or tool_call_id null while role is tool"
        raise build_param_error(text, at, "missing")
    if not isinstance(got, str):
        raise build_param_error("The type of tool_call_id is abnormal", at, "type")
    if not got:
        text = "Request param tool_call_id len should not be 0 while role is tool"
        raise build_param_error(text, at, "empty")
    return got


def _read_tool_call(got: Any, at: str) -> ToolCall:
    fields: Fields = got if isinstance(got, dict) else {}
    call_id = _read_string(
        fields,
        "id",
        at,
        "Tool call param contains no id.",
        'Tool call param "id" arguments expected to be a string',
    )
    if fields.get("type") != "function":
        text = "The type of the tool. Currently, only function is supported."
        raise build_param_error(text, f"{at}.type")
    function = fields.get("function")
    if not isinstance(function, dict):
        text = "Tool call param contains no function that the model called."
        raise build_param_error(text, f"{at}.function", "missing")
    name = _read_string(
        function,
        "name",
        f"{at}.function",
        "Tool call param contains no function name",
        "Tool call param function name expected to be a string",
    )
    check_function_name(name, f"{at}.function.name")
    arguments = _read_string(
        function,
        "arguments",
        f"{at}.function",
        "Tool call param contains no function arguments",
        "Tool call param function arguments expected to be a string",
    )
    return ToolCall(call_id, name, arguments)


def _read_string(fields: Fields, name: str, at: str, absent: str, typed: str) -> str:
    got = fields.get(name)
    if got is None:
        raise build_param_error(absent, f"{at}.{name}", "missing")
    if not isinstance(got, str):
        raise build_param_error(typed, f"{at}.{name}", "type")
    return got


# infer: token ids in, token ids out.
#
# Source: MindIE-LLM 0695772, single_req_triton_token_infer_interface.cpp; its published examples
# put the parameters next to the tensor, while the source reads them inside it.

MAX_INPUT_TOKENS: Final = 1 << 20


def read_tokens_request(call: ClientRequest, setup: MindieConfig) -> GenerationRequest:
    """Read an infer request: a tensor of token ids, its parameters inside or next to it."""
    fields = read_body_fields(call)
    name = setup.get_request_id(call)
    inputs = get_field(fields, "inputs")
    if not isinstance(inputs, list):
        raise build_param_error(
            "Req should contain 'inputs' and the type should be array.", "inputs", "type"
        )
    if len(inputs) != 1:
        raise build_param_error("Inputs count must be 1.", "inputs")
    tensor = inputs[0] if isinstance(inputs[0], dict) else {}
    ids = _read_token_tensor(tensor)
    client_id = None if (got := get_field(fields, "id")) is None else check_request_id(got)
    read_output_name(get_field(fields, "outputs"))
    holder = fields if tensor.get("parameters") is None else read_first_object(fields["inputs"])
    parameters = read_object_field(holder, "parameters")
    values = read_params(params.TOKENS_PARAMS, parameters)
    apply_sampling_defaults(values, setup, tokens=params.DEFAULT_MAX_NEW_TOKENS)
    return build_request(
        values,
        setup,
        params.TOKENS_PARAMS,
        parameters,
        model=call.path_params["model"],
        kind="completion",
        prompts=(ids,),
        templating=RAW_PROMPT_OPTIONS,
        response_options=build_response_options(values, token_ids=True),
        client_id=client_id or name,
    )


def read_output_name(outputs: Any) -> str:
    """Read the name of the output tensor. Raises InvalidParameter."""
    if not isinstance(outputs, list):
        raise build_param_error(
            "Req should contain 'outputs' and the type should be array.", "outputs", "type"
        )
    if len(outputs) != 1:
        raise build_param_error(f"Outputs size should be 1, got {len(outputs)}.", "outputs")
    name = outputs[0].get("name") if isinstance(outputs[0], dict) else None
    if not isinstance(name, str):
        raise build_param_error("Outputs name must be non-empty string.", "outputs[0].name", "type")
    return name or "output0"


def _read_token_tensor(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    name, shape = tensor.get("name"), tensor.get("shape")
    kind, data = tensor.get("datatype"), tensor.get("data")
    if not isinstance(name, str):
        text = "Cannot find name in inputs or its type is not string"
        raise build_param_error(text, "inputs[0].name", "type")
    if len(name) > 256:  # noqa: PLR2004 - the server's number
        raise build_param_error(
            "The length of name set in inputs exceeds 256.", "inputs[0].name", "too_long"
        )
    length = _read_tensor_length(shape)
    if not isinstance(kind, str):
        text = "Cannot find datatype in inputs or its type is not string"
        raise build_param_error(text, "inputs[0].datatype", "type")
    if kind != "UINT32":
        raise build_param_error(f"Unsupported datatype, got {kind[:64]}.", "inputs[0].datatype")
    if not isinstance(data, list):
        text = "Cannot find data in inputs or its type is not array"
        raise build_param_error(text, "inputs[0].data", "type")
    if len(data) != length:
        raise build_param_error(f"Data size should be {length}, got {len(data)}.", "inputs[0].data")
    if not all(type(one) is int and one >= 0 for one in data):
        raise build_param_error("Data element must be integer type.", "inputs[0].data", "type")
    return tuple(data)


def _read_tensor_length(shape: Any) -> int:
    at = "inputs[0].shape"
    if not isinstance(shape, list):
        raise build_param_error("Cannot find shape in inputs or its type is not array", at, "type")
    if not all(type(one) is int and one >= 0 for one in shape):
        raise build_param_error("Shape element must be integer type.", at, "type")
    match shape:
        case [length] | [1, length] if 0 < length <= MAX_INPUT_TOKENS:
            return int(length)
        case _:
            raise build_param_error(
                "Shape must be at most two-dimensional, and the last element's value must be in "
                f"(0,{MAX_INPUT_TOKENS}].",
                at,
            )


# OpenAI-style chat and completions requests.
#
# Source: MindIE-LLM 0695772, single_req_vllm_openai_infer_interface.cpp, the sources of the
# server's own validator and of completions next to it, and infer_param.cpp for
# ``response_format``; in 1.0.RC1 the published page: fields that it does not list are ignored.

_KNOWN_CHAT_FIELDS = (
    *("model", "messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs"),
)
_EARLY_MODEL_NAME_PATTERN = re.compile(r"(?![._-])[A-Za-z0-9._-]{1,256}(?<![._-])")


def read_model_name(fields: Mapping[str, Raw], setup: MindieConfig) -> str:
    """Read the model name of a body. Raises InvalidParameter."""
    got = get_field(fields, "model")
    if got is None:
        raise build_param_error("Request contains not model or model null", "model", "missing")
    if not isinstance(got, str):
        raise build_param_error("Request param model must be string", "model", "type")
    if not got:
        raise build_param_error("Request param model must be not empty", "model", "empty")
    if setup.profile.early and not _EARLY_MODEL_NAME_PATTERN.fullmatch(got):
        raise build_param_error(describe_unknown_model(got), "model")
    return got


def read_chat_request(call: ClientRequest, setup: MindieConfig) -> GenerationRequest:
    """Read a /v1/chat/completions request."""
    fields = read_body_fields(call)
    model = read_model_name(fields, setup)
    early = setup.profile.early
    known = ("model", "messages") if early else _KNOWN_CHAT_FIELDS
    form = {} if early else _read_tool_fields(fields)
    template = {} if early else _read_template(fields)
    offered = bool(form.get("tools"))
    messages = read_messages(get_field(fields, "messages"), full=early or offered, tools=offered)
    _check_messages_length(fields["messages"], setup.profile.max_text_length, tools=offered)
    values = read_params(setup.chat_params, fields)
    if not early:
        _set_chat_logprobs(values)
        for path, got in template.items():
            values[path] = got
        if setup.vllm_validator:  # the server's own validator ignores it
            form["output"] = _read_output_format(fields)
            known = (*known, "response_format")
        resolve_choice_count(values, CHAT_COUNT_ERRORS)
    return build_request(
        values,
        setup,
        setup.chat_params,
        fields,
        known=known,
        model=model,
        kind="chat",
        messages=messages,
        client_id=setup.get_request_id(call),
        **form,
    )


def _set_chat_logprobs(values: ParsedParams) -> None:
    top = values.get("request.top_logprobs")
    if values.get("request.logprobs") or top is not None:
        values["logprobs.top"] = top or 0


def _check_messages_length(raw: Raw, limit: int, *, tools: bool) -> None:
    if (length := get_invalid_length(raw, limit)) is not None:
        end = "]" if tools else ""  # the server closes the bracket only in this text
        raise build_param_error(
            f"Messages len not in (0, {limit}{end}, but the length of inputs is {length}",
            "messages",
            "too_long",
        )


# --- tools, templates, output ---------------------------------------------------------------------


def _read_tool_fields(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """Read the tool choice, then the tools, in the server's order."""
    _check_tool_choice(get_field(fields, "tool_choice"))
    items = get_field(fields, "tools")
    if not items:
        return {}
    if not isinstance(items, list):
        raise build_param_error("Tools not array", "tools", "type")
    for i, item in enumerate(items):
        _check_tool(item if isinstance(item, dict) else {}, f"tools[{i}]")
    tools: tuple[Tool, ...] = read_tools(fields, most=len(items), kinds=("function",))
    choice: ToolChoice | None = read_tool_choice(fields, tools)
    return {"tools": tools, "tool_choice": choice}


def _check_tool_choice(got: Any) -> None:
    match got:
        case None | "none" | "auto" | "required":
            pass
        case str():
            text = "Parameter tool_choice string not in [none, auto, required]"
            raise build_param_error(text, "tool_choice")
        case dict():
            _check_tool(got, "tool_choice")
        case _:
            raise build_param_error(
                "Parameter tool_choice not string or object", "tool_choice", "type"
            )


def _check_tool(got: Mapping[str, Any], at: str) -> None:
    if "type" not in got:
        raise build_param_error("Tool param invalid, tool type not exist", f"{at}.type", "missing")
    match got["type"]:
        case None:
            raise build_param_error("Tool param invalid tool type", f"{at}.type", "missing")
        case "function":
            pass
        case str():
            raise build_param_error("Tool param not function type", f"{at}.type")
        case _:
            raise build_param_error("Tool param invalid tool string type", f"{at}.type", "type")
    at = f"{at}.function"
    if "function" not in got:
        raise build_param_error("Tool param invalid, tool function not exist", at, "missing")
    function = got["function"]
    if not isinstance(function, dict):
        raise build_param_error("Tool param invalid function object", at, "type")
    if "name" not in function:
        raise build_param_error(
            "Function object invalid, function name not exist", f"{at}.name", "missing"
        )
    if not isinstance(function["name"], str):
        raise build_param_error("Function object invalid name type", f"{at}.name", "type")
    check_function_name(function["name"], f"{at}.name")


def _read_template(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """Read the chat template and its arguments, by their paths in the internal request."""
    found: dict[str, Any] = {}
    at = "chat_template_kwargs"
    if at in fields:
        kwargs = get_field(fields, at)
        if not isinstance(kwargs, dict):
            raise build_param_error(f"{at} must be a JSON object", at, "type")
        thinking = kwargs.get("enable_thinking", False)
        if not isinstance(thinking, bool):
            text = f"enable_thinking must be boolean, got {_get_json_type(thinking)}"
            raise build_param_error(text, f"{at}.enable_thinking", "type")
        found["templating.arguments"] = decode_fields(fields[at])
    template = get_field(fields, "chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise build_param_error("Parameter chat_template not string", "chat_template", "type")
        if not template:
            raise build_param_error(
                "Parameter chat_template is not valid", "chat_template", "empty"
            )
        found["templating.template"] = template
    return found


def _get_json_type(got: Any) -> str:
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(got), "number")


def _read_output_format(fields: Mapping[str, Raw]) -> Any:
    at = "response_format"
    got = get_field(fields, at)
    if got is None:
        return None
    if not isinstance(got, dict):
        raise build_param_error(f"Parameter {at} must be an object", at, "type")
    kind = got.get("type")
    if kind is None:
        raise build_param_error(
            f"Parameter {at} must contain 'type' field", f"{at}.type", "missing"
        )
    if not isinstance(kind, str):
        raise build_param_error(f"Parameter {at}.type must be a string", f"{at}.type", "type")
    if kind not in ("json_object", "json_schema", "text"):
        raise build_param_error(
            f"Parameter {at}.type must be 'json_object', 'json_schema' or 'text', got "
            f"'{kind[:300]}'",
            f"{at}.type",
        )
    if kind == "json_schema":
        _check_json_schema(got.get("json_schema"), f"{at}.json_schema")
    return read_response_format(fields)


def _check_json_schema(got: Any, at: str) -> None:
    if got is None:
        text = f"Parameter {at} is required when type is 'json_schema'"
        raise build_param_error(text, at, "missing")
    if not isinstance(got, dict):
        raise build_param_error(f"Parameter {at} must be an object", at, "type")
    name = got.get("name")
    if name is None:
        raise build_param_error(f"Parameter {at}.name is required", f"{at}.name", "missing")
    if not isinstance(name, str):
        raise build_param_error(f"Parameter {at}.name must be a string", f"{at}.name", "type")
    if not 0 < len(name.encode()) <= 64:  # noqa: PLR2004 - the server's number
        raise build_param_error(
            f"Parameter {at}.name must be 1-64 characters", f"{at}.name", "too_long"
        )
    schema = got.get("schema")
    if schema is None:
        text = f"Parameter {at}.schema is required when type is 'json_schema'"
        raise build_param_error(text, f"{at}.schema", "missing")
    if not isinstance(schema, dict):
        raise build_param_error(f"Parameter {at}.schema must be an object", f"{at}.schema", "type")


# --- completions ----------------------------------------------------------------------------------


def read_completion_request(call: ClientRequest, setup: MindieConfig) -> GenerationRequest:
    """Read a /v1/completions request: one prompt of text or token ids."""
    fields = read_body_fields(call)
    model = read_model_name(fields, setup)
    prompt = _read_completion_prompt(get_field(fields, "prompt"), setup.profile.max_text_length)
    values = read_params(params.COMPLETION_PARAMS, fields)
    if (top := values.get("request.top_logprobs")) is not None:
        values["logprobs.top"] = top
    output = _read_output_format(fields)
    resolve_choice_count(values, COMPLETION_COUNT_ERRORS)
    return build_request(
        values,
        setup,
        params.COMPLETION_PARAMS,
        fields,
        known=("model", "prompt", "response_format"),
        model=model,
        kind="completion",
        prompts=(prompt,),
        templating=RAW_PROMPT_OPTIONS,
        output=output,
        client_id=setup.get_request_id(call),
    )


def _read_completion_prompt(got: Any, limit: int) -> str | tuple[int, ...]:
    error_text = (
        "Length of Prompt {kind} should be greater than 0 and less than or equal to {most}, "
    )
    match got:
        case None:
            raise build_param_error("Contains not prompt or prompt null", "prompt", "missing")
        case str():
            if (length := get_invalid_length(got, limit)) is not None:
                text = error_text.format(kind="text", most=limit) + f"but got {length}"
                raise build_param_error(text, "prompt", "too_long" if length else "empty")
            return got
        case []:
            raise build_param_error("Prompt array cannot be empty.", "prompt", "empty")
        case list():
            if not all(type(one) is int and one >= 0 for one in got):
                text = "All elements of the prompt array must be integers."
                raise build_param_error(text, "prompt", "type")
            if len(got) > MAX_INPUT_TOKENS:
                text = (
                    error_text.format(kind="token", most=MAX_INPUT_TOKENS) + f"but got {len(got)}"
                )
                raise build_param_error(text, "prompt", "too_long")
            return tuple(got)
        case _:
            text = "The type of prompt is abnormal,prompt must be str or integer list."
            raise build_param_error(text, "prompt", "type")
