"""Fields that refer to what a server keeps between requests, and what the gateway does with each.

A client that gets 200 believes that the server has what such a field names: its next request holds
only what is new. So a target that drops one of them must not answer as if it had it. Each protocol
lists its fields with a decision; ``refuse_lost_state`` applies it to whatever target drops one. A
field that no protocol lists and whose name says that it refers to earlier requests is refused, too:
nobody has decided that it may be dropped.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from protocols.core.errors import StoredObjectNotFound, UnsupportedFeature
from protocols.core.json_text import decode_json
from protocols.core.loss import UnsupportedParameter

StatefulDecision = Literal["stored", "forwarded", "refused", "reported"]
"""``stored``: the gateway keeps what it names. ``forwarded``: workers of the same protocol get it,
and every other target refuses it. ``refused``: always. ``reported``: a target without it answers
the same request, so that it is a translation loss like any other."""


class StatefulField(Struct, frozen=True):
    """One field and its decision. ``field`` is the path in the body; ``[]`` stands for items."""

    field: str
    decision: StatefulDecision
    reason: str
    refusal: str = ""
    """The sentence for the client."""
    starts: tuple[Any, ...] = ()
    """Values that name nothing yet: they are reported instead of refused."""
    missing_id: str = ""
    """The member that names what is not here; the error is then that it was not found."""


_NAME: Final = re.compile(
    r"(?i)(?:^|\.)(?:(?:previous|parent)_?\w*id|"
    r"(?:thread|conversation|container|session|batch)(?:_?id)?|sequence_?id|"
    r"resume|background|compaction|cached_?content)$"
)
"""Names of fields that refer to earlier requests, whatever their protocol and spelling."""
_CONTAINERS: Final = frozenset({"extra_body", "extra_params", "google"})
"""Fields that hold further fields of the request: Gemini's ``extra_body.google.cached_content``."""
_EMPTY: Final[tuple[Any, ...]] = (None, False, "", [], {}, 0)
_UNLISTED: Final = StatefulField(
    "", "refused", "no protocol lists it", "The model's workers keep nothing between requests."
)


def refuse_lost_state(
    fields: Iterable[StatefulField],
    values: Mapping[str, Raw],
    losses: Iterable[UnsupportedParameter],
) -> None:
    """Raise the error for the first dropped field that later requests depend on.

    ``fields`` are those of the client's protocol; ``values`` has what the request says beside the
    internal request, by the client's names.
    """
    decisions: dict[str, StatefulField] = {}
    for loss in losses:
        if loss.reason != "dropped" or loss.path:
            continue
        decisions = decisions or {one.field: one for one in fields}
        for path, name in _list_lost_fields(loss.field, values):
            row = decisions.get(name) or (_UNLISTED if _NAME.search(name) else None)
            if row is not None and row.decision != "reported":
                _refuse_field(row, path, _get_value(path, values))


def _list_lost_fields(path: str, values: Mapping[str, Raw]) -> Iterator[tuple[str, str]]:
    """The path of a lost field and of those in it, each with its name as a field of the request."""
    *containers, name = path.split(".")
    yield path, name if _CONTAINERS.issuperset(containers) else path
    if name in _CONTAINERS and isinstance(value := _get_value(path, values), dict):
        for key in value:
            yield from _list_lost_fields(f"{path}.{key}", values)


def _refuse_field(row: StatefulField, path: str, value: Any) -> None:
    """Raise the error of a lost field, unless its value names nothing."""
    if value in _EMPTY or value in row.starts:
        return
    if row.missing_id:
        identifier = value.get(row.missing_id) if isinstance(value, dict) else None
        raise StoredObjectNotFound(row.refusal, id=str(identifier)[:128], param=path)
    raise UnsupportedFeature(row.refusal or _UNLISTED.refusal, param=path)


def _get_value(path: str, values: Mapping[str, Raw]) -> Any:
    """The value of a lost field, or of one in it; one that is not known names something."""
    if path in values:
        return _decode(values[path])
    outer, _, key = path.rpartition(".")
    fields = _get_value(outer, values) if outer else None
    return fields.get(key) if isinstance(fields, dict) else True


def _decode(raw: Raw) -> Any:
    try:
        return decode_json(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True  # whatever it is, it names something
