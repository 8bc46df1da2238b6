"""The UpstreamAdapter: chat requests in OpenAI's format, prompts in TGI's own."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from protocols import params
from protocols.chat.decoder import GenerationDecoder
from protocols.chat.field_keys import find_lost_keys
from protocols.chat.upstream import RequestWriter, WorkerProfile, uses_chat_endpoint
from protocols.core import loss
from protocols.core.call_arguments import complete_schemas
from protocols.core.errors import GatewayError
from protocols.core.interfaces import GENERATION_KINDS, ResponseDecoder, UpstreamRequest
from protocols.core.json_text import JsonDecoder
from protocols.core.loss import ParameterSupport, UnsupportedParameter
from protocols.core.places import locate_message
from protocols.core.request import (
    AudioPart,
    ChoiceFormat,
    ContentPart,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonSchemaFormat,
    Message,
    OutputFormat,
    RefusalPart,
    RegexFormat,
    Request,
    RequestKind,
    TextPart,
    VideoPart,
)
from protocols.json_body import JSON_ERRORS
from protocols.params import Param
from protocols.prompt import build_prompt, require_generation
from protocols.tgi import errors
from protocols.tgi.decoder import GenerateDecoder
from protocols.tgi.errors import raise_worker_error
from protocols.tgi.params import (
    FREQUENCY_PENALTY,
    MAX_TOP_TOKENS,
    SEED,
    STOP,
    TOP_P,
    TgiLimits,
    build_generate_table,
)
from protocols.tgi.requests import PREFILL_FIELD


def write_output_format(output: OutputFormat) -> dict[str, Any] | None:
    """Return a ``grammar`` of ``/generate``, or a ``response_format`` of chat, or None.

    The server rejects a schema without ``properties``.
    """
    match output:
        case JsonSchemaFormat(schema):
            return {"type": "json", "value": schema}
        case RegexFormat(pattern):
            return {"type": "regex", "value": pattern}
        case ChoiceFormat(options):
            return {"type": "regex", "value": f"({'|'.join(map(re.escape, options))})"}
        case _:
            return None


CHAT_PROFILE = WorkerProfile(
    chat=(
        Param("model", "adapter", "str"),
        Param("max_tokens", "stopping.max_tokens", "int", 1),
        Param("temperature", "sampling.temperature", "float", 0),
        TOP_P,
        FREQUENCY_PENALTY,
        replace(SEED, maximum=2**63 - 1),
        STOP,
    ),
    completion=(),
    labels=(),
    max_chat_logprobs=MAX_TOP_TOKENS,
    template_arguments=False,
    write_output_format=write_output_format,
)
"""Chat parameters. TGI ignores ``n``, ``logit_bias`` and unknown fields;
``presence_penalty`` becomes a repetition penalty of two more.
"""


# Requests for ``/generate`` and ``/generate_stream``, and their unsupported parameters.

_NAME: Final = "tgi"
"""The protocol whose clients' unknown fields are sent."""
_encode = msgspec.json.Encoder().encode
_JSON_HEADERS = (("Content-Type", "application/json"),)
_SAMPLING_ONLY_FIELDS = ("temperature", "top_p", "top_k", "typical_p")
"""Parameters without an effect on greedy decoding, or that would turn it into sampling."""


def encode_generate_request(request: GenerationRequest, limits: TgiLimits) -> UpstreamRequest:
    """Encode a request for its first prompt.

    Only a stream reports the prompt length, so a unary response is requested as a stream, too, if
    its usage is wanted. Raises UnsupportedFeature for token ids.
    """
    adapted = adapt_generate_request(request, limits)
    support = build_parameter_support(adapted, limits)
    values = {path: value for path, value in adapted.set_fields.items() if path in support}
    parameters: dict[str, Any] = params.write_params(build_generate_table(limits), values)
    parameters |= {"details": True, "return_full_text": False}
    if adapted.output is not None and "output" in support:
        parameters["grammar"] = write_output_format(adapted.output)
    if adapted.logprobs is not None:
        if top := adapted.logprobs.top:
            parameters["top_n_tokens"] = min(top, MAX_TOP_TOKENS) if top > 0 else MAX_TOP_TOKENS
        if adapted.logprobs.prompt is not None and "logprobs.prompt" in support:
            parameters["decoder_input_details"] = True
    is_unary = not request.stream and (
        request.response_options.usage == "none"
        or not parameters.keys().isdisjoint(_UNARY_ONLY_PARAMS)
    )
    body = {"inputs": build_prompt(request, None), "parameters": parameters}
    if request.source == _NAME:
        _write_unknown_keys(body, request)
    path = "/generate" if is_unary else "/generate_stream"
    return UpstreamRequest(path, _encode(body), _JSON_HEADERS)


