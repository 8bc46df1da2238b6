"""Requests to Databricks workers, their unsupported parameters and errors.

All requests go to one path; an endpoint knows its task from the fields of the body.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from protocols.chat import worker_errors
from protocols.chat.decoder import GenerationDecoder
from protocols.chat.embeddings import EmbeddingDecoder
from protocols.chat.field_types import (
    INPUTS,
    OPTIONAL_BOOL,
    OPTIONAL_STRING,
    PLAIN_MESSAGES,
    PROMPTS,
    TOOL_FIELDS,
    build_count_type,
)
from protocols.chat.messages import MessageStyle
from protocols.chat.params import CHAT_PARAMS, EXTENSION_PARAMS, find_param
from protocols.chat.request_reducer import RequestReducer, remove_logprobs, remove_parts
from protocols.chat.responses import create_header_builder
from protocols.chat.tools import is_valid_chat
from protocols.chat.upstream import RequestWriter, WorkerProfile
from protocols.chat.worker_errors import WorkerErrorBody
from protocols.core.errors import ContextTooLong, GatewayError, ModelNotFound, UnsupportedFeature
from protocols.core.interfaces import (
    ClientRequest,
    PassthroughRequest,
    ResponseContext,
    ResponseDecoder,
    UpstreamRequest,
)
from protocols.core.loss import UnsupportedParameter, find_lost_names
from protocols.core.request import (
    NO_KEYS,
    AnyRequest,
    AudioPart,
    ContentPart,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    KeptKeys,
    Message,
    Prompt,
    RefusalPart,
    Request,
    TextPart,
    VideoPart,
)
from protocols.databricks import params
from protocols.databricks.params import MAX_TOOL_PROPERTIES, MAX_TOOLS
from protocols.databricks.requests import RequestTask
from protocols.databricks.responses import RESPONSE_STYLE, create_generation_encoder
from protocols.json_body import decode_value
from protocols.params import Param
from protocols.passthrough import (
    PassthroughResponse,
    PassthroughRule,
    PassthroughRules,
    create_passthrough_decoder,
)

# --- parameters -----------------------------------------------------------------------------------
#
# Source: the reference of the Foundation Model REST API. The service rejects unknown fields,
# ``stream_options`` among them; other fields of a client go into ``extra_params``.

_MIN_BUDGET: Final = 1024
_EFFORT_FIELDS: Final = frozenset({"reasoning_effort", "reasoning", "output_config"})
"""Fields of clients that name an effort; without one, a budget alone does."""
EFFORT_MAPPING = {"minimal": "low", "xhigh": "high", "max": "high"}
"""The nearest supported effort, for the others."""

_MAX_TOKENS = Param("max_tokens", "stopping.max_tokens", "int", minimum=1)
_TOP_P = Param("top_p", "sampling.top_p", "float", minimum=1e-6, maximum=1)
_STOP = Param("stop", "stopping.stop", "strings")
_N = Param("n", "n", "int", minimum=1)
_EFFORT = Param("reasoning_effort", "reasoning.effort", "str")
_ERROR_BEHAVIOR = find_param(params.COMPLETION_PARAMS, "error_behavior")

_SHARED_PARAMS = (
    _MAX_TOKENS,
    find_param(CHAT_PARAMS, "temperature"),
    _TOP_P,
    find_param(params.CHAT_PARAMS, "top_k"),
    _STOP,
)
_CHAT_PARAMS = (*_SHARED_PARAMS, _N, _EFFORT)
_COMPLETION_PARAMS = (
    *_SHARED_PARAMS,
    *(find_param(params.COMPLETION_PARAMS, name) for name in ("echo", "suffix")),
)

_PENALTY_PARAMS = tuple(
    find_param(CHAT_PARAMS, name) for name in ("presence_penalty", "frequency_penalty")
)
_SEED = Param("seed", "sampling.seed", "int", -(2**63), 2**63 - 1)
_EXTRA_COMPLETION_PARAMS = (
    *_PENALTY_PARAMS,
    _SEED,
    *(
        find_param(EXTENSION_PARAMS, name)
        for name in (
            "min_p", "typical_p", "repetition_penalty", "length_penalty", "allowed_token_ids",
            "bad_words", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
            "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
        )
    ),
)  # fmt: skip
_EXTRA_CHAT_PARAMS = (*_EXTRA_COMPLETION_PARAMS, find_param(CHAT_PARAMS, "parallel_tool_calls"))

EXTRA_PARAM_NAMES = frozenset(param.wire for param in _EXTRA_CHAT_PARAMS)
"""Parameters that go into ``extra_params``."""


def build_profile(*, pay_per_token: bool, extra: bool) -> WorkerProfile:
    """The support of an endpoint; ``extra`` adds the parameters of ``extra_params``."""
    behavior = (_ERROR_BEHAVIOR,) if pay_per_token else ()
    chat, completion = (_EXTRA_CHAT_PARAMS, _EXTRA_COMPLETION_PARAMS) if extra else ((), ())
    return WorkerProfile(
        chat=(*_CHAT_PARAMS, *chat),
        completion=(*_COMPLETION_PARAMS, *behavior, *completion),
        embedding=tuple(
            find_param(params.EMBEDDING_PARAMS, name)
            for name in ("instruction", *(("dimensions",) if extra else ()))
        ),
        labels=("usage_context",),
        message_style=MessageStyle(
            part_format="joined",
            includes_reasoning=False,
            role_mapping=(("developer", "system"),),
        ),
        max_chat_logprobs=20,
        template_arguments=False,
        completion_response_format=False,
    )


_encode = msgspec.json.Encoder().encode
_JSON_HEADERS: Final = (("Content-Type", "application/json"),)
_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    AudioPart: "audio",
    FilePart: "files",
    RefusalPart: "refusals",
    VideoPart: "videos",
}


class DatabricksUpstream:
    """Encodes requests for serving endpoints.

    ``source`` is the protocol's name: fields of its clients that the reference lacks are sent in
    ``extra_params``; with ``extra_params``, those of any client are. ``pay_per_token``: the
    endpoints return one choice at a time and can truncate.
    """

    def __init__(self, source: str, *, pay_per_token: bool, extra_params: bool) -> None:
        self._source = source
        self._pay_per_token = pay_per_token
        self._extra_params = extra_params
        self._writers = {
            extra: RequestWriter(
                build_profile(pay_per_token=pay_per_token, extra=extra),
                "",
                powers=False,
                source=source,
            )
            for extra in (False, True)
        }

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        reducer = self._reduce_request(request, names)
        return (
            *reducer.unsupported_parameters,
            *self._select_writer(request).unsupported_parameters(reducer.request, names),
        )

    def get_kept_keys(self, request: AnyRequest) -> KeptKeys | None:
        """See ``protocols.core.interfaces.KeepsExtraFields``."""
        return None if request.source == self._source else NO_KEYS

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``. Raises ModelNotFound, Unsupported."""
        texts = request.inputs if isinstance(request, EmbeddingRequest) else request.prompts
        _check_texts(texts, "input" if isinstance(request, EmbeddingRequest) else "prompt")
        writer = self._select_writer(request)
        requested = replace(self._reduce_request(request, {}).request, extra={})
        _, body = writer.write_body(requested)
        del body["model"]
        if isinstance(request, GenerationRequest):
            _finish_body(body, request, is_own=request.source == self._source)
        extra = {name: body.pop(name) for name in EXTRA_PARAM_NAMES & body.keys()}
        if request.source == self._source:
            extra |= {
                n: decode_value(raw) for n, raw in request.extra.items() if writer.forwards_field(n)
            }
            if request.client_id is not None:
                body["client_request_id"] = request.client_id
        if extra:
            body["extra_params"] = {name: _as_text(extra[name]) for name in sorted(extra)}
        return UpstreamRequest(_build_path(request.model), _encode(body), _JSON_HEADERS)

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        complaint = partial(worker_errors.raise_worker_error, judge=map_worker_error)
        if isinstance(request, EmbeddingRequest):
            return EmbeddingDecoder(request, complaint, self._source)
        reducer = self._reduce_request(request, {})
        echoes = self._select_writer(request).expects_echo(reducer.request)
        return GenerationDecoder(
            reducer.request, echoes=echoes, complaint=complaint, source=self._source
        )

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return worker_errors.read_worker_error(status, headers, body, map_worker_error)

    def _select_writer(self, request: Request) -> RequestWriter:
        return self._writers[self._extra_params or request.source == self._source]

    # --- requests ---------------------------------------------------------------------------------

    def _reduce_request(self, request: Request, names: Mapping[str, str]) -> RequestReducer[Any]:
        """The request, reduced to what an endpoint supports."""
        reducer: RequestReducer[Any] = RequestReducer(request, names)
        reducer.drop_foreign_extra(self._source)
        if isinstance(request, EmbeddingRequest):
            reducer.set_field("encoding", "float")  # the gateway encodes base64 itself
            return reducer
        reducer.drop_fields("sampling.logit_bias")
        reducer.drop_field_extra("stream_options")  # the service has no such field
        reducer.set_field("provided_fields", request.provided_fields - {"max_completion_tokens"})
        if request.kind == "chat":
            if self._pay_per_token and (request.n or 1) > 1:
                reducer.drop_fields("n", detail="one at a time")
            _reduce_messages(reducer)
            _reduce_reasoning(reducer, from_databricks=request.source == self._source)
        else:
            if (request.n or 1) > 1:
                reducer.drop_fields("n", detail="those of one prompt have one index")
            reducer.set_field("n", None)
            reducer.set_field("templating.mode", "raw")  # an endpoint wraps prompts itself
            remove_logprobs(reducer)
        return reducer


