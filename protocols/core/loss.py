"""Unsupported parameters, which the gateway reports as translation loss.

A target declares its parameters as a mapping from field path in the internal request (such as
``sampling.top_k``) to a ``ParameterSupport``. ``find_unsupported_parameters`` compares a request
with it: a field that the client set and the target does not support is a loss.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Literal
from urllib.parse import unquote_plus

from msgspec import Struct
from msgspec.structs import replace

from protocols.core.errors import UnsupportedFeature
from protocols.core.places import locate_call, locate_message, locate_part
from protocols.core.request import (
    AnyRequest,
    AudioPart,
    ContentPart,
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonSchemaFormat,
    Message,
    ReasoningPart,
    RefusalPart,
    ResponseOptions,
    VideoPart,
)
from protocols.core.request_headers import RequestHeaders

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


class LostHeader(UnsupportedParameter, frozen=True):
    """A header that no worker gets; never a reason to refuse.

    It allows features or names an account, and clients send it whatever a request needs.
    """


class ParameterSupport(Struct, frozen=True):
    """How a target supports one field: its wire name there, and the accepted range."""

    wire: str
    minimum: float | None = None
    maximum: float | None = None
    reason: LossReason | None = None
    """Set if the target supports the field only partly."""
    reports_match: bool = False
    """Of stop strings: whether responses name the one that matched."""
    takes_description: bool = False
    """Of an output format: whether the target gets what the client says of its schema."""
    default: Any = None
    """A value that is no loss, since the target does so in any case."""
    replaced_words: tuple[tuple[str, str], ...] = ()
    """Words that the target lacks, each with the nearest one that it has."""


MAX_REPORTED: Final = 100
"""How many names that clients or workers have chosen are reported one by one."""
MAX_NAME: Final = 256
"""The longest such name in a report, in characters."""
_FURTHER: Final = UnsupportedParameter(
    "further", "dropped", f"names after the first {MAX_REPORTED}"
)
"""The last of a report that leaves names out."""
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.\-\[\]]")
_ALWAYS_SUPPORTED = frozenset(
    {"model", "kind", "messages", "prompts", "inputs", "stream", "provided_fields", "client_id",
     "extra", "field_extra", "source", "context_length", "timeout", "encoding", "templating.mode",
     "legacy_functions", "tool_choice", "clamped_fields", "fills_context",
     "queries", "documents", "raw_documents", "top_n", "return_documents", "prompt",
     "return_texts", "token_ids",
     *(f"response_options.{name}" for name in ResponseOptions.__struct_fields__
       if name != "token_ids")}
)  # fmt: skip
"""Fields that every target gets, that only the gateway uses, or that are checked elsewhere."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    "echo": False,
    "n": 1,
    "sampling.frequency_penalty": 0,
    "sampling.presence_penalty": 0,
}
"""What every target does if it is not told otherwise."""
_NUMBER_TYPES: Final = (int, float)
_MESSAGES: Final = "messages"
_CHAT_FORMAT: Final = "response_format"
_CONTINUATION: Final = ("templating.continue_final", "templating.add_generation_prompt")
"""Fields that say that an answer continues the last message."""
REASONING: Final = "earlier reasoning"
"""The detail of the loss of an assistant's reasoning."""
_NOT_SUPPORTED: Final = ParameterSupport("", reason="dropped")


CONTENT_LABELS: Final[Mapping[type[ContentPart], str]] = {
    ImagePart: "images",
    AudioPart: "audio",
    VideoPart: "videos",
    FilePart: "files",
}
"""What a model sees or hears beside text, as the detail of a loss names it."""


def find_lost_parts(
    messages: Iterable[Message], find_label: Callable[[ContentPart], str | None]
) -> Iterator[UnsupportedParameter]:
    """The loss of each part for which ``find_label`` says what it is."""
    for i, message in enumerate(messages):
        for k, part in enumerate(message.parts):
            if label := find_label(part):
                path = locate_part(message, i, k)
                yield UnsupportedParameter(path, "dropped", label, _MESSAGES)


def find_unseen_content(
    messages: Sequence[Message], labels: Mapping[type[ContentPart], str]
) -> tuple[UnsupportedParameter, ...]:
    """The loss of each content part of a type in ``labels``."""
    kinds = {type(part) for message in messages for part in message.parts}
    if kinds.isdisjoint(labels):
        return ()
    return tuple(find_lost_parts(messages, lambda part: labels.get(type(part))))


