"""Writing requests for workers, and telling what they can't carry."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from protocols import params
from protocols.core import loss
from protocols.core.errors import UnsupportedFeature
from protocols.core.interfaces import UpstreamRequest
from protocols.core.loss import ParameterSupport, UnsupportedParameter
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    LogprobsOptions,
    Message,
    ReasoningPart,
    Request,
    TextPart,
)
from protocols.openai.messages import write_messages
from protocols.openai.profiles import WorkerProfile
from protocols.openai.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DEFAULT_REQUEST_RULES,
    EMBEDDING_FIELDS,
)
from protocols.openai.tools import restrict_tools, write_tool_choice, write_tools
from protocols.params import ParamTable

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
"""Names with a meaning here: left over by another dialect, they mean something else."""

_UNSUPPORTED_FIELDS = frozenset(
    {"prompt_logprobs", "return_tokens_as_token_ids", "return_prompt_text", "logprob_token_ids",
     "return_hidden_states", "return_prompt_token_ids", "audio", "watermarking"}
)  # fmt: skip
"""What would change the answer in a way that no event can tell."""

_PRIVILEGED_FIELDS = frozenset(
    {"cache_salt", "kv_transfer_params", "ec_transfer_params", "prompt_embeds", "media_io_kwargs",
     "vllm_xargs", "mm_processor_kwargs", "custom_logit_processor", "lora_path", "session_params"}
)  # fmt: skip
"""What reaches into a worker: given on only where the operator lets clients have it."""

_SPECIAL_PATHS: Final = frozenset(
    {"sampling.seed", "sampling.do_sample", "sampling.logit_bias", "sampling.beam_width",
     "stopping.stop", "stopping.overflow", "logprobs.top", "logprobs.prompt", "output",
     "messages", "labels", "stream", "want.token_ids"}
)  # fmt: skip
"""Paths of which the rows for completions do not tell all that is written, or is lost."""


def uses_chat_endpoint(request: GenerationRequest) -> bool:
    """Whether the worker's chat endpoint answers it."""
    return request.kind == "chat" or request.templating.mode == "server"


