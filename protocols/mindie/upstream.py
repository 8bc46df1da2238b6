"""The internal request to a worker's request; unsupported parameters.

Text prompts go to generate, always with ``details``, which hold the finish reason. What only
completions can do (token ids, log probabilities) goes to completions, if the release has them. Chat
requests go to /v1/chat/completions, unless the gateway renders them to text. A request without a
token limit asks for the maximum: generate would stop after twenty tokens.

Source: MindIE-LLM 0695772, http_handler.cpp and single_req_infer_interface/*; for ``perf_stat`` the
published pages of 1.0.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from protocols import params
from protocols import prompt as protocols_prompt
from protocols.chat import upstream
from protocols.chat.field_keys import find_lost_keys
from protocols.core import loss
from protocols.core.errors import GatewayError
from protocols.core.interfaces import (
    PromptRenderer,
    ResponseDecoder,
    UpstreamRequest,
)
from protocols.core.json_text import JsonDecoder
from protocols.core.loss import ParameterSupport, UnsupportedParameter
from protocols.core.request import (
    GenerationRequest,
    Request,
)
from protocols.json_body import JSON_ERRORS
from protocols.mindie import errors
from protocols.mindie.decoder import SOURCE, OpenAiStyleDecoder, TextDecoder
from protocols.mindie.messages import PromptPartKeys
from protocols.mindie.params import (
    INT32_MAX,
    MindieConfig,
)
from protocols.mindie.request_adaptation import AdaptedRequest, RequestAdaptation, get_capabilities
from protocols.mindie.requests import PRIORITY_STEP

_encode = msgspec.json.Encoder().encode


ChatMode = Literal["messages", "text"]

_JSON_HEADERS = (("Content-Type", "application/json"),)
_INVALID_ID_CHARS = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_ID_LENGTH = 256
_MAX_TIMEOUT_SECONDS = 65535
_MAX_PRIORITY = 5


class _SlotCount(msgspec.Struct):
    total_slots: int


class _ServerExtensions(msgspec.Struct):
    max_iter_times: int


class _ServerMetadata(msgspec.Struct):
    extensions: _ServerExtensions


_decode_slot_count = JsonDecoder(_SlotCount).decode
_decode_server_metadata = JsonDecoder(_ServerMetadata).decode


class MindieUpstream:
    """Encodes requests for one kind of worker, and creates the decoders of their responses."""

    def __init__(
        self, setup: MindieConfig, chats: ChatMode, renderer: PromptRenderer | None
    ) -> None:
        self._config = setup
        self._capabilities = get_capabilities(setup)
        self._chat_mode = chats
        self._renderer = renderer
        self._openai_writer = upstream.RequestWriter(
            self._capabilities.openai_profile, "/v1", powers=False, source=SOURCE
        )
        self._parameter_support = {
            **params.build_parameter_support(self._capabilities.text_params),
            **protocols_prompt.build_prompt_support(renderer),
            "priority": ParameterSupport("priority"),
        }
        self._max_tokens_by_model: dict[str, int] = {}

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request = protocols_prompt.require_generation(request)
        name = _build_request_id(request)
        if not self._uses_openai_endpoint(request):
            return self._encode_generate(request, name)
        wire = self._openai_writer.encode_request(self._adapt_request(request, {})[0])
        headers = (*wire.headers, ("req-id", name)) if name else wire.headers
        return UpstreamRequest(wire.path, wire.body, headers)

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request = protocols_prompt.require_generation(request)
        adapted, unsupported = self._adapt_request(request, names)
        if self._uses_openai_endpoint(request):
            return unsupported + self._openai_writer.unsupported_parameters(adapted, names)
        unsupported += protocols_prompt.find_prompt_losses(adapted, self._renderer, names)
        body = {"text_input": self._write_prompt(adapted)}
        unsupported += find_lost_keys(body, adapted.field_extra)
        return unsupported + loss.find_unsupported_parameters(
            adapted, self._parameter_support, names, extra=True
        )

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request = protocols_prompt.require_generation(request)
        early = self._capabilities.early
        if self._uses_openai_endpoint(request):
            return OpenAiStyleDecoder(self._adapt_request(request, {})[0], early=early)
        return TextDecoder(request, early=early)

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return errors.read_worker_error(status, headers, body)

    def encode_cancel(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.SupportsCancel``."""
        body = _encode({"id": _build_request_id(request)})
        return UpstreamRequest(f"{_build_model_path(request.model)}/stopInfer", body, _JSON_HEADERS)

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        """See ``protocols.core.interfaces.ModelMetadataReader``."""
        slots = UpstreamRequest(f"{_build_model_path(model)}/getSlotCount", b"", method="GET")
        return slots, UpstreamRequest("/v2", b"", method="GET")

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``protocols.core.interfaces.ModelMetadataReader``. Reads a model's token limit."""
        slots, server = (*answers, None, None)[:2]
        try:
            max_tokens = _decode_server_metadata(server or b"").extensions.max_iter_times
            if 0 < max_tokens <= INT32_MAX:
                self._max_tokens_by_model[model] = max_tokens
        except JSON_ERRORS:
            pass
        try:
            total = _decode_slot_count(slots or b"").total_slots
        except JSON_ERRORS:
            return None
        return total if total > 0 else None

    # --- choice of the endpoint -------------------------------------------------------------------

    def _uses_openai_endpoint(self, request: GenerationRequest) -> bool:
        """Whether the request goes to an OpenAI-style endpoint."""
        if upstream.uses_chat_endpoint(request):
            return self._chat_mode == "messages"
        has_ids = any(not isinstance(prompt, str) for prompt in request.prompts[:1])
        return self._capabilities.has_completions and (has_ids or request.logprobs is not None)

    def _adapt_request(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> AdaptedRequest:
        max_tokens = self._get_max_tokens(request.model)
        adaptation = RequestAdaptation(request, self._capabilities, names, max_tokens)
        if self._uses_openai_endpoint(request):
            return adaptation.adapt_for_openai()
        return adaptation.adapt_for_generate()

    def _get_max_tokens(self, model: str) -> int | None:
        """Return the maximum number of tokens of a response, if it is known."""
        limits = (self._config.max_iter_times, self._max_tokens_by_model.get(model))
        return min((limit for limit in limits if limit is not None), default=None)

    # --- generate ---------------------------------------------------------------------------------

    def _encode_generate(self, request: GenerationRequest, name: str) -> UpstreamRequest:
        adapted, _ = self._adapt_request(request, {})
        body: dict[str, Any] = {"id": name} if name else {}
        body["text_input"] = self._write_prompt(adapted)
        body["parameters"] = self._write_parameters(adapted)
        find_lost_keys(body, adapted.field_extra)
        endpoint = "generate_stream" if request.stream else "generate"
        path = f"{_build_model_path(request.model)}/{endpoint}"
        return UpstreamRequest(path, _encode(body), _JSON_HEADERS)

    def _write_prompt(self, request: GenerationRequest) -> str | list[dict[str, Any]]:
        """The prompt; in the client's parts if one of them has unknown keys."""
        prompt = protocols_prompt.build_prompt(request, self._renderer)
        for extra in () if self._capabilities.early else request.field_extra:
            if isinstance(extra, PromptPartKeys) and "".join(extra.texts) == prompt:
                return [{"type": "text", "text": text} for text in extra.texts]
        return prompt

    def _write_parameters(self, request: GenerationRequest) -> dict[str, Any]:
        table = self._capabilities.text_params
        parameters = {"details": True, **params.write_params(table, request.set_fields)}
        parameters.setdefault("max_new_tokens", self._get_max_tokens(request.model) or INT32_MAX)
        if request.priority is not None:
            step = min(max(request.priority, 0) // PRIORITY_STEP, _MAX_PRIORITY - 1)
            parameters["priority"] = step + 1
        if request.timeout is not None:
            parameters["timeout"] = math.ceil(min(max(request.timeout, 1.0), _MAX_TIMEOUT_SECONDS))
        if request.response_options.timing:
            parameters["perf_stat"] = True
        for name, raw in request.extra.items():
            parameters.setdefault(name, raw)
        return parameters


def _build_model_path(name: str) -> str:
    return f"/v2/models/{quote(name, safe='')}"


def _build_request_id(request: Request) -> str:
    """Return a request id that the worker accepts; "" if there is none."""
    return _INVALID_ID_CHARS.sub("_", request.client_id or "")[:_MAX_ID_LENGTH]
