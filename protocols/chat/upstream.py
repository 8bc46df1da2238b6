"""Encodes requests for workers, and finds their unsupported parameters."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from protocols import params
from protocols.chat.classification import CLASSIFY_PARAMS, write_classify
from protocols.chat.field_keys import find_lost_keys, write_field_extra
from protocols.chat.messages import MessageStyle, write_messages
from protocols.chat.params import (
    CHAT_EXTENSION_PARAMS,
    EMBEDDING_PARAMS,
    EXTENSION_PARAMS,
    REASONING_EFFORTS,
    SHARED_PARAMS,
    find_param,
    replace_params,
)
from protocols.chat.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DEFAULT_REQUEST_RULES,
    EMBEDDING_FIELDS,
    RequestRules,
)
from protocols.chat.rerank import RERANK_PARAMS, write_rerank
from protocols.chat.response_format import write_structured_outputs
from protocols.chat.tokenization import (
    TOKENIZE_PARAMS,
    TokenizerStyle,
    write_detokenize,
    write_tokenize,
)
from protocols.chat.tools import (
    restrict_tools,
    write_response_format,
    write_tool_choice,
    write_tools,
)
from protocols.core import loss
from protocols.core.errors import UnsupportedFeature
from protocols.core.interfaces import BASIC_KINDS, UpstreamRequest
from protocols.core.loss import (
    CONTENT_LABELS,
    ParameterSupport,
    UnsupportedParameter,
    find_lost_reasoning,
    find_unseen_content,
)
from protocols.core.request import (
    NO_KEYS,
    AnyRequest,
    ClassifyRequest,
    ContentPart,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    GrammarFormat,
    KeptKeys,
    LogprobsOptions,
    Message,
    OutputFormat,
    Prompt,
    RefusalPart,
    RegexFormat,
    RequestKind,
    RerankRequest,
    TextPart,
    TokenizeRequest,
)
from protocols.params import Param, ParamTable

# --- our own workers ------------------------------------------------------------------------------
#
# They take every generation parameter of the internal request, in its full range, so that a gateway
# in front of them clamps nothing. The names are those of vLLM 0.32 where it has the parameter.

_WORKER_PARAMS: Final = (
    Param("watermark", "sampling.watermark", "bool"),
    Param("beam_width", "sampling.beam_width", "int", minimum=1),
    Param("diversity_penalty", "sampling.diversity_penalty", "float"),
)
_UNLIMITED: Final[dict[str, Any]] = {"minimum": None, "maximum": None}
_WIDENED_RANGES: Final[dict[str, dict[str, Any]]] = {
    "temperature": {"maximum": None},
    "presence_penalty": _UNLIMITED,
    "frequency_penalty": _UNLIMITED,
    "n": {"maximum": None},
}
_UNLIMITED_BEST_OF: Final = Param("best_of", "best_of", "int", minimum=1)

INTERLINGUA_WORKER_RULES: Final[RequestRules] = RequestRules(
    chat=ParamTable(
        *replace_params(
            DEFAULT_REQUEST_RULES.chat,
            **_WIDENED_RANGES,
            top_logprobs={"minimum": -1, "maximum": None},
        ),
        *_WORKER_PARAMS,
        _UNLIMITED_BEST_OF,
    ),
    completion=ParamTable(
        *replace_params(
            DEFAULT_REQUEST_RULES.completion,
            **_WIDENED_RANGES,
            logprobs={"minimum": -1, "maximum": None},
            best_of=_UNLIMITED,
        ),
        *_WORKER_PARAMS,
    ),
    embedding=ParamTable(
        *DEFAULT_REQUEST_RULES.embedding,
        Param("instruction", "instruction", "str"),
        Param("normalize", "normalize", "bool"),
        Param("overflow", "overflow", "str", choices=("error", "truncate")),
    ),
)

_SPECIAL_PARAMS: Final = frozenset(
    {"stream", "logprobs", "top_logprobs", "max_completion_tokens", "use_beam_search", "request_id",
     "session_id", "return_token_ids", "user", "encoding_format", "priority", "chat_template",
     "suffix", "reasoning_effort", "include_reasoning", "thinking_token_budget", "seed",
     "spaces_between_special_tokens"}
)  # fmt: skip
"""Parameters that have their own code in the encoder, that only the operator may open to clients,
or that the engine ignores.
"""


IGNORED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    **CONTENT_LABELS,
    RefusalPart: "refusals",
}
"""Content parts that the engine ignores."""


def select_written_params(table: tuple[Param, ...]) -> tuple[Param, ...]:
    """The rows that are written to our own workers with the name that they are read by."""
    return tuple(
        param
        for param in table
        if param.wire not in _SPECIAL_PARAMS and not param.field.startswith("labels.")
    )


# --- worker profiles ------------------------------------------------------------------------------
#
# Sources: OpenAI's specification 2.3.0; the protocol modules of vLLM 0.32 and SGLang; llama.cpp's
# server (tools/server). A row gives the range that the worker accepts: a value outside it is
# clamped and reported.


class WorkerProfile(Struct, frozen=True, kw_only=True):
    """What one kind of worker supports."""

    chat: tuple[Param, ...]
    completion: tuple[Param, ...]
    embedding: tuple[Param, ...] = (find_param(EMBEDDING_PARAMS, "dimensions"),)
    rerank: tuple[Param, ...] = ()
    classify: tuple[Param, ...] = ()
    scores_pairs: bool = False
    """Whether it has vLLM's ``/score``, which compares pairs of texts."""
    versions_classify: bool = False
    """Whether its classify endpoint is below ``/v1``, as SGLang's is."""
    labels: tuple[str, ...] = ("user",)
    """The labels that clients of any protocol may send; those of its own protocol send all."""
    lacks: frozenset[str] = frozenset()
    """Fields of OpenAI's API that its workers refuse or ignore."""
    message_style: MessageStyle = MessageStyle()
    max_stop_strings: int | None = None
    """The largest number of stop strings."""
    reports_stop_strings: bool = False
    """Whether responses name the stop string that ended them."""
    max_chat_logprobs: int | None = None
    max_completion_logprobs: int | None = None
    """The largest number of alternatives per token, of chat and of completions."""
    template_arguments: bool = True
    allowed_tools: bool = False
    """Whether it supports ``allowed_tools``; other workers get only the allowed tools."""
    custom_tools: bool = False
    requires_descriptions: bool = False
    """Whether functions need a description: one without gets an empty one. llama.cpp's older
    releases refuse such a function, and gpt-oss's template in SGLang fails for it."""
    limits_tool_names: bool = False
    """Whether names of tools may have at most 64 characters: longer ones are shortened."""
    write_output_format: Callable[[OutputFormat], dict[str, Any] | None] = write_response_format
    """Writes ``response_format``; None if it can't express the format."""
    write_guide: Callable[[OutputFormat], Mapping[str, Any]] = lambda _: {}
    """Writes the fields for formats that ``response_format`` lacks."""
    completion_response_format: bool = True
    """Whether it supports ``response_format`` in completions, too."""
    beam_search: bool = False
    token_ids: bool = False
    """Whether it can return token ids."""
    context_limit: Literal["default", "null", "number"] = "number"
    """How completions get the rest of the context: it is the worker's default, or the meaning of
    ``max_tokens: null``, or a number, if the context is known."""
    request_kinds: frozenset[RequestKind] = BASIC_KINDS
    """The kinds of requests that it answers."""
    tokenizer: TokenizerStyle = "vllm"
    """Whose tokenizer API it has, if it has one."""
    privileged_params: tuple[Param, ...] = ()
    """Parameters that are only written if the operator lets clients use them."""
    kept_keys: KeptKeys = NO_KEYS
    """What its workers know of the unknown keys of clients of other protocols; with a mark for the
    cache also that of the request itself."""
    ignored_parts: Mapping[type[ContentPart], str] = {}
    """Content parts that its workers ignore, with their names for reports."""
    request_rules: RequestRules = DEFAULT_REQUEST_RULES
    """The rules of a listener with this profile."""


