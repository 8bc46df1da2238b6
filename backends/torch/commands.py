"""Core requests to commands of the engine, and the parameters that the engine does not support."""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from backends.torch.ipc import (
    BeamSearchParams,
    ChatTurn,
    ClassifyCommand,
    EmbedCommand,
    EngineSamplingParams,
    FunctionCall,
    FunctionChoice,
    FunctionDefinition,
    GenerateCommand,
    OutputRule,
    PromptInput,
    RerankCommand,
    StopParams,
    TokenizeCommand,
)
from backends.torch.settings import WatermarkSettings
from protocols.core.catalog import ModelFeatures
from protocols.core.loss import (
    CONTENT_LABELS,
    ParameterSupport,
    UnsupportedParameter,
    find_lost_reasoning,
    find_unseen_content,
    find_unsupported_parameters,
)
from protocols.core.request import (
    AllowedTools,
    AnyRequest,
    ChoiceFormat,
    ClassifyRequest,
    ContentPart,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ReasoningPart,
    RefusalPart,
    RegexFormat,
    RerankRequest,
    TokenizeRequest,
    Tool,
)

_FORMAT_PARAMS: Final = ("response_format", "structured_outputs", "guided_json", "guided_regex",
                 "guided_choice", "guided_grammar", "guided_decoding", "guided_decoding_guide",
                 "grammar")  # fmt: skip
"""The fields by which clients set an output format."""


def build_output_format(request: GenerationRequest) -> OutputRule | None:
    """The output format of a request."""
    param = next(
        (name for name in _FORMAT_PARAMS if name in request.provided_fields), _FORMAT_PARAMS[0]
    )
    match request.output:
        case None:
            return None
        case JsonObjectFormat():
            return OutputRule("json", '{"type":"object"}', param=param)
        case JsonSchemaFormat(schema, strict=strict):
            return OutputRule("json", bytes(schema).decode(), strict is False, param)
        case RegexFormat(pattern):
            return OutputRule("regex", pattern, param=param)
        case ChoiceFormat(options):
            return OutputRule("choice", msgspec.json.encode(options).decode(), param=param)
        case GrammarFormat(text):
            return OutputRule("grammar", text, param=param)


def build_functions(request: GenerationRequest) -> tuple[FunctionDefinition, ...]:
    """The functions in the prompt; empty if the model must not call any."""
    if request.tool_choice == "none":
        return ()
    return tuple(map(_build_function, request.tools))


def build_function_choice(request: GenerationRequest) -> FunctionChoice | None:
    """Which functions may be called, and whether one must be."""
    names = tuple(item.name for item in build_functions(request))
    allow_parallel = request.parallel_tools is not False
    match request.tool_choice:
        case NamedTool(name):
            function_choice = FunctionChoice(
                (name,) if name in names else (), required=True, parallel=False
            )
        case AllowedTools(mode, allowed):
            allowed_names = tuple(name for name in names if name in allowed)
            function_choice = FunctionChoice(allowed_names, mode == "required", allow_parallel)
        case choice:
            function_choice = FunctionChoice(names, choice == "required", allow_parallel)
    return function_choice if function_choice.names else None


def _build_function(tool: Tool) -> FunctionDefinition:
    if tool.parameters is None:
        return FunctionDefinition(tool.name, tool.description, strict=tool.strict is True)
    return FunctionDefinition(
        tool.name, tool.description, bytes(tool.parameters), tool.strict is True
    )


_PARAMETER_SECTIONS = {
    "sampling": (
        "temperature", "top_p", "top_k", "min_p", "typical_p", "do_sample", "seed",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
        "allowed_token_ids", "bad_words", "watermark", "beam_width", "diversity_penalty",
        "length_penalty",
    ),
    "stopping": (
        "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos",
        "truncate_prompt", "overflow", "skip_special_tokens",
    ),
    "": (
        "n", "best_of", "echo", "priority",
        "tools", "parallel_tools", "output",
    ),
    "logprobs": (
        "top", "prompt",
    ),
    "templating": (
        "arguments", "continue_final", "add_generation_prompt", "add_special_tokens",
    ),
}  # fmt: skip
_GENERATION_SUPPORT = {
    f"{section}.{name}" if section else name: ParameterSupport(name)
    for section, fields in _PARAMETER_SECTIONS.items()
    for name in fields
}
_GENERATION_SUPPORT["stopping.stop"] = ParameterSupport("stop", reports_match=True)
_GENERATION_SUPPORT["reasoning.effort"] = ParameterSupport(
    "reasoning_effort", reason="approximated"
)
"""It sets variables of the chat template, which may not have them."""
_GENERATION_SUPPORT["reasoning.include"] = ParameterSupport("include_reasoning")
_GENERATION_SUPPORT["response_options.token_ids"] = ParameterSupport("token_ids")
_SAMPLING_DEFAULTS: Final[Mapping[str, float | None]] = {
    "temperature": 0, "top_p": 1, "top_k": None, "min_p": 0, "typical_p": 1, "seed": None,
}  # fmt: skip
"""Sampling parameters that beam search ignores, with the values that have no effect."""
_CALLER_SUPPORT = {
    path: ParameterSupport("") for path in ("labels.user", "labels.safety_identifier")
}
"""Labels that name the end user. The gateway serves the model itself, so it has received them."""
_GENERATION_SUPPORT |= _CALLER_SUPPORT
_EMBEDDING_SUPPORT = _CALLER_SUPPORT | {
    path: ParameterSupport(path)
    for path in ("instruction", "dimensions", "normalize", "truncate", "overflow")
}

