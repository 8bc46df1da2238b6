"""The dialect itself: conversations in OpenAI's words, prompts in TGI's own."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from protocols.core import loss
from protocols.core.errors import GatewayError, UnsupportedFeature
from protocols.core.interfaces import ResponseDecoder, UpstreamRequest
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import EmbeddingRequest, Request
from protocols.openai.worker import uses_chat_endpoint
from protocols.tgi import chat, faults, generate
from protocols.tgi.decoder import GenerateDecoder
from protocols.tgi.tables import TgiLimits

_NonNegativeInt = Annotated[int, Meta(ge=0)]


class _ServerInfo(Struct):
    """What ``/info`` tells; the second name of a prompt's limit is that of earlier releases."""

    max_concurrent_requests: _NonNegativeInt | None = None
    max_stop_sequences: _NonNegativeInt | None = None
    max_best_of: _NonNegativeInt | None = None
    max_input_tokens: _NonNegativeInt | None = None
    max_input_length: _NonNegativeInt | None = None


_decode_info = msgspec.json.Decoder(_ServerInfo).decode


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
        self.health_request = UpstreamRequest("/health", b"", method="GET")
        self._limits: dict[str, TgiLimits] = {}

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        if isinstance(request, EmbeddingRequest):
            return loss.find_unsupported_parameters(request, {}, names)
        losses = (
            chat.find_unsupported_chat_parameters
            if uses_chat_endpoint(request)
            else generate.find_unsupported_generate_parameters
        )
        return losses(request, self._get_limits(request.model), names)

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``. Raises Unsupported for embeddings."""
        if isinstance(request, EmbeddingRequest):
            raise UnsupportedFeature("The model's workers generate text; they give no embeddings.")
        encode = (
            chat.encode_chat_request
            if uses_chat_endpoint(request)
            else generate.encode_generate_request
        )
        return encode(request, self._get_limits(request.model))

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        if isinstance(request, EmbeddingRequest):
            raise UnsupportedFeature("The model's workers generate text; they give no embeddings.")
        return (
            chat.create_chat_decoder(request)
            if uses_chat_endpoint(request)
            else GenerateDecoder(request)
        )

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return faults.read_worker_error(status, headers, body)

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        """See ``protocols.core.interfaces.ModelMetadataReader``."""
        del model
        return (UpstreamRequest("/info", b"", method="GET"),)

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``protocols.core.interfaces.ModelMetadataReader``."""
        try:
            told = _decode_info(answers[0] or b"")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
            return None
        silent = TgiLimits()
        self._limits[model] = TgiLimits(
            max_stop_strings=silent.max_stop_strings
            if told.max_stop_sequences is None
            else told.max_stop_sequences,
            max_best_of=told.max_best_of or silent.max_best_of,
            max_prompt_tokens=told.max_input_tokens or told.max_input_length,
        )
        return told.max_concurrent_requests or None

    def _get_limits(self, model: str) -> TgiLimits:
        return self._limits.get(model, TgiLimits())
