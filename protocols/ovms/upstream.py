"""The internal request to a worker's request; unsupported parameters; errors; pass-through."""

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from protocols.chat import worker_errors
from protocols.chat.decoder import GenerationDecoder
from protocols.chat.embeddings import EmbeddingDecoder
from protocols.chat.field_types import (
    ENCODINGS,
    MESSAGES,
    OPTIONAL_BOOL,
    OPTIONAL_STRING,
    PLAIN_MESSAGES,
    RESPONSE_FORMAT,
    STREAM_OPTIONS,
    TOOL_FIELDS,
)
from protocols.chat.messages import MessageStyle
from protocols.chat.request_reducer import (
    RequestReducer,
    keep_first_prompt,
    remove_logprobs,
    remove_parts,
)
from protocols.chat.rerank import RerankDecoder
from protocols.chat.tools import is_valid_chat
from protocols.chat.upstream import RequestWriter, WorkerProfile, uses_chat_endpoint
from protocols.chat.worker_errors import WorkerErrorBody
from protocols.core.errors import ContextTooLong, GatewayError, UnsupportedFeature, WorkerFailed
from protocols.core.interfaces import BASIC_KINDS, ResponseDecoder, UpstreamRequest
from protocols.core.loss import UnsupportedParameter, find_lost_calls
from protocols.core.request import (
    NO_KEYS,
    AnyRequest,
    AudioPart,
    ContentPart,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    ImagePart,
    KeptKeys,
    Request,
    RequestKind,
    RerankRequest,
    VideoPart,
)
from protocols.ovms import params
from protocols.ovms.requests import MAX_IGNORE_EOS_TOKENS, MAX_INPUTS
from protocols.params import Param
from protocols.passthrough import (
    PassthroughRule,
    PassthroughRules,
    create_passthrough_decoder,
)

# What a worker accepts, by release.
#
# Source: openvinotoolkit/model_server, src/llm/apis (2026) and its documentation of 2024,
# model_server_rest_api_chat.md; for parameters that are rejected during generation:
# openvinotoolkit/openvino.genai, src/cpp/src/generation_config.cpp.

SEED_COUNT = 2**32
"""The number of seeds."""
MAX_BEAM_WIDTH = 19
"""A graph's default ``best_of_limit`` is 20; the limit itself is rejected."""

_TOP_P = Param("top_p", "sampling.top_p", "float", minimum=1e-6, maximum=1)
_MIN_P = Param("min_p", "sampling.min_p", "float", minimum=0, maximum=0.999999)
_SEED = Param("seed", "sampling.seed", "int")
_BEST_OF = Param("best_of", "sampling.beam_width", "int", minimum=1, maximum=MAX_BEAM_WIDTH)
_N = Param("n", "n", "int", minimum=1)
_MAX_TOKENS = Param(
    "max_tokens", "stopping.max_tokens", "int", minimum=1, maximum=params.UINT32_RANGE[1]
)
_ECHO = Param("echo", "echo", "bool")


def _select_params(*names: str) -> tuple[Param, ...]:
    rows = {row.param.wire: row.param for row in params.ALL_PARAMS}
    return tuple(rows[name] for name in names)


_EARLY_PARAMS = (
    _MAX_TOKENS,
    *_select_params("ignore_eos", "repetition_penalty", "diversity_penalty", "length_penalty"),
    *_select_params("temperature", "top_k"),
    _TOP_P,
    _SEED,
    _BEST_OF,
    _N,
)
_CURRENT_PARAMS = (
    *(param for param in _EARLY_PARAMS if param.wire != "diversity_penalty"),
    *_select_params("frequency_penalty", "presence_penalty", "stop", "include_stop_str_in_output"),
    *_select_params("skip_special_tokens"),
    _MIN_P,
)

WORKER_PROFILES: Mapping[str, WorkerProfile] = {
    "2026": WorkerProfile(
        chat=_CURRENT_PARAMS,
        completion=(*_CURRENT_PARAMS, _ECHO),
        embedding=(),
        labels=(),
        message_style=MessageStyle(),
        max_stop_strings=params.MAX_STOP_STRINGS,
        max_chat_logprobs=0,
        max_completion_logprobs=1,
        completion_response_format=False,
    ),
    "2024": WorkerProfile(
        chat=_EARLY_PARAMS,
        completion=_EARLY_PARAMS,
        embedding=(),
        labels=(),
        message_style=MessageStyle(
            part_format="joined",
            empty_content="",
            includes_reasoning=False,
            role_mapping=(("developer", "system"),),
        ),
        template_arguments=False,
        completion_response_format=False,
    ),
}


