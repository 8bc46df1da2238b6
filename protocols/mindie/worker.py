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

from gateway.core import loss
from gateway.core.errors import Unsupported
from gateway.core.loss import Carry, Loss
from gateway.core.ports import Decoder, Renderer, WireRequest
from gateway.core.types import EmbedRequest, GenerateRequest, Request
from protocols import params, rendering
from protocols.mindie.decoder import TalkDecoder, TextDecoder
from protocols.mindie.fitting import Fitted, fit_talk, fit_text
from protocols.mindie.profiles import Setup
from protocols.mindie.requests import PRIORITY_STEP
from protocols.mindie.tables import INT32
from protocols.mindie.takes import takes
from protocols.openai import worker as openai

Chats = Literal["messages", "text"]

PROBE: Final = WireRequest("/v2/health/ready", b"", method="GET")

_encode = msgspec.json.Encoder().encode
_JSON = (("Content-Type", "application/json"),)
_NOT_IN_ID = re.compile(r"[^a-zA-Z0-9_-]")
_LONGEST_ID = 256
_LONGEST_WAIT = 65535
"""Seconds."""
_LAST_PRIORITY = 5


class _Slots(msgspec.Struct):
    total_slots: int


class _Extensions(msgspec.Struct):
    max_iter_times: int


class _Server(msgspec.Struct):
    extensions: _Extensions


_slots = msgspec.json.Decoder(_Slots).decode
_server = msgspec.json.Decoder(_Server).decode


class Writer:
    """Writes requests for one kind of server, and knows what reads the answers."""

    def __init__(self, setup: Setup, chats: Chats, renderer: Renderer | None) -> None:
        self._config = setup
        self._capabilities = takes(setup)
        self._chat_mode = chats
        self._renderer = renderer
        self._openai_writer = openai.Writer(self._capabilities.openai_profile, "/v1", powers=False)
        self._parameter_support = {
            **params.carries(self._capabilities.text_params),
            **rendering.carries(renderer),
            "priority": Carry("priority"),
        }
        self._max_tokens_by_model: dict[str, int] = {}

    def encode_request(self, request: Request) -> WireRequest:
        """See ``gateway.core.ports.WorkerDialect``."""
        request = _generation(request)
        name = _name(request)
        if not self._uses_openai_endpoint(request):
            return self._encode_generate(request, name)
        wire = self._openai_writer.encode_request(self._adapt_request(request, {})[0])
        headers = (*wire.headers, ("req-id", name)) if name else wire.headers
        return WireRequest(wire.path, wire.body, headers)

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[Loss, ...]:
        """See ``gateway.core.ports.WorkerDialect``."""
        request = _generation(request)
        fitted, lost = self._adapt_request(request, names)
        if self._uses_openai_endpoint(request):
            return lost + self._openai_writer.unsupported_parameters(fitted, names)
        if request.want.token_ids:
            lost += (Loss(names.get("want.token_ids", "return_token_ids"), "dropped"),)
        lost += rendering.rendering_losses(fitted, self._renderer, names)
        return lost + loss.losses(fitted, self._parameter_support, names, extra=True)

    def create_decoder(self, request: Request) -> Decoder:
        """See ``gateway.core.ports.WorkerDialect``."""
        request = _generation(request)
        early = self._capabilities.early
        if self._uses_openai_endpoint(request):
            return TalkDecoder(self._adapt_request(request, {})[0], early=early)
        return TextDecoder(request, early=early)

    def encode_cancel(self, request: Request) -> WireRequest:
        """See ``gateway.core.ports.Cancelling``."""
        body = _encode({"id": _name(request)})
        return WireRequest(f"{_model(request.model)}/stopInfer", body, _JSON)

    def metadata_requests(self, model: str) -> Sequence[WireRequest]:
        """See ``gateway.core.ports.Learning``."""
        slots = WireRequest(f"{_model(model)}/getSlotCount", b"", method="GET")
        return slots, WireRequest("/v2", b"", method="GET")

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``gateway.core.ports.Learning``. Also how long an answer may be."""
        slots, server = (*answers, None, None)[:2]
        try:
            longest = _server(server or b"").extensions.max_iter_times
            if 0 < longest <= INT32:
                self._max_tokens_by_model[model] = longest
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        try:
            total = _slots(slots or b"").total_slots
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return total if total > 0 else None

    # --- which way --------------------------------------------------------------------------------

    def _uses_openai_endpoint(self, request: GenerateRequest) -> bool:
        """Whether it goes to an endpoint in OpenAI's manner."""
        if openai.is_chat(request):
            return self._chat_mode == "messages"
        ids = any(not isinstance(prompt, str) for prompt in request.prompts[:1])
        return self._capabilities.has_completions and (ids or request.logprobs is not None)

    def _adapt_request(self, request: GenerateRequest, names: Mapping[str, str]) -> Fitted:
        fit = fit_talk if self._uses_openai_endpoint(request) else fit_text
        return fit(request, self._capabilities, names, self._get_max_tokens(request.model))

    def _get_max_tokens(self, model: str) -> int | None:
        """The most tokens that an answer may have, where it is known."""
        known = (self._config.max_iter_times, self._max_tokens_by_model.get(model))
        return min((most for most in known if most is not None), default=None)

    # --- generate ---------------------------------------------------------------------------------

    def _encode_generate(self, request: GenerateRequest, name: str) -> WireRequest:
        fitted, _ = self._adapt_request(request, {})
        body: dict[str, Any] = {"id": name} if name else {}
        body["text_input"] = rendering.prompt_of(fitted, self._renderer)
        body["parameters"] = self._write_parameters(fitted)
        way = "generate_stream" if request.stream else "generate"
        return WireRequest(f"{_model(request.model)}/{way}", _encode(body), _JSON)

    def _write_parameters(self, request: GenerateRequest) -> dict[str, Any]:
        written = {"details": True, **params.write(self._capabilities.text_params, request.said)}
        written.setdefault("max_new_tokens", self._get_max_tokens(request.model) or INT32)
        if request.priority is not None:
            step = min(max(request.priority, 0) // PRIORITY_STEP, _LAST_PRIORITY - 1)
            written["priority"] = step + 1
        if request.timeout is not None:
            written["timeout"] = math.ceil(min(max(request.timeout, 1.0), _LONGEST_WAIT))
        if request.want.timing:
            written["perf_stat"] = True
        for field, raw in request.extra.items():
            written.setdefault(field, raw)
        return written


def _generation(request: Request) -> GenerateRequest:
    if isinstance(request, EmbedRequest):
        raise Unsupported("The model's workers make no embeddings.")
    return request


def _model(name: str) -> str:
    return f"/v2/models/{quote(name, safe='')}"


def _name(request: Request) -> str:
    """The request's id, as a server takes one; "" where it has none."""
    return _NOT_IN_ID.sub("_", request.client_id or "")[:_LONGEST_ID]