SEED_PARAM = Param("seed", "sampling.seed", "int", minimum=-(2**63), maximum=2**63 - 1)
STOP_PARAM = Param("stop", "stopping.stop", "strings")
MAX_TOKENS_PARAM = Param("max_tokens", "stopping.max_tokens", "int")
_OLD_LIMIT: Final = "max_tokens"
_NEW_LIMIT: Final = "max_completion_tokens"
_NEW_LIMIT_PARAM: Final = Param(_NEW_LIMIT, "stopping.max_tokens", "int")
"""The name that newer models of OpenAI require in conversations; older servers do not know it."""

ALL_KINDS: Final[frozenset[RequestKind]] = frozenset(get_args(RequestKind))

_BASE_PARAMS = (
    MAX_TOKENS_PARAM,
    *(find_param(SHARED_PARAMS, name) for name in ("temperature", "top_p", "n")),
    *(find_param(SHARED_PARAMS, name) for name in ("presence_penalty", "frequency_penalty")),
    SEED_PARAM,
    STOP_PARAM,
)
_EFFORT = Param("reasoning_effort", "reasoning.effort", "str", choices=REASONING_EFFORTS)
_PARALLEL = Param("parallel_tool_calls", "parallel_tools", "bool")
_ECHO = Param("echo", "echo", "bool")
_BEST_OF = Param("best_of", "best_of", "int", minimum=1, maximum=20)
_SUFFIX = Param("suffix", "insert_before", "str")


