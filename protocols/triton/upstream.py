"""The internal request to a worker's request; unsupported parameters."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

import msgspec

from protocols import prompt as protocols_prompt
from protocols.core.errors import GatewayError
from protocols.core.interfaces import PromptRenderer, ResponseDecoder, UpstreamRequest
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import GenerationRequest, Request
from protocols.triton import decoder, errors, model_config
from protocols.triton.decoder import GenerateDecoder
from protocols.triton.formats import JSON_HEADERS
from protocols.triton.model_config import PACKED_PARAMETERS, ModelAdapter, WorkerModel
from protocols.triton.params import GUIDE_PARAM_NAMES, PROMPT_INPUT, TritonProfile

_encode = msgspec.json.Encoder().encode
_VERSIONED_MODEL: Final = re.compile(r"([^/]+)(/versions/[0-9]+)")
"""A target's model name with a version."""
_MAX_REMEMBERED_MODELS: Final = 1024
"""The maximum number of models whose metadata is cached."""


class TritonUpstream:
    """Encodes requests for the workers of one profile, and caches the metadata of their models.

    ``fields``: the names that these workers' models use for the profile's names. ``max_tokens``
    is for a model that requires it if the client sent none.
    """

    def __init__(
        self,
        profile: TritonProfile,
        *,
        fields: Mapping[str, str],
        max_tokens: int,
        renderer: PromptRenderer | None,
    ) -> None:
        _check_fields(fields, profile)
        self._profile = profile
        self._model_field_names = fields
        self._output_names = decoder.map_output_names(fields)
        self._profile_field_names = {own: name for name, own in fields.items()}
        self._max_tokens = max_tokens
        self._renderer = renderer
        self._default_adapter = self._build_adapter(model_config.build_model_from_profile(profile))
        self._adapters: dict[str, ModelAdapter] = {}

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        """See ``protocols.core.interfaces.ModelMetadataReader``. Requests the configuration."""
        return (UpstreamRequest(f"{build_model_path(model)}/config", b"", method="GET"),)

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``protocols.core.interfaces.ModelMetadataReader``. Returns no request limit."""
        has_room = model in self._adapters or len(self._adapters) < _MAX_REMEMBERED_MODELS
        for answer in filter(None, answers):
            config = model_config.parse_model_config(answer, self._profile_field_names)
            if config is not None and has_room:
                self._adapters[model] = self._build_adapter(config)
        return None

    def encode_request(self, request: Request) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request, adapter = self._get_adapter(request)
        payload = adapter.build_payload(request)
        prompt = protocols_prompt.build_prompt(request, self._renderer)
        body = {PROMPT_INPUT: prompt, **payload.tensors}
        parameters = self._rename_fields(payload.parameters)
        if adapter.packs_parameters:
            # Even if empty, it keeps the model from reading the other fields as parameters.
            body[PACKED_PARAMETERS] = _encode(parameters).decode()
        elif parameters:
            body["parameters"] = parameters
        endpoint = "generate_stream" if adapter.uses_events(request) else "generate"
        path = f"{build_model_path(request.model)}/{endpoint}"
        return UpstreamRequest(path, _encode(self._rename_fields(body)), JSON_HEADERS)

    def unsupported_parameters(
        self, request: Request, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request, adapter = self._get_adapter(request)
        unsupported = adapter.find_unsupported_parameters(request, names)
        unsupported += protocols_prompt.find_prompt_losses(request, self._renderer, names)
        if len(request.prompts) > 1:
            wire = names.get("prompts", "prompt")
            unsupported.append(UnsupportedParameter(wire, "dropped", path="prompts"))
        if request.stream and (request.n or 1) > 1 and all(p.path != "n" for p in unsupported):
            # Some releases send deltas of several choices without the choice's index.
            unsupported.append(UnsupportedParameter(names.get("n", "n"), "dropped", path="n"))
        if request.stream and not adapter.is_streaming(request):
            wire, detail = names.get("stream", "stream"), "the model answers in one piece"
            unsupported.append(UnsupportedParameter(wire, "approximated", detail, "stream"))
        return tuple(unsupported)

    def create_decoder(self, request: Request) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        request, adapter = self._get_adapter(request)
        prompt = None
        if adapter.must_cut_prompt(request):
            prompt = protocols_prompt.build_prompt(request, self._renderer)
        return GenerateDecoder(request, self._output_names, adapter, prompt)

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return errors.read_worker_error(status, headers, body)

    def _rename_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """Rename values to the model's own names."""
        if not self._model_field_names:
            return values
        return {self._model_field_names.get(name, name): value for name, value in values.items()}

    def _build_adapter(self, model: WorkerModel) -> ModelAdapter:
        prompt_support = protocols_prompt.build_prompt_support(self._renderer)
        return ModelAdapter(self._profile, model, self._max_tokens, prompt_support)

    def _get_adapter(self, request: Request) -> tuple[GenerationRequest, ModelAdapter]:
        request = protocols_prompt.require_generation(request)
        return request, self._adapters.get(request.model, self._default_adapter)


@lru_cache(maxsize=_MAX_REMEMBERED_MODELS)
def build_model_path(model: str) -> str:
    """Build the model's path. Its name is one segment, with an optional version at the end."""
    name, version = _split_version(model)
    return f"/v2/models/{quote(name, safe='')}{version}"


def get_model_name(model: str) -> str:
    """Return the model name without a version."""
    return _split_version(model)[0]


def _split_version(model: str) -> tuple[str, str]:
    versioned = _VERSIONED_MODEL.fullmatch(model)
    return (versioned[1], versioned[2]) if versioned else (model, "")


def _check_fields(fields: Mapping[str, str], profile: TritonProfile) -> None:
    known = {
        *profile.inputs, *(one.name for one in profile.outputs), *profile.stream_flags,
        *(row.wire for row in profile.parameters), *GUIDE_PARAM_NAMES[profile.guide_style],
    }  # fmt: skip
    if unknown := fields.keys() - known:
        names, listed = ", ".join(sorted(unknown)), ", ".join(sorted(known))
        raise ValueError(f"the fields of triton's {profile.name} have no {names}; known: {listed}")
