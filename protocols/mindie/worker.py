"""The requests for a server, and what they can't carry.

Text goes to generate, which always tells details: the finish reason stands among them. What only
completions can do (token ids, log probabilities) goes there, where the release has them, and a
conversation to /v1/chat/completions, unless it is to be made into text here. An unsaid length is
asked for as the longest there is: generate would stop after twenty tokens.

Source: MindIE-LLM 0695772, http_handler.cpp and single_req_infer_interface/*; for ``perf_stat`` the
published pages of 1.0.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal
from urllib.parse import quote

import msgspec

from protocols import params, rendering
from protocols.core import loss
from protocols.core.errors import UnsupportedFeature
from protocols.core.interfaces import PromptRenderer, ResponseDecoder, UpstreamRequest
from protocols.core.loss import ParameterSupport, UnsupportedParameter
from protocols.core.request import EmbeddingRequest, GenerationRequest, Request
from protocols.mindie.decoder import OpenAiStyleDecoder, TextDecoder
from protocols.mindie.fitting import AdaptedRequest, adapt_generate_request, adapt_openai_request
from protocols.mindie.profiles import MindieConfig
from protocols.mindie.requests import PRIORITY_STEP
from protocols.mindie.tables import INT32_MAX
from protocols.mindie.takes import get_capabilities
from protocols.openai import worker as openai

ChatMode = Literal["messages", "text"]

HEALTH_REQUEST: Final = UpstreamRequest("/v2/health/ready", b"", method="GET")

_encode = msgspec.json.Encoder().encode
_JSON_HEADERS = (("Content-Type", "application/json"),)
_INVALID_ID_CHARS = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_ID_LENGTH = 256
_MAX_TIMEOUT_SECONDS = 65535
"""Seconds."""
_MAX_PRIORITY = 5


class _SlotCount(msgspec.Struct):
    total_slots: int


class _ServerExtensions(msgspec.Struct):
    max_iter_times: int


class _ServerMetadata(msgspec.Struct):
    extensions: _ServerExtensions


_decode_slot_count = msgspec.json.Decoder(_SlotCount).decode
_decode_server_metadata = msgspec.json.Decoder(_ServerMetadata).decode


class MindieUpstream:
    """Writes requests for one kind of server, and knows what reads the answers."""

    def __init__(
        self, setup: MindieConfig, chats: ChatMode, renderer: PromptRenderer | None
    ) -> None:
        self._config = setup
        self._capabilities = get_capabilities(setup)
        self._chat_mode = chats
        self._renderer = renderer
        self._openai_writer = openai.RequestWriter(
            self._capabilities.openai_profile, "/v1", powers=False
        )
        self._parameter_support = {
            **params.build_parameter_support(self._capabilities.text_params),
            **rendering.build_prompt_support(renderer),
            "priority": ParameterSupport("priority"),
        }
        self._max_tokens_by_model: dict[str, int] = {}

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request = _require_generation(request)
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
        request = _require_generation(request)
        fitted, lost = self._adapt_request(request, names)
        if self._uses_openai_endpoint(request):
            return lost + self._openai_writer.unsupported_parameters(fitted, names)
        if request.want.token_ids:
            lost += (
                UnsupportedParameter(names.get("want.token_ids", "return_token_ids"), "dropped"),
            )
        lost += rendering.find_prompt_losses(fitted, self._renderer, names)
        return lost + loss.find_unsupported_parameters(
            fitted, self._parameter_support, names, extra=True
        )

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request = _require_generation(request)
        early = self._capabilities.early
        if self._uses_openai_endpoint(request):
            return OpenAiStyleDecoder(self._adapt_request(request, {})[0], early=early)
        return TextDecoder(request, early=early)

    def encode_cancel(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.SupportsCancel``."""
        body = _encode({"id": _build_request_id(request)})
        return UpstreamRequest(f"{_build_model_path(request.model)}/stopInfer", body, _JSON_HEADERS)

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        """See ``protocols.core.interfaces.ModelMetadataReader``."""
        slots = UpstreamRequest(f"{_build_model_path(model)}/getSlotCount", b"", method="GET")
        return slots, UpstreamRequest("/v2", b"", method="GET")

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``protocols.core.interfaces.ModelMetadataReader``. Also how long an answer may be."""
        slots, server = (*answers, None, None)[:2]
        try:
            longest = _decode_server_metadata(server or b"").extensions.max_iter_times
            if 0 < longest <= INT32_MAX:
                self._max_tokens_by_model[model] = longest
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        try:
            total = _decode_slot_count(slots or b"").total_slots
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return total if total > 0 else None

    # --- which way --------------------------------------------------------------------------------

    def _uses_openai_endpoint(self, request: GenerationRequest) -> bool:
        """Whether it goes to an endpoint in OpenAI's manner."""
        if openai.uses_chat_endpoint(request):
            return self._chat_mode == "messages"
        ids = any(not isinstance(prompt, str) for prompt in request.prompts[:1])
        return self._capabilities.has_completions and (ids or request.logprobs is not None)

    def _adapt_request(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> AdaptedRequest:
        fit = (
            adapt_openai_request if self._uses_openai_endpoint(request) else adapt_generate_request
        )
        return fit(request, self._capabilities, names, self._get_max_tokens(request.model))

    def _get_max_tokens(self, model: str) -> int | None:
        """The most tokens that an answer may have, where it is known."""
        known = (self._config.max_iter_times, self._max_tokens_by_model.get(model))
        return min((most for most in known if most is not None), default=None)

    # --- generate ---------------------------------------------------------------------------------

    def _encode_generate(self, request: GenerationRequest, name: str) -> UpstreamRequest:
        fitted, _ = self._adapt_request(request, {})
        body: dict[str, Any] = {"id": name} if name else {}
        body["text_input"] = rendering.build_prompt(fitted, self._renderer)
        body["parameters"] = self._write_parameters(fitted)
        way = "generate_stream" if request.stream else "generate"
        return UpstreamRequest(
            f"{_build_model_path(request.model)}/{way}", _encode(body), _JSON_HEADERS
        )

    def _write_parameters(self, request: GenerationRequest) -> dict[str, Any]:
        written = {
            "details": True,
            **params.write_params(self._capabilities.text_params, request.said),
        }
        written.setdefault("max_new_tokens", self._get_max_tokens(request.model) or INT32_MAX)
        if request.priority is not None:
            step = min(max(request.priority, 0) // PRIORITY_STEP, _MAX_PRIORITY - 1)
            written["priority"] = step + 1
        if request.timeout is not None:
            written["timeout"] = math.ceil(min(max(request.timeout, 1.0), _MAX_TIMEOUT_SECONDS))
        if request.want.timing:
            written["perf_stat"] = True
        for field, raw in request.extra.items():
            written.setdefault(field, raw)
        return written


def _require_generation(request: Request) -> GenerationRequest:
    if isinstance(request, EmbeddingRequest):
        raise UnsupportedFeature("The model's workers make no embeddings.")
    return request


def _build_model_path(name: str) -> str:
    return f"/v2/models/{quote(name, safe='')}"


def _build_request_id(request: Request) -> str:
    """The request's id, as a server takes one; "" where it has none."""
    return _INVALID_ID_CHARS.sub("_", request.client_id or "")[:_MAX_ID_LENGTH]
