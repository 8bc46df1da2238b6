"""Tokenization in vLLM's form: requests of clients, responses to them, and the same of workers.

Sources: vLLM's protocol module of tokenization; SGLang's, and llama.cpp's server (tools/server).
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from protocols import params
from protocols.chat.messages import MessageStyle, read_messages, write_messages
from protocols.chat.params import (
    CHAT_EXTENSION_PARAMS,
    NULL,
    as_object,
    as_text,
    conflict_error,
    find_param,
    invalid_type_error,
    missing_error,
    null_to_none,
)
from protocols.chat.requests import (
    DEFAULT_REQUEST_RULES,
    RequestRules,
    collect_extra,
    read_model,
    set_request_info,
)
from protocols.chat.responses import ResponseStyle, encode_json
from protocols.chat.tools import read_tools, write_tools
from protocols.chat.unary import (
    UnaryBodyDecoder,
    UnaryEncoder,
    add_extra_keys,
    list_unknown_keys,
)
from protocols.core.aggregate import UnaryResponse
from protocols.core.errors import InvalidParameter, UnsupportedFeature, WorkerFailed
from protocols.core.events import DetokenizedText, Event, StreamEnd, TokenList
from protocols.core.extra import KeyTree
from protocols.core.interfaces import HttpResponse, ResponseContext
from protocols.core.json_text import JsonDecoder, decode_json
from protocols.core.request import DetokenizeRequest, TokenizeRequest
from protocols.core.token_counts import MAX_TOKENS, read_integer
from protocols.core.vectors import encode_array
from protocols.json_body import build_answer_error, decode_value
from protocols.params import Param, ParamTable

TOKENIZE_PARAMS: Final = ParamTable(
    Param("add_special_tokens", "templating.add_special_tokens", "bool"),
    Param("return_token_strs", "return_texts", "bool"),
    *(
        find_param(CHAT_EXTENSION_PARAMS, name)
        for name in ("add_generation_prompt", "continue_final_message", "chat_template")
    ),
)
DETOKENIZE_PARAMS: Final = ParamTable()
_TOKENIZE_FIELDS: Final = frozenset(
    {"model", "prompt", "messages", "tools", "chat_template_kwargs"}
)
_DETOKENIZE_FIELDS: Final = frozenset({"model", "tokens"})


# --- clients --------------------------------------------------------------------------------------


def read_tokenize(
    fields: Mapping[str, Raw],
    rules: RequestRules = DEFAULT_REQUEST_RULES,
    *,
    client_id: str | None = None,
    timeout: float | None = None,
) -> TokenizeRequest:
    """Decode a request with either ``prompt`` or ``messages``. Raises ClientError."""
    model = read_model(fields)
    given = {name for name, raw in fields.items() if raw != NULL}
    if {"prompt", "messages"} <= given:
        raise conflict_error("messages", "'prompt' and 'messages' can't be given together.")
    values = params.read_params(TOKENIZE_PARAMS, fields)
    set_request_info(values, fields, client_id, timeout)
    content: dict[str, Any]
    if "messages" in given:
        _check_template_options(values)
        content = {
            "messages": read_messages(fields["messages"], rules.message_rules),
            "tools": read_tools(fields, most=rules.max_tools),
        }
        if "chat_template_kwargs" in given:
            raw = fields["chat_template_kwargs"]
            values["templating.arguments"] = as_object(raw, "chat_template_kwargs")
    else:
        content = {"prompt": as_text(fields, "prompt", "")}
        values["templating.mode"] = "raw"
    return TokenizeRequest(
        model=model,
        extra=collect_extra(
            values, fields, TOKENIZE_PARAMS, _TOKENIZE_FIELDS, rules.unknown_fields
        ),
        **content,
        **values.build_request_arguments(),
    )


def _check_template_options(values: params.ParsedParams) -> None:
    if values.get("templating.continue_final") and values.get("templating.add_generation_prompt"):
        text = "Cannot set both 'continue_final_message' and 'add_generation_prompt' to true."
        raise conflict_error("continue_final_message", text)


def read_detokenize(
    fields: Mapping[str, Raw],
    rules: RequestRules = DEFAULT_REQUEST_RULES,
    *,
    client_id: str | None = None,
    timeout: float | None = None,
) -> DetokenizeRequest:
    """Decode a request with ``tokens``. Raises ClientError."""
    model = read_model(fields)
    raw = null_to_none(fields.get("tokens"))
    if raw is None:
        raise missing_error("tokens")
    value = decode_value(raw)
    if not isinstance(value, list):
        raise invalid_type_error("tokens", "an array of integers", value)
    for i, token in enumerate(value):
        if type(token) is not int:
            raise invalid_type_error(f"tokens[{i}]", "an integer", token)
        if not 0 <= token < 2**31:
            text = f"Invalid 'tokens[{i}]': a token id is between 0 and {2**31 - 1}."
            raise InvalidParameter(text, param=f"tokens[{i}]", problem="below", got=token)
    values = params.read_params(DETOKENIZE_PARAMS, fields)
    set_request_info(values, fields, client_id, timeout)
    return DetokenizeRequest(
        model=model,
        token_ids=tuple(value),
        extra=collect_extra(
            values, fields, DETOKENIZE_PARAMS, _DETOKENIZE_FIELDS, rules.unknown_fields
        ),
        **values.build_request_arguments(),
    )


class TokenizeResponse(Struct):
    """The tokens of a text; ``token_strs`` only if requested."""

    count: int
    max_model_len: int | None
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None


class TokenizeEncoder(UnaryEncoder):
    """Encodes the response to a tokenize request."""

    def __init__(
        self, style: ResponseStyle, request: TokenizeRequest, context: ResponseContext
    ) -> None:
        super().__init__(style, context)
        self._request, self._context = request, context
        self.extra_source = style.source

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        found = response.tokens
        length = self._context.context_length or found.context_length
        texts = encode_array(found.texts) if self._request.return_texts else None
        ids = encode_array(found.ids)
        body = encode_json(TokenizeResponse(len(found.ids), length, ids, texts))
        return HttpResponse(200, add_extra_keys(body, response, self.extra_source))


class DetokenizeResponse(Struct):
    """The text of the tokens."""

    prompt: str


class DetokenizeEncoder(UnaryEncoder):
    """Encodes the response to a detokenize request."""

    def __init__(self, style: ResponseStyle, context: ResponseContext) -> None:
        super().__init__(style, context)
        self.extra_source = style.source

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        body = encode_json(DetokenizeResponse(response.text))
        return HttpResponse(200, add_extra_keys(body, response, self.extra_source))


# --- workers --------------------------------------------------------------------------------------

TokenizerStyle = Literal["vllm", "sglang", "llamacpp"]
"""The server whose tokenizer API a worker has. SGLang takes no conversations."""


def write_tokenize(
    request: TokenizeRequest, style: TokenizerStyle, message_style: MessageStyle
) -> dict[str, Any]:
    """The body of ``POST /tokenize``. Raises UnsupportedFeature for a conversation."""
    special = request.templating.add_special_tokens
    if request.prompt is None:
        if style != "vllm":
            raise UnsupportedFeature(
                "The model's workers tokenize texts, not conversations.", param="messages"
            )
        return _write_conversation(request, message_style)
    if style == "llamacpp":
        return {
            "content": request.prompt,
            "add_special": special is not False,
            "with_pieces": request.return_texts,
        }
    body: dict[str, Any] = {"model": request.model, "prompt": request.prompt}
    if special is not None:
        body["add_special_tokens"] = special
    if request.return_texts and style == "vllm":
        body["return_token_strs"] = True
    return body


def _write_conversation(request: TokenizeRequest, message_style: MessageStyle) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model,
        "messages": write_messages(request.messages, message_style),
    }
    if request.tools:
        body["tools"] = write_tools(request.tools)
    if request.templating.arguments is not None:
        body["chat_template_kwargs"] = request.templating.arguments
    table = ParamTable(*(row for row in TOKENIZE_PARAMS if row.wire != "chat_template"))
    return body | params.write_params(table, request.set_fields)


def write_detokenize(request: DetokenizeRequest, style: TokenizerStyle) -> dict[str, Any]:
    """The body of ``POST /detokenize``."""
    body: dict[str, Any] = {"tokens": request.token_ids}
    return body if style == "llamacpp" else {"model": request.model, **body}


class _WirePiece(Struct):
    """A token of llama.cpp: its piece is bytes if it is not valid UTF-8."""

    id: int
    piece: str | list[int]


class _WireTokens(Struct):
    tokens: list[int | _WirePiece]
    token_strs: list[str] | None = None
    max_model_len: Any = None


class _WireText(Struct):
    """``prompt`` of vLLM, ``text`` of SGLang, ``content`` of llama.cpp."""

    prompt: str | None = None
    text: str | None = None
    content: str | None = None


_TOKENS_KEYS: Final[KeyTree] = dict.fromkeys(("tokens", "token_strs", "max_model_len", "count"))
_TEXT_KEYS: Final[KeyTree] = dict.fromkeys(("prompt", "text", "content"))
_decode_tokens = JsonDecoder(_WireTokens).decode
_decode_text = JsonDecoder(_WireText).decode


class _TokenizerDecoder(UnaryBodyDecoder, ABC):
    """``source`` is the worker's protocol, of which unknown keys are."""

    def __init__(self, source: str = "") -> None:
        super().__init__()
        self._source = source