_encode = msgspec.json.Encoder().encode
_JSON_HEADERS: Final = (("Content-Type", "application/json"),)

_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    VideoPart: "videos",
    FilePart: "files",
}
_EARLY_UNSUPPORTED_PARTS: Final = {**_UNSUPPORTED_PARTS, ImagePart: "images", AudioPart: "audio"}
_BEAM_SEARCH_CONFLICTS: Final = (
    "sampling.repetition_penalty",
    "sampling.presence_penalty",
    "sampling.frequency_penalty",
)
"""Parameters that beam search rejects."""


class OvmsUpstream:
    """Encodes requests for workers of one release, and decodes their responses.

    ``source`` is the name of the protocol: unknown fields of its own clients are passed on.
    """

    request_kinds: frozenset[RequestKind] = BASIC_KINDS | {"rerank"}

    def __init__(self, profile: str, source: str) -> None:
        self._early = profile == "2024"
        self._protocol_name = source
        self._openai_writer = RequestWriter(
            WORKER_PROFILES[profile], _ROOT, powers=False, source=source
        )
        # The first release has no model list; its KServe path reports readiness.
        path = "/v2/health/ready" if self._early else f"{_ROOT}/models"
        self.health_request = UpstreamRequest(path, b"", method="GET")

    def unsupported_parameters(
        self, request: Request | RerankRequest, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        reducer = self._reduce_request(request, names)
        return (
            *reducer.unsupported_parameters,
            *self._openai_writer.unsupported_parameters(reducer.request, names),
        )

    def get_kept_keys(self, request: AnyRequest) -> KeptKeys | None:
        """See ``protocols.core.interfaces.KeepsExtraFields``."""
        return None if request.source == self._protocol_name else NO_KEYS

    def encode_request(self, request: Request | RerankRequest) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``. Rejects prompts of token ids."""
        adapted = self._reduce_request(request, {}).request
        if isinstance(adapted, EmbeddingRequest | RerankRequest):
            return self._openai_writer.encode_request(adapted)
        if not all(isinstance(prompt, str) for prompt in adapted.prompts):
            raise UnsupportedFeature(
                "The model's workers take text, not token ids.", param="prompt"
            )
        path, body = self._openai_writer.write_body(adapted)
        self._adjust_body(body, adapted)
        return UpstreamRequest(path, _encode(body), _JSON_HEADERS)

    def create_decoder(self, request: Request | RerankRequest) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        complaint = partial(worker_errors.raise_worker_error, judge=map_worker_error)
        if isinstance(request, EmbeddingRequest):
            return EmbeddingDecoder(request, complaint, self._protocol_name)
        if isinstance(request, RerankRequest):
            return RerankDecoder(request, complaint, self._protocol_name)
        adapted = self._reduce_request(request, {}).request
        echoes = self._openai_writer.expects_echo(adapted)
        return GenerationDecoder(
            adapted, echoes=echoes, complaint=complaint, source=self._protocol_name
        )

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return worker_errors.read_worker_error(status, headers, body, map_worker_error)

    # --- requests ---------------------------------------------------------------------------------

    def _reduce_request(
        self, request: Request | RerankRequest, names: Mapping[str, str]
    ) -> RequestReducer[Any]:
        """Reduce the request to what the worker supports."""
        reducer: RequestReducer[Any] = RequestReducer(request, names)
        reducer.drop_foreign_extra(self._protocol_name)
        if not isinstance(request, GenerationRequest):
            return reducer
        keep_first_prompt(reducer)
        reducer.drop_fields("sampling.logit_bias")
        if (seed := request.sampling.seed) is not None and not 0 <= seed < SEED_COUNT:
            reducer.report("sampling.seed", "approximated", f"{seed} to {seed % SEED_COUNT}")
            reducer.set_field("sampling.seed", seed % SEED_COUNT)
        _adapt_beam_search(reducer)
        if self._early:
            _adapt_for_early_release(reducer)
        else:
            _adapt_for_current_release(reducer)
        if request.response_options.usage == "each":
            reducer.set_field("response_options.usage", "final")
        return reducer

    def _adjust_body(self, body: dict[str, Any], adapted: GenerationRequest) -> None:
        """Adjust what depends on several fields."""
        if not uses_chat_endpoint(adapted) and "logprobs" in body:
            body["logprobs"] = 1  # the only value it accepts: the sampled token itself
        if body.get("top_logprobs") == 0:
            del body["top_logprobs"]
        if adapted.stream:
            body.pop("include_stop_str_in_output", None)  # always so; false is rejected
        if not self._early:
            return
        body.pop("stream_options", None)
        sampling = adapted.sampling
        if sampling.temperature is None and sampling.do_sample is None and not sampling.beam_width:
            body["temperature"] = 1.0  # its default is greedy, unlike that of the clients


def _adapt_beam_search(reducer: RequestReducer[GenerationRequest]) -> None:
    """Adapt beam search: never streamed; several choices are the best of as many beams or more."""
    if reducer.request.stream:
        reducer.drop_fields("sampling.beam_width", detail="not with a stream")
    width = reducer.request.sampling.beam_width
    if width is not None:
        reducer.drop_fields(*_BEAM_SEARCH_CONFLICTS, detail="not with beam search")
    if (reducer.request.n or 1) > min(width or 1, MAX_BEAM_WIDTH):
        reducer.drop_fields("n", detail="without beam search")


def _adapt_for_current_release(reducer: RequestReducer[GenerationRequest]) -> None:
    remove_parts(reducer, _UNSUPPORTED_PARTS)
    if reducer.request.stream:
        remove_logprobs(reducer, "not with a stream")
        if reducer.request.stopping.stop and not reducer.request.stopping.include_stop:
            reducer.report("stopping.stop", "approximated", "it stays in the text of a stream")


def _adapt_for_early_release(reducer: RequestReducer[GenerationRequest]) -> None:
    remove_parts(reducer, _EARLY_UNSUPPORTED_PARTS)
    remove_logprobs(reducer)
    reducer.drop_fields("tools", "output")
    reducer.unsupported_parameters += find_lost_calls(reducer.request.messages)
    reducer.set_field(
        "provided_fields", reducer.request.provided_fields - {"max_completion_tokens"}
    )
    stopping = reducer.request.stopping
    if stopping.ignore_eos and (stopping.max_tokens or 0) > MAX_IGNORE_EOS_TOKENS:
        detail = f"{stopping.max_tokens} to {MAX_IGNORE_EOS_TOKENS}"
        reducer.report("stopping.max_tokens", "clamped", detail)
        reducer.set_field("stopping.max_tokens", MAX_IGNORE_EOS_TOKENS)


# --- errors ---------------------------------------------------------------------------------------

_GRAPH_ERROR_PATTERN: Final = re.compile(
    r"Mediapipe execution failed\. MP status - (?P<code>[A-Z_]+):\s*"
    r"(?:CalculatorGraph::Run\(\) failed:\s*)?"
    r'(?:Calculator::\w+\(\) for node "[^"]*" failed:\s*)?',
)
_JSON_ERROR_PATTERN: Final = re.compile(r"The file is not valid json - ")
_CONTEXT_LENGTH_PATTERNS: Final = (
    re.compile(
        r"Number of prompt tokens: (\d+)(?: \+ max tokens value: (?P<most>\d+))?"
        r" exceeds model max length: (?P<limit>\d+)"
    ),
    re.compile(r"Input length exceeds pipeline capabilities: (\d+) > (?P<limit>\d+)"),
    re.compile(r"Input length (\d+) longer than allowed (?P<limit>\d+)"),
    re.compile(r"Input length exceeds the maximum allowed length()(?P<limit>)"),
)
_STATUS_BY_CODE: Final[Mapping[str, int]] = {
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 400,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
}
"""Map the graph's errors; any other error is a worker failure."""
_PATH_ERROR_PATTERN: Final = re.compile(r"Invalid request URL|Wrong endpoint")
_API_KEY_ERROR: Final = "Unauthorized request due to invalid or missing api-key"


def map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    """A ``protocols.chat.errors.WorkerErrorMapper`` that removes the graph's own text.

    An error inside a response (status 0) is a worker failure, unless the prompt was too long: the
    graph checks a request before the first event.
    """
    text = fault.text
    if sentence := _GRAPH_ERROR_PATTERN.match(text):
        text = text[sentence.end() :]
        status = _STATUS_BY_CODE.get(sentence["code"], 500) if status else 500
    elif text == _API_KEY_ERROR:
        status = 401
    elif status == 412:  # noqa: PLR2004 - its own for what it could not read
        text, status = _JSON_ERROR_PATTERN.sub("", text), 400
    for pattern in _CONTEXT_LENGTH_PATTERNS:
        if match := pattern.search(text):
            most = int(match.groupdict().get("most") or 0)
            tokens = int(match[1]) + most if match[1] else None
            limit = int(match["limit"]) if match["limit"] else None
            return ContextTooLong(text, tokens=tokens, limit=limit, max_tokens=most)
    if _PATH_ERROR_PATTERN.match(text):
        error = WorkerFailed("The worker does not know the gateway's path.", status=status)
        error.worker_text = text
        return error
    return worker_errors.map_worker_error(
        status, msgspec.structs.replace(fault, text=text), retry_after
    )


# Pass-through to a worker of the same release. See ``protocols.passthrough``.
#
# Parameters that are checked together (beam search and the number of choices) are translated; so is
# the token count of the first release with ``ignore_eos``.

_ROOT: Final = "/v3"
_GATEWAY_CHECKED_FIELDS: Final = frozenset({"best_of", "n", "echo"})
_EARLY_GATEWAY_CHECKED_FIELDS: Final = _GATEWAY_CHECKED_FIELDS | {"ignore_eos"}
_NonemptyString = Annotated[str, Meta(min_length=1)]
_INPUTS_TYPE: Final = (
    _NonemptyString | Annotated[list[_NonemptyString], Meta(min_length=1, max_length=MAX_INPUTS)]
)
_EVENT_STREAM_HEADERS: Final = (("Content-Type", "text/event-stream"),)

_COMMON_FIELD_TYPES: Final[Mapping[str, Any]] = {"stream": OPTIONAL_BOOL, "user": OPTIONAL_STRING}
_CHAT_FIELD_TYPES: Final = {
    **_COMMON_FIELD_TYPES,
    **TOOL_FIELDS,
    "messages": MESSAGES,
    "stream_options": STREAM_OPTIONS,
    "logprobs": OPTIONAL_BOOL,
    "response_format": RESPONSE_FORMAT,
}
_COMPLETION_FIELD_TYPES: Final = {
    **_COMMON_FIELD_TYPES,
    "prompt": _NonemptyString,
    "stream_options": STREAM_OPTIONS,
    "logprobs": Literal[1] | UnsetType,
}
_EARLY_CHAT_FIELD_TYPES: Final = {**_COMMON_FIELD_TYPES, "messages": PLAIN_MESSAGES}
_EARLY_COMPLETION_FIELD_TYPES: Final = {**_COMMON_FIELD_TYPES, "prompt": _NonemptyString}


def build_passthrough(release: str) -> PassthroughRules:
    """Build the pass-through rules for workers of one release."""
    early, profile = release == "2024", WORKER_PROFILES[release]
    tables = params.EARLY_PARAM_TABLES if early else params.PARAM_TABLES
    rule = partial(
        PassthroughRule,
        gateway_fields=_EARLY_GATEWAY_CHECKED_FIELDS if early else _GATEWAY_CHECKED_FIELDS,
        forwards_field=RequestWriter(profile, _ROOT, powers=False).forwards_field,
        is_valid_body=_is_valid_body,
    )
    return PassthroughRules(
        {
            "chat": rule(
                path=f"{_ROOT}/chat/completions",
                field_types=_EARLY_CHAT_FIELD_TYPES if early else _CHAT_FIELD_TYPES,
                worker_params=profile.chat,
                client_params=tables["chat"],
            ),
            "completion": rule(
                path=f"{_ROOT}/completions",
                field_types=_EARLY_COMPLETION_FIELD_TYPES if early else _COMPLETION_FIELD_TYPES,
                worker_params=profile.completion,
                client_params=tables["completion"],
            ),
            "embedding": rule(
                path=f"{_ROOT}/embeddings",
                field_types={
                    "input": _INPUTS_TYPE,
                    "encoding_format": ENCODINGS,
                    "user": OPTIONAL_STRING,
                },
                worker_params=(),
                client_params=(),
            ),
        },
        create_decoder=partial(
            create_passthrough_decoder,
            complaint=partial(worker_errors.raise_worker_error, judge=map_worker_error),
            source="ovms",
        ),
        stream_headers=_EVENT_STREAM_HEADERS,
    )


def _is_valid_body(body: Any, fields: AbstractSet[str]) -> bool:
    """Streams have no log probabilities, and keep their stop strings."""
    if not is_valid_chat(body, fields):
        return False
    if getattr(body, "stream", False) is not True:
        return True
    keeps_stop = getattr(body, "include_stop_str_in_output", True) is not False
    return keeps_stop and not getattr(body, "logprobs", UNSET)