_UNARY_ONLY_PARAMS = ("best_of", "decoder_input_details")
"""The parameters that a stream rejects."""


def find_unsupported_generate_parameters(
    request: GenerationRequest, limits: TgiLimits, names: Mapping[str, str]
) -> tuple[UnsupportedParameter, ...]:
    """List the unsupported parameters of a request with prompts."""
    adapted = adapt_generate_request(request, limits)
    support = build_parameter_support(adapted, limits)
    is_own = request.source == _NAME
    unsupported = loss.find_unsupported_parameters(adapted, support, names, extra=is_own)
    if is_own:
        unsupported += _write_unknown_keys({"parameters": {}}, request)
    if len(request.prompts) > 1:
        wire = names.get("prompts", "prompt")
        unsupported += (UnsupportedParameter(wire, "dropped", path="prompts"),)
    return unsupported


def _write_unknown_keys(
    body: dict[str, Any], request: GenerationRequest
) -> tuple[UnsupportedParameter, ...]:
    """Add the keys that the gateway does not know; returns those that have no place."""
    for name, raw in request.extra.items():
        if name != PREFILL_FIELD:
            body.setdefault(name, raw)
    losses = find_lost_keys(body, request.field_extra)
    if PREFILL_FIELD in request.extra:
        losses += (UnsupportedParameter(PREFILL_FIELD, "dropped"),)
    return losses


def adapt_generate_request(request: GenerationRequest, limits: TgiLimits) -> GenerationRequest:
    """Normalise the request to TGI's conventions.

    TGI decodes greedily by default if parameters are sent, and samples without any; a client that
    sets nothing expects sampling. Values without an effect (top_p 1, one choice) and more stops
    than accepted are removed, since TGI rejects them or they would count as losses.
    """
    sampling, stopping = request.sampling, request.stopping
    greedy = sampling.do_sample is False or sampling.temperature == 0
    if greedy:
        sampling = replace(sampling, **dict.fromkeys(_SAMPLING_ONLY_FIELDS))
    truncated = stopping.truncate_prompt
    if truncated == -1 or (truncated is None and stopping.overflow == "truncate"):
        truncated = limits.max_prompt_tokens or truncated
    is_explicit = stopping.overflow == "error" or truncated is not None
    return replace(
        request,
        n=None if request.n == 1 else request.n,
        best_of=None if request.best_of == 1 else request.best_of,
        sampling=replace(
            sampling,
            do_sample=not greedy,
            top_p=_drop_full_probability(sampling.top_p),
            typical_p=_drop_full_probability(sampling.typical_p),
        ),
        stopping=replace(
            stopping,
            stop=stopping.stop[: limits.max_stop_strings],
            truncate_prompt=truncated,
            overflow=None if is_explicit else stopping.overflow,
        ),
    )


def _drop_full_probability(probability: float | None) -> float | None:
    """Return the probability; None for 1, which TGI rejects."""
    return None if probability is not None and probability >= 1 else probability