class TokenizeDecoder(_TokenizerDecoder):
    """Decodes the response to a TokenizeRequest."""

    def read_body(self, body: bytes) -> Sequence[Event]:
        """See ``protocols.chat.unary.UnaryBodyDecoder``."""
        try:
            wire = _decode_tokens(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            self._raise_if_error(body)
            raise build_answer_error(e) from e
        ids, texts = [], list(wire.token_strs or ())
        for token in wire.tokens:
            if isinstance(token, _WirePiece):
                ids.append(token.id)
                texts.append(token.piece if isinstance(token.piece, str) else "")
            else:
                ids.append(token)
        length = read_integer(wire.max_model_len, MAX_TOKENS)
        unknown = list_unknown_keys(decode_json(body), self._source, _TOKENS_KEYS)
        return [*unknown, TokenList(tuple(ids), tuple(texts), length), StreamEnd()]


class DetokenizeDecoder(_TokenizerDecoder):
    """Decodes the response to a DetokenizeRequest."""

    def read_body(self, body: bytes) -> Sequence[Event]:
        """See ``protocols.chat.unary.UnaryBodyDecoder``."""
        try:
            wire = _decode_text(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            self._raise_if_error(body)
            raise build_answer_error(e) from e
        for text in (wire.prompt, wire.text, wire.content):
            if text is not None:
                unknown = list_unknown_keys(decode_json(body), self._source, _TEXT_KEYS)
                return [*unknown, DetokenizedText(text), StreamEnd()]
        self._raise_if_error(body)
        raise WorkerFailed("The worker's answer has no text.")