class RequestWriter:
    """Writes requests for the workers of one profile, under one path prefix."""

    def __init__(self, profile: WorkerProfile, prefix: str, *, powers: bool) -> None:
        self._profile = profile
        self._prefix = prefix
        self._allows_privileged = powers
        more = profile.privileged_params if powers else ()
        plain = [param for param in more if param.wire != "chat_template"]
        self._chat_params = ParamTable(*profile.chat, *more)
        self._completion_params = ParamTable(*profile.completion, *plain)
        self._embedding_params = ParamTable(*profile.embedding)
        self._generation_support = {chat: self._build_support(chat=chat) for chat in (True, False)}
        self._embedding_support = params.build_parameter_support(self._embedding_params)
        self._supports_echo = any(param.field == "echo" for param in profile.completion)
        self._supports_truncation = any(
            param.field == "stopping.truncate_prompt" for param in profile.chat
        )

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        path, body = self.write_body(request)
        return UpstreamRequest(f"{self._prefix}/{path}", _encode(body), _JSON_HEADERS)

    def write_body(self, request: Request) -> tuple[str, dict[str, Any]]:
        """The path behind the prefix, and the body's fields."""
        if isinstance(request, EmbeddingRequest):
            path, body = "embeddings", self._write_embedding(request)
        elif uses_chat_endpoint(request):
            path, body = "chat/completions", self._write_chat(request)
        else:
            path, body = "completions", self._write_completion(request)
        for name, raw in request.extra.items():
            if self.forwards_field(name):
                body.setdefault(name, raw)
        return path, body

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        if isinstance(request, EmbeddingRequest):
            found = loss.find_unsupported_parameters(
                _ignore_overflow_error(request), self._embedding_support, names, extra=True
            )
        else:
            found = self._find_generation_losses(request, names)
        if not request.extra:
            return found
        left = tuple(
            UnsupportedParameter(name, "dropped")
            for name in request.extra
            if not self.forwards_field(name)
        )
        return found + left

    def expects_echo(self, request: GenerationRequest) -> bool:
        """Whether the worker is asked to give the prompt back."""
        return bool(request.echo) and self._supports_echo and not uses_chat_endpoint(request)

    def forwards_field(self, name: str) -> bool:
        """Whether a worker is given a field that the gateway does not know."""
        if name in _KNOWN_FIELDS or name in _UNSUPPORTED_FIELDS:
            return False
        return self._allows_privileged or name not in _PRIVILEGED_FIELDS

    # --- bodies -----------------------------------------------------------------------------------

    def _write_embedding(self, request: EmbeddingRequest) -> dict[str, Any]:
        alone = len(request.inputs) == 1
        body: dict[str, Any] = {
            "model": request.model,
            "input": request.inputs[0] if alone else request.inputs,
        }
        body |= params.write_params(self._embedding_params, request.said)
        if request.encoding != "float":
            body["encoding_format"] = request.encoding
        return body | self._write_labels(request)

    def _write_chat(self, request: GenerationRequest) -> dict[str, Any]:
        messages = request.messages or _wrap_prompt(request)
        body: dict[str, Any] = {
            "model": request.model,
            "messages": write_messages(messages, self._profile.message_style),
        }
        body |= self._write_scalars(self._chat_params, request)
        choice, tools = request.tool_choice, request.tools
        if not self._profile.allowed_tools:
            choice, tools = restrict_tools(choice, tools)
        if not self._profile.custom_tools:
            tools = tuple(tool for tool in tools if tool.kind == "function")
        if tools:
            body["tools"] = write_tools(tools)
            if choice is not None:
                body["tool_choice"] = write_tool_choice(choice, tools)
        else:
            body.pop("parallel_tool_calls", None)
        if request.logprobs is not None:
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
        if _SPECIAL_PATHS.isdisjoint(request.said):
            body |= params.write_params(self._completion_params, request.said)
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

    def _write_scalars(self, table: ParamTable, request: GenerationRequest) -> dict[str, Any]:
        body = params.write_params(table, request.said)
        if (
            "max_completion_tokens" in request.given
            and "max_tokens" in body
            and uses_chat_endpoint(request)
        ):
            body["max_completion_tokens"] = body.pop("max_tokens")
        if (seed := body.get("seed")) is not None and seed >= 2**63:
            body["seed"] = seed - 2**64
        if self._profile.max_stop_strings is not None and "stop" in body:
            body["stop"] = body["stop"][: self._profile.max_stop_strings]
        if request.sampling.do_sample is False:
            body["temperature"] = 0.0
        if request.sampling.logit_bias is not None:
            body["logit_bias"] = {str(k): v for k, v in request.sampling.logit_bias.items()}
        if self._profile.beam_search and request.sampling.beam_width is not None:
            body["use_beam_search"] = True
        if self._profile.token_ids and request.want.token_ids:
            body["return_token_ids"] = True
        if self._supports_truncation and request.stopping.overflow == "truncate":
            body.setdefault("truncate_prompt_tokens", -1)
        return body

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
            options = {"include_usage": True}
            if request.want.usage == "each":
                options["continuous_usage_stats"] = True
            body |= {"stream": True, "stream_options": options}
        return body

    def _write_labels(self, request: Request) -> dict[str, Any]:
        if not request.labels:
            return {}
        labels = {n: request.labels[n] for n in self._profile.labels if n in request.labels}
        told = {
            name.removeprefix("metadata."): text
            for name, text in request.labels.items()
            if name.startswith("metadata.")
        }
        if told and "safety_identifier" in self._profile.labels:
            return {**labels, "metadata": told}
        return dict(labels)

    # --- losses -----------------------------------------------------------------------------------

    def _find_generation_losses(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        chat = uses_chat_endpoint(request)
        carries = self._generation_support[chat]
        if not chat and _SPECIAL_PATHS.isdisjoint(request.said):
            return loss.find_unsupported_parameters(request, carries, names, extra=True)
        if more := self._build_request_support(request, chat=chat):
            carries = carries | more
        found = list(
            loss.find_unsupported_parameters(
                _ignore_overflow_error(request), carries, names, extra=True
            )
        )
        stops, most = len(request.stopping.stop), self._profile.max_stop_strings
        if most is not None and stops > most:
            wire = names.get("stopping.stop", "stop")
            found.append(
                UnsupportedParameter(wire, "clamped", f"{stops} to {most}", "stopping.stop")
            )
        if chat and len(request.prompts) > 1:
            found.append(
                UnsupportedParameter(names.get("prompts", "prompt"), "dropped", path="prompts")
            )
        if request.want.token_ids and not self._profile.token_ids:
            found.append(
                UnsupportedParameter(names.get("want.token_ids", "return_token_ids"), "dropped")
            )
        custom = chat and request.tools and not self._profile.custom_tools
        if custom and any(tool.kind == "custom" for tool in request.tools):
            found.append(
                UnsupportedParameter(
                    names.get("tools", "tools"), "dropped", "custom tools", "tools"
                )
            )
        if request.messages:
            found += self._find_ignored_parts(request, names)
        return tuple(found)

    def _find_ignored_parts(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> Iterator[UnsupportedParameter]:
        """The parts of messages that the worker does not see."""
        parts = {type(part) for message in request.messages for part in message.parts}
        if unseen := [told for kind, told in self._profile.ignored_parts.items() if kind in parts]:
            where = names.get("messages", "messages")
            yield UnsupportedParameter(where, "dropped", ", ".join(unseen), "messages")
        if ReasoningPart in parts and not self._profile.message_style.includes_reasoning:
            yield UnsupportedParameter("messages", "dropped", "earlier reasoning")

    def _build_support(self, *, chat: bool) -> dict[str, ParameterSupport]:
        """What is carried of every request."""
        profile = self._profile
        most = profile.max_chat_logprobs if chat else profile.max_completion_logprobs
        low = None if most is None else 0
        carries = params.build_parameter_support(
            self._chat_params if chat else self._completion_params
        )
        carries["sampling.logit_bias"] = ParameterSupport("logit_bias")
        carries["sampling.do_sample"] = ParameterSupport("")
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
        """What is carried beside that, by this request."""
        profile = self._profile
        carries = {}
        if request.echo and not chat and request.logprobs is not None:
            carries["logprobs.prompt"] = ParameterSupport(
                "logprobs", maximum=profile.max_completion_logprobs
            )
        if self._write_output_format(
            request, takes_format=chat or profile.completion_response_format
        ):
            carries["output"] = ParameterSupport("response_format")
        if self._supports_truncation and request.stopping.overflow == "truncate":
            carries["stopping.overflow"] = ParameterSupport("truncate_prompt_tokens")
        if profile.beam_search and request.sampling.beam_width is not None:
            exact = request.sampling.beam_width == (request.n or 1)
            carries["sampling.beam_width"] = ParameterSupport(
                "use_beam_search", reason=None if exact else "approximated"
            )
        return carries


def _ignore_overflow_error(request: Any) -> Any:
    """The request without the wish to be told of an overflow, which every worker fulfils."""
    if isinstance(request, EmbeddingRequest):
        unsaid = request.overflow == "error"
        return msgspec.structs.replace(request, overflow=None) if unsaid else request
    if request.stopping.overflow != "error":
        return request
    stopping = msgspec.structs.replace(request.stopping, overflow=None)
    return msgspec.structs.replace(request, stopping=stopping)


def _wrap_prompt(request: GenerationRequest) -> tuple[Message, ...]:
    """A prompt that the worker's template shall wrap, as what a user said."""
    match request.prompts:
        case (str() as prompt,):
            return (Message("user", (TextPart(prompt),)),)
        case (_,):
            text = "Token ids can't go through a chat template."
            raise UnsupportedFeature(text, param="prompt")
        case _:
            text = "Only one prompt at a time can go through a worker's chat template."
            raise UnsupportedFeature(text, param="prompt")


def _limit_logprobs(logprobs: LogprobsOptions, most: int | None) -> int:
    top = logprobs.top
    if most is None:
        return top
    return most if top < 0 else min(top, most)
