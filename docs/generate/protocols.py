"""Which field of the internal request each worker carries: found by asking for its losses.

Each probe is a request that sets one field. What is told here is what a client would be told in
``x-interlingua-loss``, so it can be no other than what happens.
"""

import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from msgspec import Raw, Struct, structs

from gateway.core.errors import ClientError, GatewayError
from gateway.core.loss import Loss
from gateway.core.ports import Call, Endpoint
from gateway.core.request import (
    AudioPart,
    Choice,
    EmbedRequest,
    FilePart,
    GenerateRequest,
    Grammar,
    ImagePart,
    JsonObject,
    JsonSchema,
    Logprobs,
    Message,
    Reasoning,
    Regex,
    Request,
    Sampling,
    Stopping,
    Templating,
    TextPart,
    Tool,
    VideoPart,
    Want,
)
from gateway.emulation import around, planned
from gateway.reference.dialects import Spoken
from gateway.reference.markdown import code, number, table

_FAR: Final = 10**9
_INTRO = """## What is carried to workers

Left: how clients say a field, in any of a dialect's endpoints and profiles; nothing where they
can't (the parts of `messages` are not told apart there). Right: what becomes of it on its way to
each kind of worker, in conversations (chat) and with prompts, told apart where they differ.
*clamped*: carried within these limits. What is clamped, approximated or dropped is told in
`x-interlingua-loss`, or refused, as `on_loss` says. *by the gateway*: it does what the worker does
not. *refused*: there is no way to ask this of such a worker.
"""
_SECTIONS: Final[Mapping[str, type[Struct]]] = {
    "sampling": Sampling,
    "stopping": Stopping,
    "logprobs": Logprobs,
    "reasoning": Reasoning,
    "templating": Templating,
    "want": Want,
}
_OWN: Final = frozenset(
    {"model", "kind", "messages", "prompts", "inputs", "stream", "given", "client_id", "labels",
     "extra", "source", "timeout", "encoding", "tools", "tool_choice", "legacy_functions", "output",
     "templating.mode", "want.usage", "want.details", "want.timing", *_SECTIONS}
)  # fmt: skip
"""Fields of no worker's concern, and those that are probed below."""
_OURS: Final = "by the gateway"
_SAMPLES: Final[Mapping[str, Any]] = {
    "stopping.overflow": "truncate",
    "overflow": "truncate",
    "reasoning.effort": "low",
    "sampling.beam_width": 2,
}

Path = str
Kind = Literal["chat", "completion"]


class Carrier(Protocol):
    """What answers requests, and tells what it can't carry of one: a worker dialect, a backend."""

    def losses(self, request: Request, names: Mapping[str, str]) -> tuple[Loss, ...]:
        """See ``gateway.core.ports``."""


class Probe(Struct, frozen=True):
    """A field, by itself or in one of its shapes, and a request that sets nothing else."""

    path: Path
    shape: str
    request: Request
    numeric: bool = False


def section(spoken: Sequence[Spoken], carriers: Mapping[str, Carrier]) -> str:
    """The tables: one for text, one for embeddings."""
    said = {one.name: _said(one) for one in spoken}
    head = ("field", *(one.name for one in spoken), *(f"→ {name}" for name in carriers))
    text = _by_label([*_generation("chat"), *_generation("completion")])
    vectors = _by_label(_embedding())
    return "\n".join(
        [
            _INTRO,
            table(head, (_row(probes, said, carriers) for probes in text)),
            "### Embeddings\n",
            table(head, (_row(probes, said, carriers) for probes in vectors)),
        ]
    )


def _by_label(probes: Iterable[Probe]) -> Sequence[Sequence[Probe]]:
    found: dict[tuple[Path, str], list[Probe]] = {}
    for probe in probes:
        found.setdefault((probe.path, probe.shape), []).append(probe)
    return list(found.values())


def _row(
    probes: Sequence[Probe],
    said: Mapping[str, Mapping[Path, str]],
    carriers: Mapping[str, Carrier],
) -> list[str]:
    first = probes[0]
    label = code(first.path) + (f": {first.shape}" if first.shape else "")
    clients = [names.get(first.path, "") for names in said.values()]
    return [label, *clients, *(_fate(probes, one) for one in carriers.values())]


def _said(spoken: Spoken) -> Mapping[Path, str]:
    """How a dialect's clients say each field."""
    wires: dict[Path, dict[str, None]] = {}
    for _, _, rows in spoken.tables():
        for param in rows:
            wires.setdefault(param.field, {})[param.wire] = None
    for dialect in spoken.profiles.values():
        for endpoint in dialect.endpoints:
            if endpoint.task == "generate":
                for path, wire in _names(dialect.names, endpoint).items():
                    wires.setdefault(path, {})[wire] = None
    return {path: ", ".join(map(code, several)) for path, several in wires.items()}


def _names(names: Any, endpoint: Endpoint) -> Mapping[Path, str]:
    """Some dialects tell only of a request that they could read."""
    call = Call(endpoint, {}, {}, "", b"{}", endpoint.path)
    try:
        found: Mapping[Path, str] = names(call)
    except GatewayError:
        return {}
    return found


# --- the probes ----------------------------------------------------------------------------------