def build_parameter_support(
    request: GenerationRequest, limits: TgiLimits
) -> Mapping[str, ParameterSupport]:
    """Build the parameter support of an adapted request."""
    support = params.build_parameter_support(build_generate_table(limits))
    support |= {
        "echo": ParameterSupport(""),
        "logprobs.top": ParameterSupport("top_n_tokens", 0, MAX_TOP_TOKENS),
        "stopping.skip_special_tokens": ParameterSupport(""),
        "response_options.token_ids": ParameterSupport(""),
    }
    if not request.stream:
        support["logprobs.prompt"] = ParameterSupport("decoder_input_details")
    if request.output is not None and write_output_format(request.output) is not None:
        support["output"] = ParameterSupport("grammar")
    if request.templating.add_special_tokens:
        support["templating.add_special_tokens"] = ParameterSupport("")
    if request.stopping.truncate_prompt == -1:
        del support["stopping.truncate_prompt"]
    is_sampled = request.sampling.do_sample and request.sampling.seed is None
    if request.stream or not is_sampled or limits.max_best_of == 1:
        del support["best_of"]
    elif request.n is not None:
        support["best_of"] = ParameterSupport("best_of", reason="approximated")
    return support


# Requests for ``/v1/chat/completions``, and their unsupported parameters.
#
# They are written as for any OpenAI-compatible worker. What this server rejects or misinterprets is
# converted here, or removed and reported.

_CHAT_WRITER: Final = RequestWriter(CHAT_PROFILE, "/v1", powers=False, source="tgi")
"""The parameters of a tool without any; the server requires the field."""
_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    AudioPart: "audio",
    FilePart: "files",
    VideoPart: "videos",
}


def encode_chat_request(request: GenerationRequest, limits: TgiLimits) -> UpstreamRequest:
    """See ``protocols.core.interfaces.UpstreamAdapter``."""
    return _CHAT_WRITER.encode_request(_adapt_chat_request(request, limits))


def find_unsupported_chat_parameters(
    request: GenerationRequest, limits: TgiLimits, names: Mapping[str, str]
) -> tuple[UnsupportedParameter, ...]:
    """See ``protocols.core.interfaces.UpstreamAdapter``."""
    return (
        *_CHAT_WRITER.unsupported_parameters(_adapt_chat_request(request, limits), names),
        *_iter_unsupported_fields(request, names),
    )


def _iter_unsupported_fields(
    request: GenerationRequest, names: Mapping[str, str]
) -> Iterator[UnsupportedParameter]:
    """List the parameters that ``_adapt_chat_request`` removed."""
    for name in request.extra if request.source != _NAME else ():
        yield UnsupportedParameter(name, "dropped")
    if request.sampling.logit_bias is not None:
        path = "sampling.logit_bias"
        yield UnsupportedParameter(names.get(path, "logit_bias"), "dropped", path=path)
    if request.output is not None and _has_callable_tools(request):
        wire = names.get("output", "response_format")
        yield UnsupportedParameter(wire, "dropped", "not beside tools", "output")
    yield from loss.find_unseen_content(request.messages, _UNSUPPORTED_PARTS)
    yield from loss.find_lost_reasoning(request.messages, sends_text=False)
    yield from loss.find_spoken_refusals(request.messages)
    for i, message in enumerate(request.messages):
        if message.tool_calls and message.text:
            places = [part.at for part in message.parts if isinstance(part, TextPart)]
            path = next(filter(None, places), f"{locate_message(message, i)}.content")
            yield UnsupportedParameter(path, "dropped", "text beside tool calls", "messages")


def _adapt_chat_request(request: GenerationRequest, limits: TgiLimits) -> GenerationRequest:
    """Adapt the request to this server.

    Temperature 0 alone means greedy: with top_p it would sample. All releases know ``max_tokens``.
    """
    sampling, stopping = request.sampling, request.stopping
    greedy = sampling.do_sample is False or sampling.temperature == 0
    is_full_top_p = sampling.top_p is not None and sampling.top_p >= 1
    has_tools = _has_callable_tools(request)
    return replace(
        request,
        n=None if request.n == 1 else request.n,
        messages=tuple(map(_adapt_message, request.messages)),
        sampling=replace(
            sampling,
            top_p=None if greedy or is_full_top_p else sampling.top_p,
            logit_bias=None,
        ),
        stopping=replace(stopping, stop=stopping.stop[: limits.max_stop_strings]),
        tools=complete_schemas(request.tools) if has_tools else (),
        tool_choice=request.tool_choice if has_tools else None,
        output=None if has_tools else request.output,
        provided_fields=frozenset(),
        extra=request.extra if request.source == _NAME else {},
    )