def _find_params(*names: str) -> tuple[Param, ...]:
    return tuple(find_param(CHAT_EXTENSION_PARAMS, name) for name in names)


def _exclude_zero_top_p(table: tuple[Param, ...]) -> tuple[Param, ...]:
    """VLLM and SGLang reject 0; the smallest nucleus is the same one token."""
    low = Param("top_p", "sampling.top_p", "float", minimum=1e-6, maximum=1)
    return tuple(low if param.wire == "top_p" else param for param in table)


def _write_sglang_guide(output: OutputFormat) -> Mapping[str, Any]:
    match output:
        case RegexFormat(pattern):
            return {"regex": pattern}
        case GrammarFormat(text):
            return {"ebnf": text}
        case _:
            return {}


def _write_llamacpp_guide(output: OutputFormat) -> Mapping[str, Any]:
    return {"grammar": output.text} if isinstance(output, GrammarFormat) else {}


def _write_vllm_guide(output: OutputFormat) -> Mapping[str, Any]:
    return {"structured_outputs": write_structured_outputs(output)}


_VLLM_PARAMS = (
    *_exclude_zero_top_p(_BASE_PARAMS),
    *(param for param in EXTENSION_PARAMS if param.wire not in
      {"typical_p", "use_beam_search", "priority", "request_id", "session_id", "return_token_ids"}),
)  # fmt: skip
_SGLANG_PARAMS = (
    *_exclude_zero_top_p(_BASE_PARAMS),
    *_find_params(
        "top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos"
    ),
    *_find_params("skip_special_tokens"),
    Param("no_stop_trim", "stopping.include_stop", "bool"),
)
_LLAMACPP_PARAMS = (
    *_BASE_PARAMS,
    *_find_params("top_k", "min_p", "typical_p", "ignore_eos"),
    Param("repeat_penalty", "sampling.repetition_penalty", "float"),
)
_PRIORITY = find_param(EXTENSION_PARAMS, "priority")
_RERANK_PARAMS = (find_param(RERANK_PARAMS, "truncate_prompt_tokens"),)
_CLASSIFY_PARAMS = tuple(
    find_param(CLASSIFY_PARAMS, name)
    for name in ("truncate_prompt_tokens", "add_special_tokens", "use_activation")
)

