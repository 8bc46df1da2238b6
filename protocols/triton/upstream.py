"""The internal request to a worker's request; unsupported parameters."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from protocols import prompt as protocols_prompt
from protocols.core.errors import GatewayError, UnsupportedFeature, WorkerFailed
from protocols.core.interfaces import BASIC_KINDS, PromptRenderer, ResponseDecoder, UpstreamRequest
from protocols.core.loss import UnsupportedParameter, find_unsupported_parameters
from protocols.core.request import (
    NO_KEYS,
    AnyRequest,
    EmbeddingRequest,
    GenerationRequest,
    KeptKeys,
    Request,
    RequestKind,
    RerankRequest,
)
from protocols.triton import decoder, errors, model_config
from protocols.triton.decoder import GenerateDecoder
from protocols.triton.formats import JSON_HEADERS
from protocols.triton.infer import (
    InferDecoder,
    describe_inputs,
    takes_several,
    write_infer_request,
    write_unknown_keys,
)
from protocols.triton.model_config import (
    PACKED_PARAMETERS,
    ModelAdapter,
    TensorSpec,
    WorkerModel,
)
from protocols.triton.params import (
    DOCUMENTS_INPUT,
    EMBEDDING_OUTPUT,
    GUIDE_PARAM_NAMES,
    PROMPT_INPUT,
    QUERY_INPUT,
    SCORES_OUTPUT,
    TEXT_OUTPUT,
    TritonProfile,
)
from protocols.triton.tensors import flatten_values

_encode = msgspec.json.Encoder().encode
_NAME: Final = "triton"
_VERSIONED_MODEL: Final = re.compile(r"([^/]+)(/versions/[0-9]+)")
"""A target's model name with a version."""
_MAX_REMEMBERED_MODELS: Final = 1024
"""The maximum number of models whose metadata is cached."""


_TEXT_TENSORS: Final[Mapping[str, TensorSpec]] = {
    PROMPT_INPUT: TensorSpec("BYTES"),
    QUERY_INPUT: TensorSpec("BYTES", shape=(1,)),
    DOCUMENTS_INPUT: TensorSpec("BYTES", shape=(-1,)),
}
"""The inputs of a model whose worker does not describe it."""


