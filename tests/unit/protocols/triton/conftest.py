"""A Triton client without a socket, with the models of the conformance cases."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from backends.interfaces import Deadline, RequestContext, ignore_memory
from gateway.emulation.prompt_echo import strip_echo_and_suffix
from protocols.core.aggregate import ResponseAccumulator
from protocols.core.catalog import ModelInfo, VersionInfo
from protocols.core.errors import GatewayError, ModelNotFound, VersionNotFound, WorkerFailed
from protocols.core.events import ChoiceEnd, Event, StreamEnd, StreamStart, TextDelta, Usage
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.triton.endpoints import Triton
from tests.support.path_routers import get_path_router

READY = VersionInfo("1", "m", 100)
MODELS = (
    ModelInfo("vllm_like", (READY,)),
    ModelInfo("trt_like", (READY,)),
    ModelInfo("named", (VersionInfo("blue", "m", 100),)),
    ModelInfo("asleep", (VersionInfo("1", "m", 100, ready=False),)),
)


class ClientResponse(Struct):
    """A response."""

    status: int
    kind: str
    body: bytes
    headers: dict[str, str]

    @property
    def error(self) -> Any:
        return msgspec.json.decode(self.body.removeprefix(b"data: "))["error"]


class Listing:
    """A model catalog."""

    ready = True

    def list_models(self) -> Sequence[ModelInfo]:
        return MODELS

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        for one in MODELS:
            if one.name == model:
                if version is None or any(v.name == version for v in one.versions):
                    return one
                raise VersionNotFound("no such version", model=model, version=version)
        raise ModelNotFound("no such model", model=model)


class Client:
    """Sends requests; the response is " w0", " w1" ..., ``max_tokens`` words, by default 3.

    Further keys of the request control the model: ``fail_at`` is the number of the word at which it
    fails.
    """

    def __init__(self, profile: str | None = None, **options: Any) -> None:
        self.adapter = Triton(profile, **options)
        self.catalog = Listing()
        self._paths = get_path_router(self.adapter)

    def call(
        self, path: str, body: Any = b"", headers: Mapping[str, str] | None = None, *, method: str
    ) -> ClientRequest:
        match = self._paths.find_endpoint(method, path)
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return ClientRequest(match.endpoint, match.params, headers or {}, "", data, path)

    def decode(self, body: Any, variant: str = "generate", model: str = "vllm_like") -> Any:
        return self.adapter.decode_request(
            self.call(f"/v2/models/{model}/{variant}", body, method="POST")
        )

    def get(self, path: str) -> ClientResponse:
        return self._ask("GET", path, b"", None)

    def post(
        self, path: str, body: Any = b"", headers: Mapping[str, str] | None = None
    ) -> ClientResponse:
        return self._ask("POST", path, body, headers)

    def ask(self, method: str, path: str, body: Any = b"") -> ClientResponse:
        return self._ask(method, path, body, None)

    def _ask(
        self, method: str, path: str, body: Any, headers: Mapping[str, str] | None
    ) -> ClientResponse:
        call = None
        try:
            call = self.call(path, body, headers, method=method)
            if call.endpoint.task == "inform":
                reply = self.adapter.handle_info_request(call, self.catalog)
                return ClientResponse(
                    reply.status, _kind(reply.headers), reply.body, dict(reply.headers)
                )
            return self._generate(call)
        except GatewayError as error:
            reply = self.adapter.encode_error(error, call)
            return ClientResponse(
                reply.status, _kind(reply.headers), reply.body, dict(reply.headers)
            )

    def _generate(self, call: ClientRequest) -> ClientResponse:
        envelope = self.adapter.read_routing_info(call)
        self.catalog.find_model(envelope.model, envelope.version)
        request = self.adapter.decode_request(call)
        assert isinstance(request, GenerationRequest)
        assert request.stream == envelope.stream, "the path to the socket is chosen by peek"
        encoder = self.adapter.create_encoder(
            call, request, build_response_context(envelope.model, envelope.version)
        )
        _, emulated = strip_echo_and_suffix(request)
        fold, stream = ResponseAccumulator(), b""
        for batch in words(request):
            try:
                if any(isinstance(event, TextDelta) and event.text == "fail" for event in batch):
                    raise WorkerFailed("engine exploded")
            except WorkerFailed as error:
                if not stream:
                    raise
                return ClientResponse(
                    200, encoder.content_type, stream + encoder.encode_error_event(error), {}
                )
            events = emulated.apply(batch) if emulated else batch
            fold.add(events)
            stream += encoder.encode_events(events) if request.stream else b""
        if request.stream:
            return ClientResponse(200, encoder.content_type, stream, dict(encoder.headers()))
        reply = encoder.encode_unary(fold.result())
        return ClientResponse(reply.status, _kind(reply.headers), reply.body, dict(reply.headers))


def words(request: GenerationRequest) -> list[list[Event]]:
    limit = request.stopping.max_tokens
    fail_at = int(bytes(request.extra.get("fail_at", b"-1")))
    batches: list[list[Event]] = [[StreamStart(4)]]
    for i in range(request.choice_count):
        for k in range(3 if limit is None else limit):
            batches.append([TextDelta("fail" if k == fail_at else f" w{k}", i)])
        batches.append([ChoiceEnd("eos" if limit is None else "length", i)])
    count = sum(isinstance(event, TextDelta) for batch in batches for event in batch)
    return [*batches, [Usage(4, count)], [StreamEnd()]]


def build_response_context(model: str, version: str | None = None) -> ResponseContext:
    context = RequestContext("r1", Deadline(lambda: 0.0, 60.0), lambda: 0.0, ignore_memory)
    served = version or next((m.versions[0].name for m in MODELS if m.name == model), "1")
    return ResponseContext("r1", 1716825108, model, served, "m", context.clock)


def _kind(headers: Sequence[tuple[str, str]]) -> str:
    return dict(headers)["Content-Type"]


@pytest.fixture
def client() -> Client:
    """A client of the default profile."""
    return Client()


@pytest.fixture
def client_of() -> Callable[..., Client]:
    """Makes clients of other profiles and options."""
    return Client


@pytest.fixture
def describe() -> Callable[..., ResponseContext]:
    return build_response_context