_RERANK_SUPPORT = _CALLER_SUPPORT | {"truncate": ParameterSupport("truncate")}
_CLASSIFY_SUPPORT = _CALLER_SUPPORT | {
    path: ParameterSupport(path) for path in ("truncate", "add_special_tokens", "activation")
}
_TOKENIZE_SUPPORT = _CALLER_SUPPORT | {
    path: ParameterSupport(path)
    for path in ("tools", *(f"templating.{name}" for name in _PARAMETER_SECTIONS["templating"]))
}

_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    **CONTENT_LABELS,
    RefusalPart: "refusals",
}
_DEFAULT_WATERMARK: Final = WatermarkSettings()
_ROLE_ALIASES = {"developer": "system", "function": "tool"}


def find_unsupported_params(
    request: AnyRequest,
    names: Mapping[str, str],
    *,
    templates: bool,
    features: ModelFeatures | None = None,
    on_demand: bool = False,
) -> tuple[UnsupportedParameter, ...]:
    """The parameters of a request that the engine does not support.

    ``features`` are those of the model; None while it is loaded. ``on_demand``: it is loaded on
    demand, and stays for as long as a request says.
    """
    template_support = {"templating.template": ParameterSupport("template")} if templates else {}
    load_support = {"keep_alive": ParameterSupport("keep_alive")} if on_demand else {}
    match request:
        case EmbeddingRequest():
            carries = {**_EMBEDDING_SUPPORT, **load_support}
            return find_unsupported_parameters(request, carries, names)
        case RerankRequest():
            return find_unsupported_parameters(request, _RERANK_SUPPORT, names)
        case ClassifyRequest():
            return find_unsupported_parameters(request, _CLASSIFY_SUPPORT, names)
        case TokenizeRequest() | DetokenizeRequest():
            carries = {**_TOKENIZE_SUPPORT, **template_support}
            return find_unsupported_parameters(request, carries, names)
        case GenerationRequest():
            pass
    carries = {**_GENERATION_SUPPORT, **template_support, **load_support}
    has_own_template = templates and request.templating.template is not None
    if features is not None and not features.follows_effort and not has_own_template:
        neutral = "none" if features.reasoning is None else None
        carries["reasoning.effort"] = ParameterSupport("", reason="dropped", default=neutral)
    unsupported = (
        *find_unsupported_parameters(request, carries, names),
        *_find_unused_sampling(request, names),
    )
    keeps_reasoning = features is not None and features.keeps_reasoning
    return (
        *unsupported,
        *find_unseen_content(request.messages, _UNSUPPORTED_PARTS),
        *find_lost_reasoning(request.messages, sends_text=keeps_reasoning),
    )


def _find_unused_sampling(
    request: GenerationRequest, names: Mapping[str, str]
) -> Iterator[UnsupportedParameter]:
    if request.sampling.beam_width is None:
        return
    for name, neutral in _SAMPLING_DEFAULTS.items():
        if getattr(request.sampling, name) not in (None, neutral):
            path = f"sampling.{name}"
            yield UnsupportedParameter(
                names.get(path, name), "dropped", "a beam search draws nothing", path
            )


def build_generate_command(
    request: GenerationRequest,
    request_id: int,
    timeout: float,
    *,
    templates: bool,
    watermark: WatermarkSettings = _DEFAULT_WATERMARK,
    tenant: str | None = None,
) -> GenerateCommand:
    """Build the command for a request.

    ``watermark`` is the watermark of the text, if any; ``tenant`` is the caller, for fair queueing.
    """
    n = request.n or 1
    logprobs = request.logprobs
    return GenerateCommand(
        request_id=request_id,
        input=_build_prompt_input(request, templates=templates),
        sampling=_build_sampling_params(request, watermark),
        stopping=_build_stop_params(request),
        n=n,
        best_of=max(n, request.best_of or n),
        logprobs=None if logprobs is None else logprobs.top,
        prompt_logprobs=None if logprobs is None else _get_prompt_logprobs(request),
        token_ids=request.response_options.token_ids,
        echo=bool(request.echo) and bool(request.prompts),
        priority=128 if request.priority is None else request.priority,
        timeout=timeout,
        tenant=tenant,
        beams=build_beam_search_params(request),
        output_format=build_output_format(request),
        function_choice=build_function_choice(request),
    )