PROFILES: Mapping[str, WorkerProfile] = {
    "openai": WorkerProfile(
        chat=(_NEW_LIMIT_PARAM, *_BASE_PARAMS[1:], _EFFORT, _PARALLEL),
        completion=(*_BASE_PARAMS, _ECHO, _BEST_OF, _SUFFIX),
        labels=(
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "metadata",
        ),
        max_stop_strings=4,
        max_chat_logprobs=20,
        max_completion_logprobs=5,
        template_arguments=False,
        allowed_tools=True,
        custom_tools=True,
        limits_tool_names=True,
        completion_response_format=False,
        request_kinds=BASIC_KINDS | {"rerank"},
    ),
    "vllm": WorkerProfile(
        reports_stop_strings=True,
        chat=(
            *_VLLM_PARAMS,
            *_find_params("add_generation_prompt", "continue_final_message", "include_reasoning"),
            *_find_params("thinking_token_budget"),
            _EFFORT,
            _PARALLEL,
        ),
        completion=(*_VLLM_PARAMS, _ECHO),
        embedding=(
            find_param(EMBEDDING_PARAMS, "dimensions"),
            Param("truncate_prompt_tokens", "truncate", "int"),
        ),
        write_guide=_write_vllm_guide,
        context_limit="null",
        beam_search=True,
        token_ids=True,
        request_kinds=ALL_KINDS,
        rerank=_RERANK_PARAMS,
        classify=_CLASSIFY_PARAMS,
        scores_pairs=True,
        privileged_params=(_PRIORITY, *_find_params("chat_template")),
    ),
    "sglang": WorkerProfile(
        reports_stop_strings=True,
        chat=(*_SGLANG_PARAMS, *_find_params("continue_final_message"), _EFFORT, _PARALLEL),
        completion=(*_SGLANG_PARAMS, _ECHO, _SUFFIX),
        write_guide=_write_sglang_guide,
        token_ids=True,
        request_kinds=ALL_KINDS,
        versions_classify=True,
        requires_descriptions=True,
        tokenizer="sglang",
        privileged_params=(_PRIORITY,),
    ),
    "llamacpp": WorkerProfile(
        chat=(
            *_LLAMACPP_PARAMS,
            *_find_params("add_generation_prompt"),
            Param("reasoning_budget_tokens", "reasoning.budget", "int"),
            _PARALLEL,
        ),
        completion=_LLAMACPP_PARAMS,
        write_guide=_write_llamacpp_guide,
        context_limit="default",
        request_kinds=ALL_KINDS - {"classify"},
        requires_descriptions=True,
        tokenizer="llamacpp",
    ),
    "azure": WorkerProfile(
        chat=(_NEW_LIMIT_PARAM, *_BASE_PARAMS[1:], _EFFORT, _PARALLEL),
        completion=(*_BASE_PARAMS, _ECHO, _BEST_OF, _SUFFIX),
        max_stop_strings=4,
        max_chat_logprobs=20,
        max_completion_logprobs=5,
        template_arguments=False,
        limits_tool_names=True,
        completion_response_format=False,
    ),
    "interlingua": WorkerProfile(
        reports_stop_strings=True,
        chat=(SEED_PARAM, *select_written_params(INTERLINGUA_WORKER_RULES.chat)),
        completion=(SEED_PARAM, *select_written_params(INTERLINGUA_WORKER_RULES.completion)),
        embedding=select_written_params(INTERLINGUA_WORKER_RULES.embedding),
        ignored_parts=IGNORED_PARTS,
        message_style=MessageStyle(includes_reasoning=False),
        write_guide=_write_vllm_guide,
        token_ids=True,
        request_kinds=ALL_KINDS,
        rerank=_RERANK_PARAMS,
        classify=_CLASSIFY_PARAMS,
        scores_pairs=True,
        privileged_params=(_PRIORITY, *_find_params("chat_template")),
        request_rules=INTERLINGUA_WORKER_RULES,
    ),
}


_encode = msgspec.json.Encoder().encode
_JSON_HEADERS = (("Content-Type", "application/json"),)

_KNOWN_FIELDS = frozenset(
    {
        p.wire
        for table in (
            DEFAULT_REQUEST_RULES.chat,
            DEFAULT_REQUEST_RULES.completion,
            DEFAULT_REQUEST_RULES.embedding,
        )
        for p in table
    }
    | CHAT_FIELDS
    | COMPLETION_FIELDS
    | EMBEDDING_FIELDS
)
"""Names with a meaning here: in extra fields of another protocol they mean something else."""

_OWN_ANSWER_FIELDS = frozenset(
    {"prompt_logprobs", "return_tokens_as_token_ids", "return_prompt_text", "logprob_token_ids",
     "return_hidden_states", "return_prompt_token_ids", "audio", "watermarking"}
)  # fmt: skip
"""Fields that change the response in a way that only clients of the same protocol can be told."""

_PRIVILEGED_FIELDS = frozenset(
    {"cache_salt", "kv_transfer_params", "ec_transfer_params", "prompt_embeds", "media_io_kwargs",
     "vllm_xargs", "mm_processor_kwargs", "custom_logit_processor", "lora_path", "session_params",
     "chat_template", "priority"}
)  # fmt: skip
"""Fields that control a worker: forwarded only if the operator lets clients use them."""

_SPECIAL_PATHS: Final = frozenset(
    {"sampling.seed", "sampling.do_sample", "sampling.logit_bias", "sampling.beam_width",
     "stopping.stop", "stopping.overflow", "logprobs.top", "logprobs.prompt", "output",
     "messages", "labels", "stream", "response_options.token_ids"}
)  # fmt: skip
"""Paths that the completion encoder handles outside its table."""
_UNFORCED_CHOICES: Final = (None, "auto", "none")
"""Choices that hold without ``tool_choice``: for "none" no tools are sent."""


def uses_chat_endpoint(request: GenerationRequest) -> bool:
    """Whether the worker's chat endpoint answers the request."""
    return request.kind == "chat" or request.templating.mode == "server"