def _reduce_messages(reducer: RequestReducer[GenerationRequest]) -> None:
    remove_parts(reducer, _UNSUPPORTED_PARTS)
    names = find_lost_names(reducer.request.messages, lambda message: message.role != "user")
    reducer.unsupported_parameters += names
    reducer.set_field(
        "messages", tuple(_reduce_message(message) for message in reducer.request.messages)
    )


def _reduce_message(message: Message) -> Message:
    """The message for an endpoint: only users have names, and no blank text beside tool calls."""
    name = message.name if message.role == "user" else None
    blank = bool(message.tool_calls) and not message.text.strip()
    parts = tuple(part for part in message.parts if not (blank and isinstance(part, TextPart)))
    return replace(message, name=name, parts=parts)


def _reduce_reasoning(reducer: RequestReducer[GenerationRequest], *, from_databricks: bool) -> None:
    """``thinking`` replaces fields that are dropped here without a loss."""
    requested = reducer.request.reasoning
    if requested is None:
        return
    if requested.effort == "none":
        reducer.drop_fields("reasoning.effort")
    elif (nearest := EFFORT_MAPPING.get(requested.effort or "")) is not None:
        reducer.report("reasoning.effort", "clamped", f"{requested.effort} to {nearest}")
        reducer.set_field("reasoning.effort", nearest)
    if requested.include is False and not from_databricks:
        reducer.report("reasoning.include", "approximated", "no thinking at all")
    if not from_databricks and requested.budget:
        _check_budget(reducer, requested.budget)
        if _EFFORT_FIELDS.isdisjoint(reducer.request.provided_fields):
            reducer.set_field("reasoning.effort", None)  # only stands for the budget
    reducer.set_field("reasoning.budget", None)
    reducer.set_field("reasoning.include", None)