def _has_callable_tools(request: GenerationRequest) -> bool:
    """Whether the model may call tools; for ``none``, they are not sent."""
    return bool(request.tools) and request.tool_choice != "none"


def _adapt_message(message: Message) -> Message:
    """Adapt a message, which has either content or tool calls; content is text and images."""
    role = "system" if message.role == "developer" else message.role
    if message.tool_calls:
        return replace(message, role=role, parts=())
    parts = [TextPart(p.text, p.extra) if isinstance(p, RefusalPart) else p for p in message.parts]
    kept = tuple(part for part in parts if isinstance(part, TextPart | ImagePart))
    return replace(message, role=role, parts=kept or (TextPart(""),))


_NonNegativeInt = Annotated[int, Meta(ge=0)]


class _ServerInfo(Struct):
    """The response of ``/info``; earlier releases used the second name of the prompt limit."""

    max_concurrent_requests: _NonNegativeInt | None = None
    max_stop_sequences: _NonNegativeInt | None = None
    max_best_of: _NonNegativeInt | None = None
    max_input_tokens: _NonNegativeInt | None = None
    max_input_length: _NonNegativeInt | None = None


_decode_info = JsonDecoder(_ServerInfo).decode


class TgiUpstream:
    """Text Generation Inference, towards workers.

    Chat requests go to ``/v1/chat/completions``, where the server has the model's chat template;
    prompts go to ``/generate`` and ``/generate_stream``, which accept more parameters and report
    more than ``/v1/completions``. A URL serves one model, so requests for prompts do not name it.
    """

    name: str = "tgi"
    profiles: ClassVar[tuple[str, ...]] = ("3",)
    model_options: ClassVar[Mapping[str, Any]] = {}
    path_prefixes: tuple[str, ...] = ("/v1", "/generate", "/generate_stream")
    """Suffixes that a worker's URL must not have."""
    request_kinds: frozenset[RequestKind] = GENERATION_KINDS

    def __init__(self, profile: str | None = None) -> None:
        if profile not in (None, *self.profiles):
            known = ", ".join(self.profiles)
            raise ValueError(f"there is no profile {profile!r} of {self.name}; known: {known}")
        self.health_request = UpstreamRequest("/health", b"", method="GET")
        self._limits: dict[str, TgiLimits] = {}

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        if isinstance(request, EmbeddingRequest):
            return loss.find_unsupported_parameters(request, {}, names)
        limits = self._get_limits(request.model)
        if uses_chat_endpoint(request):
            return find_unsupported_chat_parameters(request, limits, names)
        return find_unsupported_generate_parameters(request, limits, names)

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``. Rejects embeddings."""
        request = require_generation(request)
        encode = encode_chat_request if uses_chat_endpoint(request) else encode_generate_request
        return encode(request, self._get_limits(request.model))

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request = require_generation(request)
        if uses_chat_endpoint(request):
            # A stream with a tool call ends without a finish reason.
            return GenerationDecoder(
                request, complaint=raise_worker_error, ends_calls=True, source=self.name
            )
        return GenerateDecoder(request)

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return errors.read_worker_error(status, headers, body)

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        """See ``protocols.core.interfaces.ModelMetadataReader``."""
        del model
        return (UpstreamRequest("/info", b"", method="GET"),)

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``protocols.core.interfaces.ModelMetadataReader``."""
        try:
            info = _decode_info(answers[0] or b"")
        except (*JSON_ERRORS, IndexError):
            return None
        limits = TgiLimits(max_prompt_tokens=info.max_input_tokens or info.max_input_length)
        if info.max_stop_sequences is not None:
            limits = replace(limits, max_stop_strings=info.max_stop_sequences)
        if info.max_best_of:
            limits = replace(limits, max_best_of=info.max_best_of)
        self._limits[model] = limits
        return info.max_concurrent_requests or None

    def _get_limits(self, model: str) -> TgiLimits:
        return self._limits.get(model, TgiLimits())