class RequestWriter:
    """Encodes requests for the workers of one profile, under one path prefix."""

    def __init__(
        self, profile: WorkerProfile, prefix: str, *, powers: bool, source: str = ""
    ) -> None:
        """``source`` is the protocol of the clients that use the workers' own words."""
        self._profile = profile
        self.kept_keys = profile.kept_keys or NO_KEYS
        self._source = source
        self._prefix = prefix
        self._allows_privileged = powers
        more = profile.privileged_params if powers else ()
        more_params = [param for param in more if param.wire != "chat_template"]
        self._chat_params = ParamTable(*profile.chat, *more)
        self._completion_params = ParamTable(*profile.completion, *more_params)
        self._embedding_params = ParamTable(*profile.embedding)
        self._generation_support = {chat: self._build_support(chat=chat) for chat in (True, False)}
        self._rerank_params = ParamTable(*profile.rerank)
        self._rerank_support = params.build_parameter_support(self._rerank_params)
        self._classify_params = ParamTable(*profile.classify)
        self._classify_support = params.build_parameter_support(self._classify_params)
        rows = [row for row in TOKENIZE_PARAMS if powers or row.wire != "chat_template"]
        self._tokenize_support = {
            "tools": ParameterSupport("tools"),
            "templating.arguments": ParameterSupport("chat_template_kwargs"),
            **params.build_parameter_support(rows),
        }
        self._embedding_support = params.build_parameter_support(self._embedding_params)
        self._supports_echo = any(param.field == "echo" for param in profile.completion)
        self._supports_truncation = any(
            param.field == "stopping.truncate_prompt" for param in profile.chat
        )

    def encode_request(self, request: AnyRequest) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        path, body = self.write_body(request)
        return UpstreamRequest(path, _encode(body), _JSON_HEADERS)

    def write_body(self, request: AnyRequest) -> tuple[str, dict[str, Any]]:
        """The path, and the fields of the body."""
        path, body = self._write_known_fields(request)
        is_own = self._is_own(request)
        for name, raw in request.extra.items():
            if self.forwards_field(name, is_own=is_own):
                body.setdefault(name, raw)
        for extra in request.field_extra:
            list(write_field_extra(body, extra))
        return path, body

    def _write_known_fields(self, request: AnyRequest) -> tuple[str, dict[str, Any]]:
        """The path and the body, without what the gateway does not know."""
        prefix = self._prefix
        match request:
            case TokenizeRequest() | DetokenizeRequest():
                return f"{prefix.removesuffix('/v1')}/{request.kind}", self._write_tokens(request)
            case ClassifyRequest():
                if not self._profile.versions_classify:
                    prefix = prefix.removesuffix("/v1")
                return f"{prefix}/classify", self._write_classify(request)
            case RerankRequest():
                name, body = self._write_rerank(request)
            case EmbeddingRequest():
                name, body = "embeddings", self._write_embedding(request)
            case _ if uses_chat_endpoint(request):
                name, body = "chat/completions", self._write_chat(request)
            case _:
                name, body = "completions", self._write_completion(request)
        return f"{prefix}/{name}", body

    def _write_tokens(self, request: TokenizeRequest | DetokenizeRequest) -> dict[str, Any]:
        """These endpoints are not under ``/v1``, since OpenAI's API has none of them."""
        style = self._profile.tokenizer
        if isinstance(request, DetokenizeRequest):
            return write_detokenize(request, style)
        body = write_tokenize(request, style, self._profile.message_style)
        if request.templating.template is not None and self._allows_privileged:
            body["chat_template"] = request.templating.template
        return body

    def _write_classify(self, request: ClassifyRequest) -> dict[str, Any]:
        body = write_classify(request)
        body |= params.write_params(self._classify_params, request.set_fields)
        return body | self._write_labels(request)

    def unsupported_parameters(
        self, request: AnyRequest, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        match request:
            case GenerationRequest():
                losses = self._find_generation_losses(request, names)
            case EmbeddingRequest():
                losses = self._find_losses(
                    _ignore_overflow_error(request), self._embedding_support, names
                )
            case RerankRequest():
                losses = self._find_losses(request, self._rerank_support, names)
            case ClassifyRequest():
                losses = self._find_losses(request, self._classify_support, names)
            case _:
                losses = self._find_losses(request, self._tokenize_support, names)
        if request.field_extra:
            # Fields that the workers get in another form, or not at all.
            _, body = self._write_known_fields(request)
            losses += find_lost_keys(body, request.field_extra)
        if not request.extra:
            return losses
        is_own = self._is_own(request)
        excess = tuple(
            UnsupportedParameter(name, "dropped")
            for name in request.extra
            if not self.forwards_field(name, is_own=is_own)
        )
        return losses + excess

    def expects_echo(self, request: GenerationRequest) -> bool:
        """Whether the worker is asked to return the prompt."""
        return bool(request.echo) and self._supports_echo and not uses_chat_endpoint(request)

    def forwards_field(self, name: str, *, is_own: bool = False) -> bool:
        """Whether a worker gets a field that the gateway does not know.

        ``is_own``: the client uses the workers' protocol, so that the name means the same there.
        """
        if name in self._profile.lacks:
            return False
        if not is_own and (name in _KNOWN_FIELDS or name in _OWN_ANSWER_FIELDS):
            return False
        return self._allows_privileged or name not in _PRIVILEGED_FIELDS

    # --- bodies -----------------------------------------------------------------------------------

    def _write_embedding(self, request: EmbeddingRequest) -> dict[str, Any]:
        is_single = len(request.inputs) == 1
        body: dict[str, Any] = {
            "model": request.model,
            "input": request.inputs[0] if is_single else request.inputs,
        }
        body |= params.write_params(self._embedding_params, request.set_fields)
        if request.encoding != "float":
            body["encoding_format"] = request.encoding
        return body | self._write_labels(request)

    def _write_rerank(self, request: RerankRequest) -> tuple[str, dict[str, Any]]:
        if len(request.queries) > 1 and not self._profile.scores_pairs:
            text = "The model's workers compare one text with several, not pairs of texts."
            raise UnsupportedFeature(text, param="text_1")
        path, body = write_rerank(request)
        body |= params.write_params(self._rerank_params, request.set_fields)
        return path, body | self._write_labels(request)

    def _write_chat(self, request: GenerationRequest) -> dict[str, Any]:
        messages = request.messages or wrap_prompt(request)
        body: dict[str, Any] = {
            "model": request.model,
            "messages": write_messages(messages, self._profile.message_style),
        }
        body |= self._write_scalars(self._chat_params, request)
        choice, tools = request.tool_choice, request.tools
        if not self._profile.allowed_tools:
            choice, tools = restrict_tools(choice, tools)
        if "tool_choice" in self._profile.lacks:
            tools = () if choice == "none" else tools
            choice = None
        if tools:
            body["tools"] = write_tools(
                tools, requires_descriptions=self._profile.requires_descriptions
            )
            if choice is not None:
                body["tool_choice"] = write_tool_choice(choice, tools)
        else:
            body.pop("parallel_tool_calls", None)
        if request.logprobs is not None and "logprobs" not in self._profile.lacks:
            body["logprobs"] = True
            if request.logprobs.top:
                body["top_logprobs"] = _limit_logprobs(
                    request.logprobs, self._profile.max_chat_logprobs
                )
        if self._profile.template_arguments and request.templating.arguments is not None:
            body["chat_template_kwargs"] = request.templating.arguments
        return (
            body
            | self._write_output_format(request, takes_format=True)
            | self._write_stream_options(request)
        )

    def _write_completion(self, request: GenerationRequest) -> dict[str, Any]:
        prompts = request.prompts
        prompt: Any = prompts[0] if len(prompts) == 1 else prompts
        body = {"model": request.model, "prompt": prompt}
        if request.fills_context and request.stopping.max_tokens is None:
            body |= self._write_context_limit(request)
        if _SPECIAL_PATHS.isdisjoint(request.set_fields):
            body |= params.write_params(self._completion_params, request.set_fields)
            return body
        body |= self._write_scalars(self._completion_params, request)
        if request.logprobs is not None:
            body["logprobs"] = _limit_logprobs(
                request.logprobs, self._profile.max_completion_logprobs
            )
        takes_format = self._profile.completion_response_format
        return (
            body
            | self._write_output_format(request, takes_format=takes_format)
            | self._write_stream_options(request)
        )

    def _write_context_limit(self, request: GenerationRequest) -> dict[str, Any]:
        """``max_tokens`` for the rest of the context; the prompt is rather counted too long."""
        limit, length = self._profile.context_limit, request.context_length
        if limit == "null":
            return {"max_tokens": None}
        if limit == "default" or length is None:
            return {}
        longest = max(map(_count_most_tokens, request.prompts))
        return {"max_tokens": max(length - longest, 1)}

    def _write_scalars(self, table: ParamTable, request: GenerationRequest) -> dict[str, Any]:
        body = params.write_params(table, request.set_fields)
        if uses_chat_endpoint(request):
            self._rename_limit(body, request)
        if self._profile.max_stop_strings is not None and "stop" in body:
            body["stop"] = body["stop"][: self._profile.max_stop_strings]
        if request.sampling.do_sample is False:
            body["temperature"] = 0.0
        if request.sampling.logit_bias is not None and "logit_bias" not in self._profile.lacks:
            body["logit_bias"] = {str(k): v for k, v in request.sampling.logit_bias.items()}
        if self._profile.beam_search and request.sampling.beam_width is not None:
            body["use_beam_search"] = True
        if self._profile.token_ids and request.response_options.token_ids:
            body["return_token_ids"] = True
        if self._supports_truncation and request.stopping.overflow == "truncate":
            body.setdefault("truncate_prompt_tokens", -1)
        return body

    def _rename_limit(self, body: dict[str, Any], request: GenerationRequest) -> None:
        """Give the limit of tokens the name that the client used, if the worker knows it."""
        sent, name = request.provided_fields, None
        if "max_completion_tokens" in sent:
            name = _NEW_LIMIT
        elif "max_tokens" in sent and request.source in ("", self._source):
            name = _OLD_LIMIT
        if _NEW_LIMIT in self._profile.lacks:
            name = _OLD_LIMIT
        other = _OLD_LIMIT if name == _NEW_LIMIT else _NEW_LIMIT
        if name is not None and other in body:
            body[name] = body.pop(other)

    def _write_output_format(
        self, request: GenerationRequest, *, takes_format: bool
    ) -> dict[str, Any]:
        if request.output is None:
            return {}
        form = self._profile.write_output_format(request.output)
        if form is None:
            return dict(self._profile.write_guide(request.output))
        return {"response_format": form} if takes_format else {}

    def _write_stream_options(self, request: GenerationRequest) -> dict[str, Any]:
        body: dict[str, Any] = self._write_labels(request)
        if request.stream:
            body["stream"] = True
            if "stream_options" not in self._profile.lacks:
                body["stream_options"] = _build_stream_options(request)
        return body

    def _write_labels(self, request: AnyRequest) -> dict[str, Any]:
        if not request.labels:
            return {}
        body: dict[str, Any] = {}
        for label, text in request.labels.items():
            name, _, key = label.partition(".")
            if not self._takes_label(name, request):
                continue
            if key:
                body.setdefault(name, {})[key] = text
            else:
                body[name] = text
        return body

    def _takes_label(self, name: str, request: AnyRequest) -> bool:
        """Whether the workers get a label of the request."""
        profile = self._profile
        return name not in profile.lacks and (name in profile.labels or self._is_own(request))

    def _is_own(self, request: AnyRequest) -> bool:
        """Whether the client uses the workers' own protocol."""
        return bool(self._source) and request.source == self._source

    # --- losses -----------------------------------------------------------------------------------

    def _find_losses(
        self,
        request: AnyRequest,
        carries: Mapping[str, ParameterSupport],
        names: Mapping[str, str],
    ) -> tuple[UnsupportedParameter, ...]:
        """The fields that the workers do not get, but for unknown ones."""
        if request.labels:
            names_sent = {label.partition(".")[0] for label in request.labels}
            sent = [f"labels.{name}" for name in names_sent if self._takes_label(name, request)]
            carries = {**carries, **dict.fromkeys(sent, ParameterSupport(""))}
        return loss.find_unsupported_parameters(request, carries, names, extra=True)

    def _find_generation_losses(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        chat = uses_chat_endpoint(request)
        carries = self._generation_support[chat]
        if not chat and _SPECIAL_PATHS.isdisjoint(request.set_fields):
            return self._find_losses(request, carries, names)
        if more := self._build_request_support(request, chat=chat):
            carries = carries | more
        losses = list(self._find_losses(_ignore_overflow_error(request), carries, names))
        stops, most = len(request.stopping.stop), self._profile.max_stop_strings
        if most is not None and stops > most:
            wire = names.get("stopping.stop", "stop")
            losses.append(
                UnsupportedParameter(wire, "clamped", f"{stops} to {most}", "stopping.stop")
            )
        if chat and len(request.prompts) > 1:
            losses.append(
                UnsupportedParameter(names.get("prompts", "prompt"), "dropped", path="prompts")
            )
        choice, _ = restrict_tools(request.tool_choice, request.tools)
        if "tool_choice" in self._profile.lacks and choice not in _UNFORCED_CHOICES:
            wire = names.get("tool_choice", "tool_choice")
            losses.append(UnsupportedParameter(wire, "dropped", path="tool_choice"))
        if request.messages:
            profile = self._profile
            losses += find_unseen_content(request.messages, profile.ignored_parts)
            losses += find_lost_reasoning(
                request.messages, sends_text=profile.message_style.includes_reasoning
            )
        return tuple(losses)

    def _build_support(self, *, chat: bool) -> dict[str, ParameterSupport]:
        """The support that does not depend on the request."""
        profile = self._profile
        most = profile.max_chat_logprobs if chat else profile.max_completion_logprobs
        low = None if most is None else 0
        carries = params.build_parameter_support(
            self._chat_params if chat else self._completion_params
        )
        if profile.reports_stop_strings:
            carries["stopping.stop"] = replace(carries["stopping.stop"], reports_match=True)
        carries["sampling.do_sample"] = ParameterSupport("")
        if profile.token_ids:
            carries["response_options.token_ids"] = ParameterSupport("return_token_ids")
        if "logit_bias" not in profile.lacks:
            carries["sampling.logit_bias"] = ParameterSupport("logit_bias")
        if "logprobs" not in profile.lacks:
            carries["logprobs.top"] = ParameterSupport(
                "top_logprobs" if chat else "logprobs", low, most
            )
        if chat:
            carries["tools"] = ParameterSupport("tools")
            if profile.template_arguments:
                carries["templating.arguments"] = ParameterSupport("chat_template_kwargs")
        return carries

    def _build_request_support(
        self, request: GenerationRequest, *, chat: bool
    ) -> dict[str, ParameterSupport]:
        """The further support for this request."""
        profile = self._profile
        carries = {}
        if request.echo and not chat and request.logprobs is not None:
            carries["logprobs.prompt"] = ParameterSupport(
                "logprobs", maximum=profile.max_completion_logprobs
            )
        written = self._write_output_format(
            request, takes_format=chat or profile.completion_response_format
        )
        if written:
            schema = written.get("response_format", {}).get("json_schema", {})
            carries["output"] = ParameterSupport(
                "response_format", takes_description="description" in schema
            )
        if self._supports_truncation and request.stopping.overflow == "truncate":
            carries["stopping.overflow"] = ParameterSupport("truncate_prompt_tokens")
        if profile.beam_search and request.sampling.beam_width is not None:
            exact = request.sampling.beam_width == (request.n or 1)
            carries["sampling.beam_width"] = ParameterSupport(
                "use_beam_search", reason=None if exact else "approximated"
            )
        return carries


def _build_stream_options(request: GenerationRequest) -> dict[str, bool]:
    options = {"include_usage": True}
    if request.response_options.usage == "each":
        options["continuous_usage_stats"] = True
    return options


def _ignore_overflow_error(request: Any) -> Any:
    """The request without the overflow policy that every worker has."""
    if isinstance(request, EmbeddingRequest):
        unsaid = request.overflow == "error"
        return msgspec.structs.replace(request, overflow=None) if unsaid else request
    if request.stopping.overflow != "error":
        return request
    stopping = msgspec.structs.replace(request.stopping, overflow=None)
    return msgspec.structs.replace(request, stopping=stopping)


def wrap_prompt(request: GenerationRequest) -> tuple[Message, ...]:
    """A prompt as a user message, for the worker's chat template."""
    match request.prompts:
        case (str() as prompt,):
            return (Message("user", (TextPart(prompt),)),)
        case (_,):
            text = "Token ids can't go through a chat template."
            raise UnsupportedFeature(text, param="prompt")
        case _:
            text = "Only one prompt at a time can go through a worker's chat template."
            raise UnsupportedFeature(text, param="prompt")


def _count_most_tokens(prompt: Prompt) -> int:
    """More tokens than nearly all prompts have: two bytes each."""
    return len(prompt.encode()) // 2 + 1 if isinstance(prompt, str) else len(prompt)


def _limit_logprobs(logprobs: LogprobsOptions, most: int | None) -> int:
    top = logprobs.top
    if most is None:
        return top
    return most if top < 0 else min(top, most)


RequestT = TypeVar("RequestT", GenerationRequest, EmbeddingRequest)