class TritonUpstream:
    """Encodes requests for the workers of one profile, and caches the metadata of their models.

    ``fields``: the names that these workers' models use for the profile's names. ``max_tokens``
    is for a model that requires it if the client sent none.
    """

    request_kinds: frozenset[RequestKind] = BASIC_KINDS | {"rerank"}

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
        """See ``protocols.core.interfaces.ModelMetadataReader``.

        Requests the configuration, and the metadata of servers that have no configurations.
        """
        path = build_model_path(model)
        return (
            UpstreamRequest(f"{path}/config", b"", method="GET"),
            UpstreamRequest(path, b"", method="GET"),
        )

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        """See ``protocols.core.interfaces.ModelMetadataReader``. Returns no request limit."""
        has_room = model in self._adapters or len(self._adapters) < _MAX_REMEMBERED_MODELS
        parsers = (model_config.parse_model_config, model_config.parse_model_metadata)
        for parse, answer in zip(parsers, answers, strict=False):
            config = None if answer is None else parse(answer, self._profile_field_names)
            if config is not None and has_room:
                self._adapters[model] = self._build_adapter(config)
                break
        return None

    def encode_request(self, request: Request | RerankRequest) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        path, body = self._write_body(request)
        if request.field_extra:
            list(write_unknown_keys(body, request.field_extra))
        return UpstreamRequest(path, _encode(body), JSON_HEADERS)

    def get_kept_keys(self, request: AnyRequest) -> KeptKeys | None:
        """See ``protocols.core.interfaces.KeepsExtraFields``."""
        return None if request.source == _NAME else NO_KEYS

    def _write_body(self, request: Request | RerankRequest) -> tuple[str, dict[str, Any]]:
        """The path and the body, without the keys of tensors that the gateway does not know."""
        if not isinstance(request, GenerationRequest):
            return self._write_texts(request)
        request, adapter = self._get_adapter(request)
        self._check_tensors(adapter.model, request.model, (PROMPT_INPUT,), (TEXT_OUTPUT,))
        payload = adapter.build_payload(request)
        prompt = protocols_prompt.build_prompt(request, self._renderer)
        body = {PROMPT_INPUT: prompt, **payload.tensors}
        parameters = self._rename_fields(payload.parameters)
        packs = adapter.packs_parameters and adapter.model.has_generate
        if packs:
            # Even if empty, it keeps the model from reading the other fields as parameters.
            body[PACKED_PARAMETERS] = _encode(parameters).decode()
        if _uses_infer(adapter, request):
            inputs = adapter.model.inputs  # a flag of the profile may not be among them
            values = {name: flatten_values(body[name]) for name in body if name in inputs}
            outputs = (TEXT_OUTPUT, *adapter.list_reported_outputs(body))
            beside = {} if packs else parameters
            return self._write_infer(adapter.model, request.model, values, outputs, beside)
        if parameters and not packs:
            body["parameters"] = parameters
        endpoint = "generate_stream" if adapter.uses_events(request) else "generate"
        return f"{build_model_path(request.model)}/{endpoint}", self._rename_fields(body)

    def unsupported_parameters(
        self, request: Request | RerankRequest, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        unsupported = tuple(self._find_field_losses(request, names))
        if request.field_extra:
            _, body = self._write_body(request)
            lost = write_unknown_keys(body, request.field_extra)
            unsupported += tuple([UnsupportedParameter(path, "dropped") for path in lost])
        return unsupported

    def _find_field_losses(
        self, request: Request | RerankRequest, names: Mapping[str, str]
    ) -> Sequence[UnsupportedParameter]:
        if not isinstance(request, GenerationRequest):
            return self._find_infer_losses(request, names)
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
        return unsupported

    def create_decoder(self, request: Request | RerankRequest) -> ResponseDecoder:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        if not isinstance(request, GenerationRequest):
            embeds = isinstance(request, EmbeddingRequest)
            output = EMBEDDING_OUTPUT if embeds else SCORES_OUTPUT
            return InferDecoder(request, self._get_own_name(output))
        request, adapter = self._get_adapter(request)
        prompt = None
        if adapter.must_cut_prompt(request):
            prompt = protocols_prompt.build_prompt(request, self._renderer)
        decoder = GenerateDecoder(request, self._output_names, adapter, prompt)
        return InferDecoder(request, "", decoder) if _uses_infer(adapter, request) else decoder

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        return errors.read_worker_error(status, headers, body)

    def learn_from_error(self, model: str, error: GatewayError) -> bool:
        """See ``protocols.core.interfaces.LearnsFromErrors``: a model that only streams."""
        known = self._get_model(model)
        if known.streams_always or not errors.needs_stream(error):
            return False
        if model not in self._adapters and len(self._adapters) >= _MAX_REMEMBERED_MODELS:
            return False
        self._adapters[model] = self._build_adapter(
            replace(known, decoupled=True, streams_always=True)
        )
        return True

    def streams_always(self, model: str) -> bool:
        """Whether the model refuses generate."""
        return self._get_model(model).streams_always

    def _get_model(self, name: str) -> WorkerModel:
        return self._adapters.get(name, self._default_adapter).model

    def _get_own_name(self, name: str) -> str:
        return self._model_field_names.get(name, name)

    def _check_tensors(
        self, model: WorkerModel, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]
    ) -> None:
        """Raise WorkerFailed, which names the model's tensors, if these are not among them."""
        if not model.is_known:
            return
        missing = [tensor for tensor in inputs if tensor not in model.inputs]
        if model.outputs:
            missing += [tensor for tensor in outputs if tensor not in model.outputs]
        if missing:
            wanted = ", ".join(f"{tensor}: NAME" for tensor in missing)
            raise WorkerFailed(
                f"The worker's model {name} takes the inputs {describe_inputs(model)} and returns "
                f"{', '.join(sorted(model.outputs)) or 'nothing'}; say which of them are meant by "
                f"fields: {{{wanted}}} in the options of the backend's protocol."
            )

    def _write_texts(self, request: EmbeddingRequest | RerankRequest) -> tuple[str, dict[str, Any]]:
        """Write a request for vectors or scores, whose shapes only infer keeps."""
        model = self._get_model(request.model)
        if isinstance(request, EmbeddingRequest):
            texts, output = protocols_prompt.require_texts(request), EMBEDDING_OUTPUT
            values: dict[str, Sequence[Any]] = {PROMPT_INPUT: texts}
        else:
            if len(request.queries) > 1:
                text = "The model's workers compare one text with several, not pairs of texts."
                raise UnsupportedFeature(text, param="text_1")
            values = {QUERY_INPUT: request.queries, DOCUMENTS_INPUT: request.documents}
            output = SCORES_OUTPUT
        self._check_tensors(model, request.model, tuple(values), (output,))
        parameters = request.extra if request.source == _NAME else {}
        return self._write_infer(model, request.model, values, (output,), parameters)

    def _write_infer(
        self,
        model: WorkerModel,
        name: str,
        values: Mapping[str, Sequence[Any]],
        outputs: Sequence[str],
        parameters: Mapping[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        tensors = {
            self._get_own_name(key): (model.inputs.get(key) or _TEXT_TENSORS[key], elements)
            for key, elements in values.items()
        }
        body = write_infer_request(tensors, [*map(self._get_own_name, outputs)], parameters)
        return f"{build_model_path(name)}/infer", body

    def _find_infer_losses(
        self, request: EmbeddingRequest | RerankRequest, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """Nothing but the texts is sent, and what only this protocol has.

        Several texts are sent only to a model that takes several.
        """
        unsupported = find_unsupported_parameters(request, {}, names, extra=request.source == _NAME)
        if isinstance(request, EmbeddingRequest) and len(request.inputs) > 1:
            spec = self._get_model(request.model).inputs.get(PROMPT_INPUT)
            if spec is not None and not takes_several(spec):
                wire = names.get("inputs", "input")
                unsupported += (UnsupportedParameter(wire, "dropped", path="inputs"),)
        return unsupported

    def _rename_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """Rename values to the model's own names."""
        if not self._model_field_names:
            return values
        return {self._model_field_names.get(name, name): value for name, value in values.items()}

    def _build_adapter(self, model: WorkerModel) -> ModelAdapter:
        prompt_support = protocols_prompt.build_prompt_support(self._renderer)
        return ModelAdapter(self._profile, model, self._max_tokens, prompt_support)

    def _get_adapter(self, request: GenerationRequest) -> tuple[GenerationRequest, ModelAdapter]:
        return request, self._adapters.get(request.model, self._default_adapter)


def _uses_infer(adapter: ModelAdapter, request: GenerationRequest) -> bool:
    """Whether the worker gets tensors, because it has no generate or only they have such keys.

    A model that may stream refuses infer.
    """
    if not adapter.model.has_generate:
        return True
    return request.field_extra != () and not request.stream and not adapter.model.decoupled


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
        EMBEDDING_OUTPUT, QUERY_INPUT, DOCUMENTS_INPUT, SCORES_OUTPUT,
    }  # fmt: skip
    if unknown := fields.keys() - known:
        names, listed = ", ".join(sorted(unknown)), ", ".join(sorted(known))
        raise ValueError(f"the fields of triton's {profile.name} have no {names}; known: {listed}")
