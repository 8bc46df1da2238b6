"""What each dialect reads from clients, from the rows of its tables."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from gateway.core.ports import Dialect, Endpoint
from gateway.reference.markdown import MADE, code, number, prose, table
from protocols.params import Param, Tabled

_HEAD = ("parameter", "internal field", "type", "takes", "default", "null", "note")
_INTRO = """# The dialects

What each dialect reads from its clients: scalar parameters only; messages, prompts, tools and
output formats are read by code and stand in the last table. A parameter without an internal field
is read together with others, or handed on as it is. *default* is what the dialect promises to a
client that says nothing. *null* tells whether `null` is taken as if the parameter were absent, or
refused.
"""


class Spoken(Struct, frozen=True):
    """A dialect in each of its profiles, the default one first."""

    name: str
    profiles: Mapping[str, Dialect]

    @property
    def default(self) -> Dialect:
        """As it is without a profile."""
        return next(iter(self.profiles.values()))

    def tables(self) -> Iterator[tuple[str, str, tuple[Param, ...]]]:
        """Profile, kind and rows of each table."""
        for profile, dialect in self.profiles.items():
            assert isinstance(dialect, Tabled), self.name  # noqa: S101 - a dialect's promise
            for kind, rows in dialect.tables.items():
                yield profile, kind, rows


def page(spoken: Sequence[Spoken]) -> str:
    """The page."""
    return "\n".join([MADE, "", _INTRO, *(_dialect(one) for one in spoken)])


def _dialect(spoken: Spoken) -> str:
    """Equal tables are shown once."""
    groups: list[tuple[tuple[Param, ...], dict[str, list[str]]]] = []
    for profile, kind, rows in spoken.tables():
        kinds = next((found for known, found in groups if known == rows), None)
        if kinds is None:
            groups.append((rows, kinds := {}))
        kinds.setdefault(kind, []).append(profile)
    default, *others = map(code, spoken.profiles)
    profiles = ", ".join([f"{default} (the default)", *others])
    told = [f"## {spoken.name}", "", prose(type(spoken.default)), "", f"Profiles: {profiles}.", ""]
    for rows, kinds in groups:
        told += [
            _heading(spoken, kinds),
            "",
            _where(spoken, kinds),
            "",
            table(_HEAD, map(row, rows)),
        ]
    return "\n".join(told)


def _heading(spoken: Spoken, kinds: Mapping[str, Sequence[str]]) -> str:
    profiles = list(dict.fromkeys(one for several in kinds.values() for one in several))
    every = len(profiles) == len(spoken.profiles)
    names = ", ".join(kind.replace("_", " ") for kind in kinds)
    return f"### {spoken.name}: {names}" + ("" if every else f" ({', '.join(profiles)})")


def _where(spoken: Spoken, kinds: Mapping[str, Sequence[str]]) -> str:
    variants = {kind.partition(",")[0] for kind in kinds}
    return ", ".join(code(f"{one.method} {one.path}") for one in _paths(spoken, variants))


def _paths(spoken: Spoken, variants: set[str]) -> list[Endpoint]:
    return [one for one in spoken.default.endpoints if one.variant in variants]


def row(param: Param) -> tuple[str, ...]:
    """A row of the page."""
    internal = "" if param.field.startswith(("asked.", "kept.")) else param.field
    return (
        code(param.wire),
        code(internal),
        param.type,
        "; ".join(_takes(param)),
        "" if param.default is None else code(_value(param.default)),
        "absent" if param.null else "refused",
        param.note,
    )


def _takes(param: Param) -> Iterator[str]:
    low = None if param.low is None else number(param.low)
    high = None if param.high is None else number(param.high)
    match low, high:
        case None, None:
            pass
        case _, None:
            yield f"{'above' if param.above_low else 'from'} {low}"
        case None, _:
            yield f"{'below' if param.below_high else 'up to'} {high}"
        case _:
            start = "above" if param.above_low else "from"
            yield f"{start} {low} {'to below' if param.below_high else 'to'} {high}"
    if param.choices:
        yield "one of " + ", ".join(map(code, param.choices))
    if param.off:
        yield " and ".join(map(number, param.off)) + " for off"
    if param.min_items:
        yield f"at least {param.min_items} items"
    if param.max_items is not None:
        yield f"at most {param.max_items} items"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
