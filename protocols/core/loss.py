"""Unsupported parameters, which the gateway reports as translation loss.

A target declares its parameters as a mapping from field path in the internal request (such as
``sampling.top_k``) to a ``ParameterSupport``. ``find_unsupported_parameters`` compares a request
with it: a field that the client set and the target does not support is a loss.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from protocols.core.errors import UnsupportedFeature
from protocols.core.request import (
    AnyRequest,
    AudioPart,
    ContentPart,
    FilePart,
    GenerationRequest,
    ImagePart,
    ResponseOptions,
    VideoPart,
)

LossReason = Literal["renamed", "clamped", "defaulted", "approximated", "emulated", "dropped"]
"""``emulated``: the gateway does it for the target; only ``renamed`` loses nothing."""


class UnsupportedParameter(Struct, frozen=True):
    """One parameter that the target does not get as the client sent it.

    ``field`` is the client's wire name, ``path`` that in the internal request, "" if it has none.
    """

    field: str
    reason: LossReason
    detail: str = ""
    path: str = ""


class ParameterSupport(Struct, frozen=True):
    """How a target supports one field: its wire name there, and the accepted range."""

    wire: str
    minimum: float | None = None
    maximum: float | None = None
    reason: LossReason | None = None
    """Set if the target supports the field only partly."""
    reports_match: bool = False
    """Of stop strings: whether responses name the one that matched."""


_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.\-\[\]]")
_ALWAYS_SUPPORTED = frozenset(
    {"model", "kind", "messages", "prompts", "inputs", "stream", "provided_fields", "client_id",
     "labels", "extra", "source", "context_length", "timeout", "encoding", "templating.mode",
     "legacy_functions", "tool_choice", "clamped_fields", "fills_context",
     "queries", "documents", "raw_documents", "top_n", "return_documents", "prompt",
     "return_texts", "token_ids",
     *(f"response_options.{name}" for name in ResponseOptions.__struct_fields__)}
)  # fmt: skip
"""Fields that every target gets, that only the gateway uses, or that are checked elsewhere."""
_NUMBER_TYPES: Final = (int, float)
_NOT_SUPPORTED: Final = ParameterSupport("", reason="dropped")


CONTENT_LABELS: Final[Mapping[type[ContentPart], str]] = {
    ImagePart: "images",
    AudioPart: "audio",
    VideoPart: "videos",
    FilePart: "files",
}
"""What a model sees or hears beside text, as the detail of a loss names it."""


def find_unseen_content(
    request: GenerationRequest, labels: Mapping[type[ContentPart], str], names: Mapping[str, str]
) -> tuple[UnsupportedParameter, ...]:
    """The loss of content parts of the types in ``labels``, if the messages have such."""
    kinds = {type(part) for message in request.messages for part in message.parts}
    unseen = sorted(label for kind, label in labels.items() if kind in kinds)
    if not unseen:
        return ()
    field = names.get("messages", "messages")
    return (UnsupportedParameter(field, "dropped", ", ".join(unseen), "messages"),)


def list_lost_content(losses: Iterable[UnsupportedParameter]) -> tuple[str, ...]:
    """The labels of content that the target does not get."""
    details = (one.detail.split(", ") for one in losses if one.path == "messages")
    lost = {label for detail in details for label in detail}
    return tuple(label for label in CONTENT_LABELS.values() if label in lost)


def refuse_lost_content(request: AnyRequest, losses: Sequence[UnsupportedParameter]) -> None:
    """Raise UnsupportedFeature for content that the target does not get: it would invent it."""
    lost = list_lost_content(losses)
    if not lost or not isinstance(request, GenerationRequest):
        return
    for i, message in enumerate(request.messages):
        for k, part in enumerate(message.parts):
            if CONTENT_LABELS.get(type(part)) in lost:
                text = f"The model does not support {CONTENT_LABELS[type(part)]}."
                raise UnsupportedFeature(text, param=f"messages[{i}].content[{k}].type")


def find_unsupported_parameters(
    request: AnyRequest,
    carries: Mapping[str, ParameterSupport],
    names: Mapping[str, str],
    *,
    extra: bool = False,
) -> tuple[UnsupportedParameter, ...]:
    """The parameters set in ``request`` that are not in ``carries`` or outside their ranges.

    ``names`` maps paths to the client's wire names, for the report. ``extra``: the target gets the
    fields that the gateway does not know.
    """
    losses = [] if extra else [UnsupportedParameter(name, "dropped") for name in request.extra]
    for path, value in request.set_fields.items():
        if path in _ALWAYS_SUPPORTED:
            continue
        carry = carries.get(path, _NOT_SUPPORTED)
        reason, low, high, detail = carry.reason, carry.minimum, carry.maximum, ""
        if path == "stopping.stop" and not carry.reports_match and _wants_match(request):
            reason = "dropped"
        if reason is None:
            if type(value) not in _NUMBER_TYPES:
                continue
            if low is not None and value < low:
                reason, detail = "clamped", f"{value} to {low}"
            elif high is not None and value > high:
                reason, detail = "clamped", f"{value} to {high}"
            else:
                continue
        elif value is False and "." not in path:
            continue
        losses.append(
            UnsupportedParameter(names.get(path, path.rpartition(".")[2]), reason, detail, path)
        )
    return tuple(losses)


def _wants_match(request: AnyRequest) -> bool:
    """Whether the response has to name the stop string that matched."""
    return isinstance(request, GenerationRequest) and request.response_options.matched_stop


def format_loss_header(losses: tuple[UnsupportedParameter, ...]) -> str:
    """The value of ``x-interlingua-loss``: ``name=reason,name=reason``, at most 2,000 characters.

    Names may come from the client: characters that are unsafe in a header become ``_``.
    """
    items = (f"{_UNSAFE_CHARACTERS.sub('_', loss.field[:128])}={loss.reason}" for loss in losses)
    return ",".join(items)[:2000]