def find_lost_reasoning(
    messages: Sequence[Message], *, sends_text: bool
) -> tuple[UnsupportedParameter, ...]:
    """The earlier reasoning that a worker does not get, without signatures and foreign secrets."""
    losses = []
    for i, message in enumerate(messages):
        for k, part in enumerate(message.parts):
            if type(part) is ReasoningPart:
                path = locate_part(message, i, k)
                if part.redacted is not None or not sends_text:
                    losses.append(UnsupportedParameter(path, "dropped", REASONING, _MESSAGES))
                elif part.signature is not None:
                    losses.append(UnsupportedParameter(f"{path}.signature", "dropped"))
    return tuple(losses)


def find_spoken_refusals(messages: Iterable[Message]) -> Iterator[UnsupportedParameter]:
    """The loss of each refusal that a worker gets as a text like any other."""
    for one in find_lost_parts(messages, _describe_refusal):
        yield replace(one, reason="approximated")


def _describe_refusal(part: ContentPart) -> str | None:
    return "refusals" if isinstance(part, RefusalPart) else None


def find_lost_calls(messages: Iterable[Message]) -> Iterator[UnsupportedParameter]:
    """The loss of each tool call, by a worker without tools."""
    for i, message in enumerate(messages):
        for k, call in enumerate(message.tool_calls):
            path = locate_call(message, i, k).removesuffix(f".{call.kind}")
            yield UnsupportedParameter(path, "dropped", "tool calls", _MESSAGES)


def find_lost_names(
    messages: Iterable[Message], loses_name: Callable[[Message], bool]
) -> Iterator[UnsupportedParameter]:
    """The loss of the name of each speaker that ``loses_name``."""
    for i, message in enumerate(messages):
        if message.name and loses_name(message):
            path = f"{locate_message(message, i)}.name"
            yield UnsupportedParameter(path, "dropped", "names", _MESSAGES)


def list_lost_content(losses: Iterable[UnsupportedParameter]) -> tuple[str, ...]:
    """The labels of content that the target does not get."""
    lost = {one.detail for one in losses if one.path == _MESSAGES}
    return tuple(label for label in CONTENT_LABELS.values() if label in lost)


def refuse_lost_content(losses: Iterable[UnsupportedParameter]) -> None:
    """Raise UnsupportedFeature for content that the target does not get: it would invent it."""
    labels = frozenset(CONTENT_LABELS.values())
    for one in losses:
        if one.path == _MESSAGES and one.detail in labels:
            suffix = ".type" if one.field.endswith("]") and "content[" in one.field else ""
            text = f"The model does not support {one.detail}."
            raise UnsupportedFeature(text, param=f"{one.field}{suffix}")


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
        if path == "labels":
            losses += _find_lost_labels(request.labels, carries, names)
            continue
        carry = carries.get(path, _NOT_SUPPORTED)
        reason, low, high, detail = carry.reason, carry.minimum, carry.maximum, ""
        if path == "stopping.stop" and not carry.reports_match and _wants_match(request):
            reason = "dropped"
        if reason is None:
            if type(value) not in _NUMBER_TYPES:
                losses += _find_changed_value(path, value, carry, names)
                continue
            if low is not None and value < low:
                reason, detail = "clamped", f"{value} to {low}"
            elif high is not None and value > high:
                reason, detail = "clamped", f"{value} to {high}"
            else:
                continue
        elif _says_nothing(request, path, value) or value == carry.default:
            continue
        prefill = _find_lost_prefill(request, path, names)
        losses.append(prefill or _build_loss(path, names, reason, detail))
    return tuple(losses)


def _find_changed_value(
    path: str, value: Any, carry: ParameterSupport, names: Mapping[str, str]
) -> Iterator[UnsupportedParameter]:
    """The loss of a word that the target lacks, or of the description of a JSON Schema."""
    for word, other in carry.replaced_words:
        if value == word:
            yield _build_loss(path, names, "approximated", f"{word} to {other}")
    is_described = isinstance(value, JsonSchemaFormat) and value.description is not None
    if is_described and not carry.takes_description:
        wire = names.get(path, _CHAT_FORMAT)  # chat completions have it a level deeper
        inner = ".json_schema" if wire == _CHAT_FORMAT else ""
        yield UnsupportedParameter(f"{wire}{inner}.description", "dropped")


def _find_lost_prefill(
    request: AnyRequest, path: str, names: Mapping[str, str]
) -> UnsupportedParameter | None:
    """The loss of an assistant message that the answer has to continue, by a worker that may not.

    In a protocol without a field for that, the message itself says so.
    """
    is_message = path in _CONTINUATION and names.get(path) == _MESSAGES
    if not is_message or not isinstance(request, GenerationRequest):
        return None
    place = locate_message(request.messages[-1], len(request.messages) - 1)
    field = place.removesuffix(".content")  # of a message that is one text
    return UnsupportedParameter(field, "approximated", "may not be continued", _CONTINUATION[0])