def _check_budget(reducer: RequestReducer[GenerationRequest], budget: int) -> None:
    """Report a budget that is lowered, which must be smaller than ``max_tokens``.

    Raises UnsupportedFeature if that leaves no room for the smallest budget.
    """
    limit = reducer.request.stopping.max_tokens
    lowered = _lower_budget(budget, limit)
    if lowered < budget:
        if lowered < _MIN_BUDGET:
            text = f"The budget of thinking must be at least {_MIN_BUDGET} and less than {limit}."
            raise UnsupportedFeature(text, param="thinking.budget_tokens")
        reducer.report("reasoning.budget", "clamped", f"{budget} to {lowered}")


def _lower_budget(budget: int, limit: int | None) -> int:
    return budget if limit is None else min(budget, limit - 1)


def _finish_body(body: dict[str, Any], request: GenerationRequest, *, is_own: bool) -> None:
    """Change the body in ways that no table can describe."""
    body.pop("stream_options", None)
    body["stream"] = request.stream  # the reference and the service differ in what silence means
    if request.kind != "chat":
        if request.templating.mode != "server":
            body["use_raw_prompt"] = True
    elif request.reasoning is not None:
        budget = request.reasoning.budget
        if request.reasoning.include is False or budget == 0:
            body["thinking"] = {"type": "disabled"}
        elif budget is not None:
            if not is_own:
                budget = _lower_budget(budget, request.stopping.max_tokens)
            body["thinking"] = {"type": "enabled", "budget_tokens": budget}


