"""The dialect itself: conversations in OpenAI's words, prompts in TGI's own."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from gateway.core import loss
from gateway.core.errors import GatewayError, Unsupported
from gateway.core.loss import Loss
from gateway.core.ports import Decoder, WireRequest
from gateway.core.types import EmbedRequest, Request
from protocols.openai.worker import is_chat
from protocols.tgi import chat, faults, generate
from protocols.tgi.decoder import GenerateDecoder
from protocols.tgi.tables import Limits

_Count = Annotated[int, Meta(ge=0)]


class _Info(Struct):
    """What ``/info`` tells; the second name of a prompt's limit is that of earlier releases."""

    max_concurrent_requests: _Count | None = None
    max_stop_sequences: _Count | None = None
    max_best_of: _Count | None = None
    max_input_tokens: _Count | None = None
    max_input_length: _Count | None = None


_read_info = msgspec.json.Decoder(_Info).decode


class TGI:
    """Hugging Face's Text Generation Inference. For workers alone: no client is answered in it.

    Conversations go to ``/v1/chat/completions``, where the server has the model's chat template;
    prompts go to ``/generate`` and ``/generate_stream``, which take more parameters and tell more
    than ``/v1/completions``. There is one model behind a URL, so prompts do not name it.
    """

    name: str = "tgi"
    profiles: ClassVar[tuple[str, ...]] = ("3",)
    model_options: ClassVar[Mapping[str, Any]] = {}
    roots: tuple[str, ...] = ("/v1", "/generate", "/generate_stream")
    """What a worker's URL is not to end with."""

    def __init__(self, profile: str | None = None) -> None:
        if profile not in (None, *self.profiles):
            known = ", ".join(self.profiles)
            raise ValueError(f"there is no profile {profile!r} of {self.name}; known: {known}")
        self.health_request = WireRequest("/health", b"", method="GET")
        self._limits: dict[str, Limits] = {}

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[Loss, ...]:
        """See ``gateway.core.ports.WorkerDialect``."""
        if isinstance(request, EmbedRequest):
            return loss.losses(request, {}, names)
        losses = chat.losses if is_chat(request) else generate.losses
        return losses(request, self._get_limits(request.model), names)

    def encode_request(self, request: Request) -> WireRequest:
        """See ``gateway.core.ports.WorkerDialect``. Raises Unsupported for embeddings."""
        if isinstance(request, EmbedRequest):
            raise Unsupported("The model's workers generate text; they give no embeddings.")
        encode = chat.encode if is_chat(request) else generate.encode
        return encode(request, self._get_limits(request.model))

    def create_decoder(self, request: Request) -> Decoder:
        """See ``gateway.core.ports.WorkerDialect``."""
        if isinstance(request, EmbedRequest):
            raise Unsupported("The model's workers generate text; they give no embeddings.")
        return chat.decoder(request) if is_chat(request) else GenerateDecoder(request)

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``gateway.core.ports.WorkerDialect``."""
        return faults.read_error(status, headers, body)

    def metadata_requests(self, model: str) -> Sequence[WireRequest]:
        """See ``gateway.core.ports.Learning``."""
        del model
        return (WireRequest("/info", b"", method="GET"),)

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``gateway.core.ports.Learning``."""
        try:
            told = _read_info(answers[0] or b"")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
            return None
        silent = Limits()
        self._limits[model] = Limits(
            max_stop_strings=silent.max_stop_strings
            if told.max_stop_sequences is None
            else told.max_stop_sequences,
            max_best_of=told.max_best_of or silent.max_best_of,
            max_prompt_tokens=told.max_input_tokens or told.max_input_length,
        )
        return told.max_concurrent_requests or None

    def _get_limits(self, model: str) -> Limits:
        return self._limits.get(model, Limits())