def _get_prompt_logprobs(request: GenerationRequest) -> int | None:
    """An echoed prompt has as many logprobs as the text, unless the request says otherwise."""
    if request.logprobs is None or not request.echo:
        return None
    if request.logprobs.prompt is not None:
        return request.logprobs.prompt
    return request.logprobs.top


def _build_prompt_input(request: GenerationRequest, *, templates: bool) -> PromptInput:
    templating, stopping = request.templating, request.stopping
    effort = None if request.reasoning is None else request.reasoning.effort
    truncate_to = stopping.truncate_prompt
    if truncate_to is None and stopping.overflow == "truncate":
        truncate_to = -1
    return PromptInput(
        turns=tuple(_build_turn(message) for message in request.messages),
        functions=build_functions(request),
        prompts=request.prompts,
        as_user_message=templating.mode == "server",
        template=templating.template if templates else None,
        template_arguments=msgspec.json.encode(
            {**build_effort_variables(effort), **(templating.arguments or {})}
        ),
        continue_final=bool(templating.continue_final),
        generation_prompt=templating.add_generation_prompt is not False,
        special_tokens=templating.add_special_tokens,
        truncate_to=truncate_to,
    )


def build_effort_variables(effort: str | None) -> dict[str, object]:
    """The variables by which chat templates turn reasoning on and off."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"enable_thinking": True, "thinking": True, "reasoning_effort": effort}


def _build_turn(message: Message) -> ChatTurn:
    return ChatTurn(
        _ROLE_ALIASES.get(message.role, message.role),
        message.text,
        message.name,
        tuple(FunctionCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        message.tool_call_id,
        "".join(part.text for part in message.parts if isinstance(part, ReasoningPart)),
    )


def returns_best_only(request: GenerationRequest) -> bool:
    """Whether nothing is sent before all samples have ended, because the best are selected."""
    return (request.best_of or 0) > (request.n or 1) or build_beam_search_params(
        request
    ) is not None


def build_beam_search_params(request: GenerationRequest) -> BeamSearchParams | None:
    """The beam search, if it has more than one beam: a single beam is greedy sampling."""
    sampling = request.sampling
    width = max(sampling.beam_width or 0, request.n or 1)
    if sampling.beam_width is None or width == 1 or request.stopping.max_tokens == 0:
        return None
    penalty = sampling.length_penalty
    return BeamSearchParams(
        width,
        # With a diversity penalty, each beam differs from all others.
        groups=width if sampling.diversity_penalty else 1,
        diversity_penalty=sampling.diversity_penalty or 0.0,
        length_penalty=1.0 if penalty is None else penalty,
    )


def _build_sampling_params(
    request: GenerationRequest, watermark: WatermarkSettings
) -> EngineSamplingParams:
    sampling = request.sampling
    greedy = sampling.do_sample is False or sampling.beam_width is not None
    return EngineSamplingParams(
        temperature=0.0 if greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias or {},
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
        watermark=watermark if sampling.watermark else None,
    )


def _build_stop_params(request: GenerationRequest) -> StopParams:
    stopping = request.stopping
    return StopParams(
        max_tokens=stopping.max_tokens,
        min_tokens=stopping.min_tokens or 0,
        stop=stopping.stop,
        stop_token_ids=stopping.stop_token_ids,
        include_stop=bool(stopping.include_stop),
        ignore_eos=bool(stopping.ignore_eos),
        skip_special_tokens=stopping.skip_special_tokens is not False,
    )


def build_embed_command(request: EmbeddingRequest, request_id: int, timeout: float) -> EmbedCommand:
    """Build the command for a request."""
    max_tokens = request.truncate
    if max_tokens is None and request.overflow == "truncate":
        max_tokens = -1
    return EmbedCommand(
        request_id=request_id,
        inputs=request.inputs,
        instruction=request.instruction,
        dimensions=request.dimensions,
        normalize=request.normalize,
        max_tokens=max_tokens,
        timeout=timeout,
    )


def build_rerank_command(request: RerankRequest, request_id: int, timeout: float) -> RerankCommand:
    """Build the command for a request."""
    return RerankCommand(request_id, request.queries, request.documents, request.truncate, timeout)


def build_classify_command(
    request: ClassifyRequest, request_id: int, timeout: float
) -> ClassifyCommand:
    """Build the command for a request."""
    return ClassifyCommand(
        request_id,
        request.inputs,
        request.truncate,
        request.add_special_tokens is not False,
        request.activation,
        timeout,
    )


def build_tokenize_command(
    request: TokenizeRequest, request_id: int, *, templates: bool
) -> TokenizeCommand:
    """Build the command for a request, with the input of a request for text."""
    prompts = () if request.prompt is None else (request.prompt,)
    generation = GenerationRequest(
        model=request.model,
        kind="chat",
        messages=request.messages,
        prompts=prompts,
        tools=request.tools,
        templating=request.templating,
    )
    return TokenizeCommand(request_id, _build_prompt_input(generation, templates=templates))
