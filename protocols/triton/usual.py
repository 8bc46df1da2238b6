"""Bodies of generate as nearly all are: one prompt, with flags and numbers that are in range.

They are read far faster than whatever a body may be. Any other, and all that is wrong with one, is
for ``generate`` and ``meaning``, which read these to the same request.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from operator import itemgetter
from typing import Annotated, Any, Final, Required, TypedDict

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import astuple, replace

from gateway.core.ports import Call
from gateway.core.types import (
    SECTIONS,
    GenerateRequest,
    Sampling,
    Stopping,
    Templating,
    Want,
)
from protocols.params import Param
from protocols.triton import generate
from protocols.triton.meaning import Mode
from protocols.triton.tensors import RANGES
from protocols.triton.vocabulary import PROMPT, Profile

_NESTED: Final = "parameters"
_SEED: Final = "sampling.seed"
_TYPES: Final[Mapping[str, type]] = {"int": int, "strict int": int, "float": float, "bool": bool}
_LARGEST: Final = 2**63 - 1
"""A limit of an integer may not be above it."""
_REMEMBERED: Final = 128
"""Sets of names."""
_SILENT: Final = Want("none")
_SAMPLING: Final[tuple[Any, ...]] = astuple(Sampling())
_STOPPING: Final[tuple[Any, ...]] = astuple(Stopping())
_typed: Any = TypedDict
"""Whose names are a profile's, and so not to be written down here."""


class _Kind(Struct, frozen=True):
    """What all bodies of the same names have in common. Fields stand with their wire names."""

    request: GenerateRequest
    """Without what a body tells by a value."""
    told: dict[str, Any]
    """What it says, with that which is to be filled in."""
    sampling: tuple[str, ...]
    """The names of its fields in their order, up to the last; "" of those that were not sent."""
    stopping: tuple[str, ...]
    others: tuple[tuple[str, Callable[[Mapping[str, Any]], Any]], ...]
    """What few bodies tell of, and how it is made of one."""
    paths: tuple[tuple[str, str], ...]


class Usual:
    """Reads the usual bodies of one profile; ``mode`` as for ``meaning.request``."""

    def __init__(self, profile: Profile, mode: Mode) -> None:
        flags = (*profile.streaming[:1], *profile.exclude[:1])
        self._profile = profile
        rows = {row.wire: row for row in profile.parameters if row.type in _TYPES}
        inner: dict[str, Any] = dict.fromkeys(flags, bool)
        inner |= {name: _type(row, profile) for name, row in rows.items()}
        outer = {name: Required[inner[name]] for name in profile.required if name in inner}
        nested = _typed("Parameters", inner, total=False)
        whole = {**inner, **outer, PROMPT: Required[str], _NESTED: nested}
        self._decode = msgspec.json.Decoder(_typed("Body", whole, total=False)).decode
        self._excludes = profile.exclude[0] if profile.exclude else ""
        self._kind = lru_cache(_REMEMBERED)(partial(_kind, rows, Templating(mode=mode)))

    def request(self, call: Call) -> GenerateRequest | None:
        """The request, the same as ``meaning.request`` makes; None where that must be asked."""
        said = self._said(call)
        if said is None:
            return None
        profile = self._profile
        value: Callable[..., Any] = said.get
        flag, excludes = value(profile.streaming[0]), value(self._excludes)
        if flag and profile.insists and excludes is False:
            return None
        shows = not flag and (profile.echo if excludes is None else not excludes)
        kind = self._kind(tuple(said), shows, generate.streamed(call, profile, flag=flag))
        model, prompts, told = call.params["model"], (said[PROMPT],), kind.told.copy()
        told["model"], told["prompts"] = model, prompts
        for path, wire in kind.paths:
            told[path] = said[wire]
        request = replace(
            kind.request,
            model=model,
            prompts=prompts,
            sampling=Sampling(*map(value, kind.sampling, _SAMPLING)),
            stopping=Stopping(*map(value, kind.stopping, _STOPPING)),
        )
        if kind.others:
            request = replace(request, **{name: made(said) for name, made in kind.others})
        return request.saying(told)

    def streams(self, call: Call) -> bool:
        """Whether the answer comes in pieces, whatever the body."""
        if call.endpoint.variant != "generate_stream":
            return False
        said = self._said(call)
        if said is None:
            return generate.streams(call, self._profile)
        return generate.streamed(call, self._profile, flag=said.get(self._profile.streaming[0]))

    def _said(self, call: Call) -> dict[str, Any] | None:
        """Everything in the body by name; None where something is unusual."""
        body = call.body
        try:
            said: dict[str, Any] = self._decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        text, names = said[PROMPT], len(said)
        if _NESTED in said:
            inner = said.pop(_NESTED)
            names += len(inner)
            said |= inner
            if len(said) != names - 1:
                return None
        quotes = 2 * (names + 1)
        if '"' in text:
            if body.find(b"u0022") >= 0:
                return None
            quotes += text.count('"')
        if body.count(b'"') != quotes or generate.encoded(call):
            return None  # more quotes are those of other names, or of one that was said twice
        return said