def _generation(kind: Kind) -> Iterator[Probe]:
    base = _base(kind)
    for name, (value, numeric) in _values(GenerateRequest, ""):
        yield Probe(name, "", structs.replace(base, **{name: value}), numeric)
    for holder, struct in _SECTIONS.items():
        for path, (value, numeric) in _values(struct, f"{holder}."):
            filled = struct(**{path.rpartition(".")[2]: value})
            yield Probe(path, "", structs.replace(base, **{holder: filled}), numeric)
    formats: Mapping[str, Any] = {
        "a JSON object": JsonObject(),
        "a JSON Schema": JsonSchema(Raw(b"{}")),
        "a regular expression": Regex("x"),
        "a choice": Choice(("x",)),
        "a grammar": Grammar("x"),
    }
    for shape, output in formats.items():
        yield Probe("output", shape, structs.replace(base, output=output))
    if kind == "chat":
        yield from _conversation(base)


def _conversation(base: GenerateRequest) -> Iterator[Probe]:
    function = (Tool("x"),)
    custom = (Tool("x", kind="custom"),)
    yield Probe("tools", "functions", structs.replace(base, tools=function))
    yield Probe("tools", "custom", structs.replace(base, tools=custom))
    forced = structs.replace(base, tools=function, tool_choice="required")
    yield Probe("tool_choice", "one must be called", forced)
    parts: Mapping[str, Any] = {
        "images": ImagePart("data:,"),
        "audio": AudioPart(""),
        "video": VideoPart("data:,"),
        "files": FilePart("x"),
    }
    for shape, part in parts.items():
        yield Probe("messages", shape, structs.replace(base, messages=(Message("user", (part,)),)))


def _embedding() -> Iterator[Probe]:
    base = EmbedRequest(model="m", inputs=("x",))
    for name, (value, numeric) in _values(EmbedRequest, ""):
        yield Probe(name, "", structs.replace(base, **{name: value}), numeric)


def _base(kind: Kind) -> GenerateRequest:
    if kind == "chat":
        return GenerateRequest(model="m", kind=kind, messages=(Message("user", (TextPart("x"),)),))
    return GenerateRequest(model="m", kind=kind, prompts=("x",), templating=Templating(mode="raw"))


def _values(struct: type[Struct], before: str) -> Iterator[tuple[Path, tuple[Any, bool]]]:
    """A value for each field that a worker may carry, and whether it is a number."""
    for name, hint in typing.get_type_hints(struct).items():
        if (path := before + name) in _OWN:
            continue
        sample = _SAMPLES[path] if path in _SAMPLES else _sample(hint)
        yield path, (sample, type(sample) in (int, float))


def _sample(hint: Any) -> Any:
    """Something of this type that says something."""
    simple: Mapping[Any, Any] = {int: 1, float: 0.5, bool: True, str: "x"}
    if hint in simple:
        return simple[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return (_sample(inner[0]),)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"x" if inner[0] is str else 1: Raw(b"1") if inner[1] is Raw else 1.0}
    return _sample(inner[0])


# --- what becomes of them ------------------------------------------------------------------------


def _fate(probes: Sequence[Probe], carrier: Carrier) -> str:
    fates = {_kind(probe): _one(probe, carrier) for probe in probes}
    if len(set(fates.values())) == 1:
        return next(iter(fates.values()))
    return "; ".join(f"{kind}: {fate}" for kind, fate in fates.items())


def _kind(probe: Probe) -> str:
    chat = isinstance(probe.request, GenerateRequest) and probe.request.kind == "chat"
    return "chat" if chat else "prompts"


def _one(probe: Probe, carrier: Carrier) -> str:
    inner, ours = around(probe.request)
    if ours is not None and inner != probe.request:
        return _OURS
    try:
        found = _lost(inner, probe.path, carrier)
    except ClientError:
        return "refused"
    if found is not None:
        return _OURS if found.reason == "emulated" else found.reason
    if not probe.numeric:
        return "carried"
    match _limit(probe, -_FAR, carrier), _limit(probe, _FAR, carrier):
        case "", "":
            return "carried"
        case low, "":
            return f"clamped from {low}"
        case "", high:
            return f"clamped to {high}"
        case low, high:
            return f"clamped from {low} to {high}"


def _limit(probe: Probe, value: int, carrier: Carrier) -> str:
    """What becomes of a value far out; "" where it stays as it is."""
    found = _lost(_with(probe, value), probe.path, carrier)
    if found is None or found.reason != "clamped":
        return ""
    return number(float(found.detail.rpartition(" ")[2]))


def _with(probe: Probe, value: int) -> Request:
    holder, _, name = probe.path.rpartition(".")
    if not holder:
        return structs.replace(probe.request, **{name: value})
    part = structs.replace(getattr(probe.request, holder), **{name: value})
    return structs.replace(probe.request, **{holder: part})


def _lost(request: Request, path: Path, carrier: Carrier) -> Loss | None:
    """The loss of this path; the carrier is told that every field is called by its path."""
    names = {one: one for one in (path, *_OWN)}
    losses = planned(request, carrier.losses(request, names)).losses
    return next((loss for loss in losses if loss.field == path), None)
