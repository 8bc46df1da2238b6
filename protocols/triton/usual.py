"""Bodies of generate as nearly all are: one prompt, with flags and numbers that are in range.

They are read far faster than whatever a body may be. Any other, and all that is wrong with one, is
for ``generate`` and ``meaning``, which read these to the same request.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, Final, Required, TypedDict

import msgspec
from msgspec import Meta, Struct

from gateway.core.ports import Call
from gateway.core.types import SECTIONS, GenerateRequest, Templating, Want
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
_typed: Any = TypedDict
"""Whose names are a profile's, and so not to be written down here."""


class _Kind(Struct, frozen=True):
    """What all bodies of the same names have in common. Fields stand with their wire names."""

    given: frozenset[str]
    own: tuple[tuple[str, str], ...]
    sections: tuple[tuple[str, type[Struct], tuple[tuple[str, str], ...]], ...]
    paths: tuple[tuple[str, str], ...]
    """Those of all of them, in the order in which a request says them."""


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
        self._kind = lru_cache(_REMEMBERED)(partial(_kind, rows))
        self._templating = Templating(mode=mode)

    def request(self, call: Call) -> GenerateRequest | None:
        """The request, the same as ``meaning.request`` makes; None where that must be asked."""
        said = self._said(call)
        if said is None:
            return None
        profile = self._profile
        flag = said.get(profile.streaming[0])
        excludes = said.get(profile.exclude[0]) if profile.exclude else None
        if flag and profile.insists and excludes is False:
            return None
        shows = not flag and (profile.echo if excludes is None else not excludes)
        kind = self._kind(tuple(said))
        fields: dict[str, Any] = {name: said[wire] for name, wire in kind.own}
        for name, make, places in kind.sections:
            fields[name] = make(**{field: said[wire] for field, wire in places})
        model, prompts = call.params["model"], (said[PROMPT],)
        streams = generate.streamed(call, profile, flag=flag)
        request = GenerateRequest(
            model=model,
            kind="completion",
            prompts=prompts,
            templating=self._templating,
            echo=shows or None,
            stream=streams,
            want=_SILENT,
            given=kind.given,
            **fields,
        )
        mode = self._templating.mode
        told: dict[str, Any] = {"model": model, "kind": "completion", "prompts": prompts}
        told["templating.mode"] = mode
        told |= {path: said[wire] for path, wire in kind.paths}
        if shows:
            told["echo"] = True
        if streams:
            told["stream"] = True
        told |= {"want.usage": "none", "given": kind.given}
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
        quotes = 2 * (names + 1) + text.count('"')
        if body.count(b'"') != quotes or body.find(b"u0022") >= 0 or generate.encoded(call):
            return None  # more quotes are those of other names, or of one that was said twice
        return said


def _kind(rows: Mapping[str, Param], names: tuple[str, ...]) -> _Kind:
    own: list[tuple[str, str]] = []
    sections: dict[str, list[tuple[str, str]]] = {}
    paths = [(rows[wire].field, wire) for wire in names if wire in rows]
    for path, wire in paths:
        section, _, field = path.rpartition(".")
        (sections.setdefault(section, []) if section else own).append((field, wire))
    made = [(name, SECTIONS[name], tuple(places)) for name, places in sections.items()]
    paths.sort(key=_place)
    return _Kind(frozenset(names), tuple(own), tuple(made), tuple(paths))


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