def _build_loss(
    path: str, names: Mapping[str, str], reason: LossReason, detail: str
) -> UnsupportedParameter:
    return UnsupportedParameter(names.get(path, path.rpartition(".")[2]), reason, detail, path)


def _find_lost_labels(
    labels: Iterable[str], carries: Mapping[str, ParameterSupport], names: Mapping[str, str]
) -> Iterator[UnsupportedParameter]:
    """The fields of the request whose labels the target does not get.

    It lists each as ``labels.metadata``. A client's protocol names one "" that the gateway keeps.
    """
    for name in dict.fromkeys(label.partition(".")[0] for label in labels):
        path = f"labels.{name}"
        if path not in carries and (wire := names.get(path, name)):
            yield UnsupportedParameter(wire, "dropped", path=path)


def _says_nothing(request: AnyRequest, path: str, value: Any) -> bool:
    """Whether every target does what the field asks for: a default, or calls of no tools."""
    if path == "parallel_tools":
        return value is True or (isinstance(request, GenerationRequest) and not request.tools)
    return path in _DEFAULTS and value == _DEFAULTS[path]


def _wants_match(request: AnyRequest) -> bool:
    """Whether the response has to name the stop string that matched."""
    return isinstance(request, GenerationRequest) and request.response_options.matched_stop


def is_full(reported: Sequence[UnsupportedParameter]) -> bool:
    """Whether ``limit_losses`` adds no more names of a client or worker to a report."""
    return bool(reported) and reported[-1] == _FURTHER


def list_names(
    names: Iterable[str], reason: LossReason = "dropped"
) -> Iterator[UnsupportedParameter]:
    """The losses of these names of a worker, of which no more are looked at than are reported."""
    remaining = iter(names)
    for name in islice(remaining, MAX_REPORTED):
        yield UnsupportedParameter(name[:MAX_NAME], reason)
    if next(remaining, None) is not None:
        yield _FURTHER


def limit_losses(
    losses: Iterable[UnsupportedParameter], reported: Sequence[UnsupportedParameter] = ()
) -> tuple[UnsupportedParameter, ...]:
    """The losses of a report with those ``reported`` before: each once, and not too many.

    Those of the internal request's fields are all listed, since there are few, with the first part
    of each kind of content. Other names are those of a client or worker: they are cut, and only the
    first MAX_REPORTED are listed.
    """
    listed = dict.fromkeys(reported)
    has_further = _FURTHER in listed
    count = sum(not one.path for one in reported)
    contents: set[str] = set()
    """The content of which a part is listed."""
    for loss in losses:
        one = loss if len(loss.field) <= MAX_NAME else replace(loss, field=loss.field[:MAX_NAME])
        if one in listed:
            continue
        is_limited = not one.path
        if one.path == _MESSAGES:
            is_limited = one.detail in contents
            contents.add(one.detail)
        if one == _FURTHER or (is_limited and count >= MAX_REPORTED):
            has_further = True
            continue
        count += is_limited
        listed[one] = None
    if has_further:
        listed.pop(_FURTHER, None)
        listed[_FURTHER] = None
    return tuple(listed)


def find_lost_query(query: str, known: frozenset[str]) -> tuple[UnsupportedParameter, ...]:
    """The parameters of a query that nobody knows: no worker gets one."""
    names = [part.partition("=")[0] for part in query.split("&")]
    lost = dict.fromkeys(name for one in names if one and (name := unquote_plus(one)) not in known)
    return tuple([UnsupportedParameter(f"query.{name}", "dropped") for name in lost])


def find_lost_headers(
    headers: Mapping[str, str],
    table: RequestHeaders,
    sent: Iterable[tuple[str, str]],
    read: frozenset[str] = frozenset(),
) -> tuple[UnsupportedParameter, ...]:
    """The headers that may mean something to a server and are not ``sent``, nor ``read`` here."""
    names = [*filter(table.has_meaning, headers)]
    if not names:
        return ()
    kept = read.union([name.lower() for name, _ in sent])
    return tuple(LostHeader(f"header.{name}", "dropped") for name in names if name not in kept)


def build_loss_headers(
    losses: tuple[UnsupportedParameter, ...],
) -> tuple[tuple[str, str], ...]:
    """The header of a response that reports them; none without losses."""
    return (("x-interlingua-loss", format_loss_header(losses)),) if losses else ()


def format_loss_header(losses: tuple[UnsupportedParameter, ...]) -> str:
    """The value of ``x-interlingua-loss``: ``name=reason,name=reason``, at most 2,000 characters.

    What several parts of one field lose is said once. Names may come from the client: characters
    that are unsafe in a header become ``_``.
    """
    items = (f"{_UNSAFE_CHARACTERS.sub('_', loss.field[:128])}={loss.reason}" for loss in losses)
    return ",".join(dict.fromkeys(items))[:2000]