def _check_texts(texts: tuple[Prompt, ...], param: str) -> None:
    if not all(isinstance(one, str) for one in texts):
        raise UnsupportedFeature("The model's workers take text, not token ids.", param=param)


def _as_text(value: Any) -> str:
    """A value in ``extra_params``, where all values are strings."""
    return value if isinstance(value, str) else _encode(value).decode()


def _build_path(model: str) -> str:
    """The path of an endpoint. Its name is one segment, percent-encoded."""
    if model in ("", ".", ".."):
        raise ModelNotFound("No serving endpoint can have this name.", model=model)
    return f"/serving-endpoints/{quote(model, safe='')}/invocations"


# --- errors ---------------------------------------------------------------------------------------

_STATUS_BY_CODE: Final[Mapping[str, int]] = {
    "BAD_REQUEST": 400,
    "MALFORMED_REQUEST": 400,
    "INVALID_PARAMETER_VALUE": 400,
    "UNAUTHENTICATED": 401,
    "CUSTOMER_UNAUTHORIZED": 401,
    "PERMISSION_DENIED": 403,
    "RESOURCE_DOES_NOT_EXIST": 404,
    "ENDPOINT_NOT_FOUND": 404,
    "NOT_FOUND": 404,
    "REQUEST_LIMIT_EXCEEDED": 429,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL_ERROR": 500,
    "NOT_IMPLEMENTED": 501,
    "TEMPORARILY_UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""The status for a code, which is more specific. Source: mlflow 3.17, exceptions.py."""
_PROMPT_TOO_LONG: Final = re.compile(r"the prompt has (\d+) tokens, the model's limit is (\d+)")


def map_worker_error(
    status: int, fault: WorkerErrorBody, retry_after: float | None
) -> GatewayError:
    """A ``protocols.chat.errors.WorkerErrorMapper`` that uses the error's code."""
    status = _STATUS_BY_CODE.get(str(fault.code), status)
    if match := _PROMPT_TOO_LONG.search(fault.text):
        return ContextTooLong(fault.text, tokens=int(match[1]), limit=int(match[2]))
    return worker_errors.map_worker_error(status, fault, retry_after)


# --- pass-through ---------------------------------------------------------------------------------
#
# See ``protocols.passthrough``. A request keeps the kind of path that it arrived on, because
# the OpenAI-compatible paths treat prompts differently. A body has no model where the path names
# it. Only fields of the reference pass: a translation puts others into ``extra_params``, and the
# service rejects ``stream_options``.

_INVALID_NAMES: Final = ("", ".", "..")
"""Names that no path can hold."""
_GATEWAY_FIELDS: Final = frozenset({"n", "echo", "suffix", "error_behavior"})
"""Fields that depend on the kind of endpoint, or that the gateway handles."""


class _ParametersSchema(Struct):
    properties: Annotated[dict[str, Raw], Meta(max_length=MAX_TOOL_PROPERTIES)] | UnsetType = UNSET


class _DatabricksFunction(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    description: str | UnsetType = UNSET
    parameters: _ParametersSchema | UnsetType = UNSET


class _DatabricksTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _DatabricksFunction


_SHARED_FIELD_TYPES: Final[Mapping[str, Any]] = {
    "stream": OPTIONAL_BOOL,
    "client_request_id": OPTIONAL_STRING,
    "usage_context": dict[str, str] | UnsetType,
}
_CHAT_FIELD_TYPES: Final[Mapping[str, Any]] = {
    **_SHARED_FIELD_TYPES,
    "messages": PLAIN_MESSAGES,
    "tools": Annotated[list[_DatabricksTool], Meta(min_length=1, max_length=MAX_TOOLS)] | UnsetType,
    "tool_choice": TOOL_FIELDS["tool_choice"],
    "logprobs": OPTIONAL_BOOL,
    "top_logprobs": build_count_type(20),
}
_COMPLETION_FIELD_TYPES: Final[Mapping[str, Any]] = {
    **_SHARED_FIELD_TYPES,
    "prompt": PROMPTS,
    "use_raw_prompt": OPTIONAL_BOOL,
}
_EMBEDDING_FIELD_TYPES: Final[Mapping[str, Any]] = {
    "input": INPUTS,
    "encoding_format": Literal["float"] | UnsetType,
    "client_request_id": OPTIONAL_STRING,
    "usage_context": dict[str, str] | UnsetType,
}


_INVOCATIONS_PATH: Final = "/serving-endpoints/{model}/invocations"
_OPENAI_PATHS: Final[Mapping[RequestTask, str]] = {
    "chat": "/serving-endpoints/chat/completions",
    "completion": "/serving-endpoints/completions",
    "embedding": "/serving-endpoints/embeddings",
}


def build_passthrough_rules() -> PassthroughRules:
    """Rules for every endpoint: fields that only some support are translated."""
    profile = build_profile(pay_per_token=False, extra=False)
    rule = partial(PassthroughRule, gateway_fields=_GATEWAY_FIELDS, default_usage="final")
    rules: Mapping[RequestTask, PassthroughRule] = {
        "chat": rule(
            path=_INVOCATIONS_PATH,
            field_types=_CHAT_FIELD_TYPES,
            worker_params=profile.chat,
            client_params=params.CHAT_PARAMS,
            is_valid_body=is_valid_chat,
        ),
        "completion": rule(
            path=_INVOCATIONS_PATH,
            field_types=_COMPLETION_FIELD_TYPES,
            worker_params=profile.completion,
            client_params=params.COMPLETION_PARAMS,
        ),
        "embedding": rule(
            path=_INVOCATIONS_PATH,
            field_types=_EMBEDDING_FIELD_TYPES,
            worker_params=profile.embedding,
            client_params=params.EMBEDDING_PARAMS,
        ),
    }
    return PassthroughRules(
        {
            **{f"{task} of an endpoint": rule for task, rule in rules.items()},
            **{task: replace(rule, path=_OPENAI_PATHS[task]) for task, rule in rules.items()},
        },
        create_decoder=partial(
            create_passthrough_decoder,
            complaint=partial(worker_errors.raise_worker_error, judge=map_worker_error),
            source="databricks",
        ),
    )


def build_passthrough(
    rules: PassthroughRules,
    call: ClientRequest,
    about: ResponseContext,
    task: RequestTask,
    *,
    stream: bool,
    by_prompt: bool,
) -> PassthroughRequest | None:
    """See ``protocols.core.interfaces.SupportsPassthrough``.

    ``stream`` is what the client means, also by silence: whatever the worker takes that for, the
    client gets what it waits for.
    """
    if about.backend_model in _INVALID_NAMES:
        return None
    return rules.prepare_passthrough(
        f"{task} of an endpoint" if call.endpoint.operation == "invocations" else task,
        call,
        about,
        PassthroughResponse(
            create_header_builder(RESPONSE_STYLE, about, ()),
            lambda request: create_generation_encoder(request, about, by_prompt=by_prompt),
            {"model": about.backend_model},
        ),
        stream=stream and task != "embedding",
    )
