"""The dialect: its paths, and who reads and writes what on each."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec import structs

from gateway.core.catalog import Catalog, ModelInfo
from gateway.core.errors import GatewayError, InternalError, PathNotFound
from gateway.core.loss import Loss
from gateway.core.ports import (
    About,
    Call,
    Decoder,
    Description,
    Dialect,
    Encoder,
    Endpoint,
    Envelope,
    Relay,
    Renderer,
    Reply,
    WireRequest,
)
from gateway.core.types import GenerateRequest, Request
from protocols import params
from protocols.triton import (
    described,
    failures,
    faults,
    generate,
    guided,
    infer,
    meaning,
    refusal,
    relay,
)
from protocols.triton.answer import GenerateEncoder
from protocols.triton.infer_answer import InferEncoder
from protocols.triton.meaning import Prompts
from protocols.triton.models import Models
from protocols.triton.refusal import Status
from protocols.triton.vocabulary import PROFILES, Profile
from protocols.triton.worker import Writer

_MODEL = "/v2/models/{model}"
_VERSION = f"{_MODEL}/versions/{{version}}"
_LARGEST_VERSION = 2**63 - 1


def _inform(method: str, path: str, variant: str, *, open_: bool = False) -> Endpoint:
    return Endpoint(method, path, "inform", variant, open_, strict_slash=True)


def _of_model(root: str) -> tuple[Endpoint, ...]:
    return (
        Endpoint("POST", f"{root}/generate", operation="generate", strict_slash=True),
        Endpoint("POST", f"{root}/generate_stream", operation="generate_stream", strict_slash=True),
        Endpoint("POST", f"{root}/infer", operation="infer", strict_slash=True),
        _inform("GET", root, "model"),
        _inform("GET", f"{root}/ready", "model_ready"),
        _inform("GET", f"{root}/config", "config"),
        _inform("GET", f"{root}/stats", "model_stats"),
    )


class Triton:
    """Triton Inference Server's HTTP protocol: generate, generate_stream, and infer for text.

    ``profile`` says which family of models its clients know; ``status`` whether failures look as
    the original's do (``strict``) or as HTTP means them (``sane``); ``prompts`` whether a prompt
    goes to the model as it is (``raw``), or as what a user said to it (``chat``).

    Towards workers ``profile`` says which family their models are of, and ``fields`` by which names
    of their own these go, such as ``{text_input: PROMPT}``. ``max_tokens`` is what a model is told
    that insists on it, where the client says nothing. ``renderer`` makes prompts of conversations.
    A worker's model is ``NAME``, or ``NAME/versions/2`` where it is to be that version.
    """

    profiles: ClassVar[tuple[str, ...]] = tuple(PROFILES)
    model_options: ClassVar[Mapping[str, Any]] = {}
    name: str = "triton"
    path_prefixes: tuple[str, ...] = ("/v2",)
    endpoints: tuple[Endpoint, ...] = (
        _inform("GET", "/v2", "server"),
        _inform("GET", "/v2/health/live", "live", open_=True),
        _inform("GET", "/v2/health/ready", "ready", open_=True),
        _inform("GET", "/v2/models/stats", "stats"),
        *_of_model(_MODEL),
        *_of_model(_VERSION),
        _inform("POST", "/v2/repository/index", "index"),
        _inform("POST", "/v2/repository/models/{model}/load", "load"),
        _inform("POST", "/v2/repository/models/{model}/unload", "unload"),
        _inform("POST", "/v2/repository/{repository}/index", "index"),
        _inform("POST", "/v2/repository/{repository}/models/{model}/load", "elsewhere"),
        _inform("POST", "/v2/repository/{repository}/models/{model}/unload", "elsewhere"),
        _inform("GET", "/v2/systemsharedmemory/status", "memory"),
        _inform("GET", "/v2/cudasharedmemory/status", "memory"),
    )

    def __init__(
        self,
        profile: str | None = None,
        *,
        status: Status = "strict",
        prompts: Prompts = "raw",
        fields: Mapping[str, str] | None = None,
        max_tokens: int = 512,
        renderer: Renderer | None = None,
    ) -> None:
        name = profile or self.profiles[0]
        if name not in PROFILES:
            known = ", ".join(self.profiles)
            raise ValueError(f"there is no profile {name!r} of triton; there are {known}")
        if status not in {"strict", "sane"}:
            raise ValueError(f"the status of triton is strict or sane, not {status!r}")
        if prompts not in meaning.MODES:
            raise ValueError(f"the prompts of triton are raw or chat, not {prompts!r}")
        self._profile = PROFILES[name]
        self._status_mode: Status = status
        self._templating_mode = meaning.MODES[prompts]
        self._has_custom_fields = bool(fields)
        self._info_handler = Models(self._profile, status)
        generating = ("generate", "generate_stream", "infer")
        self._upstream = Writer(
            self._profile, fields=fields or {}, max_tokens=max_tokens, renderer=renderer
        )
        self._field_names = {
            streamed: _names(self._profile, streamed=streamed) for streamed in (False, True)
        }
        self.health_request = WireRequest("/v2/health/ready", b"", method="GET")
        self.param_tables: Mapping[str, tuple[params.Param, ...]] = dict.fromkeys(
            generating, self._profile.parameters
        )

    def peek(self, call: Call) -> Envelope:
        """The path names the model; whether generate_stream streams, the body says.

        Raises PathNotFound and InvalidParameter for a version that is none.
        """
        stream = generate.streams(call, self._profile)
        return Envelope(call.path_params["model"], _version(call), stream)

    def decode_request(self, call: Call, model: ModelInfo | None = None) -> Request:
        """The request. Raises Malformed, InvalidParameter and Unsupported."""
        del model
        reader = infer if call.endpoint.operation == "infer" else generate
        sent = reader.read(call, self._profile)
        stream = generate.streamed(call, self._profile, flag=sent.streaming)
        return meaning.request(sent, self._profile, self._templating_mode, stream=stream)

    def create_encoder(self, call: Call, request: Request, about: About) -> Encoder:
        """What writes the answer."""
        if not isinstance(request, GenerateRequest):
            raise InternalError("there is no answer to this kind of request")
        if call.endpoint.operation == "infer":
            return InferEncoder(request, about, self._profile, infer.wishes(call))
        framed = call.endpoint.operation == "generate_stream"
        return GenerateEncoder(request, about, self._profile, framed=framed)

    def encode_error(self, error: GatewayError, call: Call | None) -> Reply:
        """The error as this protocol tells it."""
        return refusal.refuse(error, call, self._status_mode)

    def handle_info_request(self, call: Call, catalog: Catalog) -> Reply:
        """What the server says of itself and its models. Raises ClientError."""
        version = _version(call)
        if version is not None:
            call = _with_version(call, version)
        return self._info_handler.handle_request(call, catalog)

    def field_names(self, call: Call) -> Mapping[str, str]:
        """The profile's names. A stream never starts with the prompt."""
        return self._field_names[call.endpoint.operation == "generate_stream"]

    def openapi_fragment(self) -> Description:
        """What generate and generate_stream take and answer."""
        return described.describe(self._profile, self._status_mode)

    # --- towards workers --------------------------------------------------------------------------

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[Loss, ...]:
        """See ``gateway.core.ports.WorkerDialect``. Raises Unsupported for vectors."""
        return self._upstream.unsupported_parameters(request, names)

    def encode_request(self, request: Request) -> WireRequest:
        """See ``gateway.core.ports.WorkerDialect``. Raises Unsupported for vectors."""
        return self._upstream.encode_request(request)

    def prepare_passthrough(self, client: Dialect, call: Call, about: About) -> Relay | None:
        """See ``gateway.core.ports.Relaying``.

        Any body of generate and generate_stream is passed on where client and worker know the same
        models: what a model takes, and what is wrong with a body, the server says best.
        """
        alike = isinstance(client, Triton) and client._can_pass_to(self._profile)  # noqa: SLF001
        return (
            relay.relay(call, about, self._profile)
            if alike and not self._has_custom_fields
            else None
        )

    def _can_pass_to(self, profile: Profile) -> bool:
        return self._profile is profile and self._templating_mode == meaning.MODES["raw"]

    def create_decoder(self, request: Request) -> Decoder:
        """See ``gateway.core.ports.WorkerDialect``."""
        return self._upstream.create_decoder(request)

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``gateway.core.ports.WorkerDialect``."""
        return failures.read_error(status, headers, body)

    def metadata_requests(self, model: str) -> Sequence[WireRequest]:
        """See ``gateway.core.ports.Learning``: one for the model's configuration."""
        return (self._upstream.build_config_request(model),)

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``gateway.core.ports.Learning``. A configuration tells no number of requests."""
        for answer in answers:
            if answer is not None:
                self._upstream.load_config(model, answer)
        return None


def _names(profile: Profile, *, streamed: bool) -> Mapping[str, str]:
    names = params.names(profile.parameters)
    if profile.exclude_prompt_flags and not streamed:
        names["echo"] = profile.exclude_prompt_flags[0]
    if wires := guided.NAMES[profile.guide_style]:
        names["output"] = wires[0]
    return names


def _version(call: Call) -> str | None:
    """The version without leading zeros. What is no number is no path of ours."""
    if "version" not in call.path_params:
        return None
    version = call.path_params["version"]
    if not (version.isascii() and version.isdigit()):
        raise PathNotFound("a version is a number")
    if len(version.lstrip("0")) > len(str(_LARGEST_VERSION)) or int(version) > _LARGEST_VERSION:
        text = f"failed to get model version from specified version string '{version}' (details:"
        raise faults.wrong_value(
            "version", f"{text} stol), version should be an integral value > 0"
        )
    return str(int(version))


def _with_version(call: Call, version: str) -> Call:
    return structs.replace(call, path_params={**call.path_params, "version": version})
