"""OpenVINO Model Server: cases OV-01 to OV-50, under ``/v3`` and, where mounted, under ``/v1``."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from gateway.conformance.cases import Case
from gateway.conformance.ovms.answers import ANSWERS
from gateway.conformance.ovms.refusals import REFUSALS

__all__ = ["CASES"]

_V3 = tuple(case for case in (*ANSWERS, *REFUSALS) if case.path.startswith("/v3/"))


def _under(root: str, cases: Iterable[Case], needs: Mapping[str, Any]) -> Iterator[Case]:
    """The same cases under another root."""
    for case in cases:
        path = root + case.path.removeprefix("/v3")
        yield replace(case, id=f"{case.id} {root}", path=path, needs={**case.needs, **needs})


CASES = (
    *ANSWERS,
    *REFUSALS,
    *_under("/v1", _V3, {"v1": True}),
    *_under("/v3/v1", (case for case in _V3 if case.number in {"OV-01", "OV-46", "OV-48"}), {}),
)