def _kind(
    rows: Mapping[str, Param],
    templating: Templating,
    names: tuple[str, ...],
    shows: bool,  # noqa: FBT001 - part of what is remembered by
    streams: bool,  # noqa: FBT001 - so is this
) -> _Kind:
    sections: dict[str, dict[str, str]] = {}
    others: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
    paths = sorted([(rows[wire].field, wire) for wire in names if wire in rows], key=_place)
    for path, wire in paths:
        section, _, field = path.rpartition(".")
        if section:
            sections.setdefault(section, {})[field] = wire
        else:
            others[field] = itemgetter(wire)
    sampling, stopping = sections.pop("sampling", {}), sections.pop("stopping", {})
    others |= {name: partial(_made, SECTIONS[name], wires) for name, wires in sections.items()}
    request = GenerateRequest(
        model="",
        kind="completion",
        templating=templating,
        echo=shows or None,
        stream=streams,
        want=_SILENT,
        given=frozenset(names),
    )
    told = ["model", "kind", "prompts", "templating.mode", *[path for path, _ in paths]]
    return _Kind(
        request,
        {**dict.fromkeys(told), **request.said},
        _row(Sampling, sampling),
        _row(Stopping, stopping),
        tuple(others.items()),
        tuple(paths),
    )


def _row(section: type[Struct], wires: Mapping[str, str]) -> tuple[str, ...]:
    """See ``_Kind.sampling``; ``wires`` are in the order of their fields."""
    row: list[str] = []
    for field, wire in wires.items():
        row += [""] * (section.__struct_fields__.index(field) - len(row))
        row.append(wire)
    return tuple(row)


def _made(section: type[Struct], wires: Mapping[str, str], said: Mapping[str, Any]) -> Struct:
    return section(**{field: said[wire] for field, wire in wires.items()})


def _place(told: tuple[str, str]) -> tuple[int, int]:
    """Where a request says the field of this path."""
    section, _, field = told[0].rpartition(".")
    own = GenerateRequest.__struct_fields__
    if not section:
        return own.index(field), 0
    return own.index(section), SECTIONS[section].__struct_fields__.index(field)


def _type(row: Param, profile: Profile) -> Any:
    """Its values within all limits, without those that mean "not used" and what is converted."""
    kind = _TYPES[row.type]
    if kind is bool:
        return bool
    limits: dict[str, Any] = {}
    low, high = row.low, row.high
    if kind is int:
        slot = profile.inputs.get(row.wire)
        bounds = RANGES[slot.datatype if slot is not None else "INT64"]
        least = 0 if row.field == _SEED else bounds.start
        low = least if low is None else max(low, least)
        most = min(bounds.stop - 1, _LARGEST)
        high = most if high is None else min(high, most)
    if row.off:
        limits["gt"] = max(row.off)
    elif low is not None:
        limits["gt" if row.above_low else "ge"] = low
    if high is not None:
        limits["le"] = high
    return Annotated[kind, Meta(**limits)]
