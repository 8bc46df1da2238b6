"""The usage of the admin listener: sums of the recorded requests, and their course over time.

Both are read from the store of ``observe.usage``, in a thread, one query at a time.
"""

import asyncio
import csv
import io
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from gateway.admin.http import AdminError, json_response
from gateway.config.schema import ObservabilityConfig, UsageConfig
from gateway.observability.usage import (
    UsageInterval,
    UsageTotal,
    query_sqlite_intervals,
    query_sqlite_usage,
)
from protocols.core.interfaces import Clock

_DAY: Final = 86400.0
_MAX_GROUPS: Final = 20_000
_RANGES: Final[Mapping[str, tuple[float, int]]] = {"6h": (120.0, 180), "7d": (3600.0, 168)}
"""Seconds of one interval, and how many intervals are shown."""
_NO_STORE: Final = "No usage is recorded: observe.usage must name a file or a database for it."
_GROUPS: Final = ("day", "key", "model")
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")
ResultT = TypeVar("ResultT")


class _SumQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of ``GET /-/usage``."""

    days: Annotated[int, Meta(ge=1, le=3660)] = 30
    by: str = ",".join(_GROUPS)
    format: Literal["json", "csv"] = "json"

    def list_groups(self) -> Sequence[str]:
        """Raises AdminError."""
        names = list(dict.fromkeys(self.by.split(",")))
        for name in names:
            if name not in _GROUPS:
                message = f"{name!r} is not one of {', '.join(_GROUPS)}"
                raise AdminError(HTTPStatus.BAD_REQUEST, message, "by")
        return names


class _HistoryQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of ``GET /-/usage/history``."""

    range: Literal["6h", "7d"] = "6h"


class VersionPoints(Struct):
    """The intervals of a version; those without requests have no point."""

    model: str
    version: str
    points: list[UsageInterval]


class UsageApi:
    """The paths for usage."""

    def __init__(self, get_settings: Callable[[], ObservabilityConfig], wall_clock: Clock) -> None:
        """``get_settings`` gives those of the current configuration."""
        self._get_settings = get_settings
        self._wall_clock = wall_clock
        self._lock = asyncio.Lock()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the paths."""
        router.add_get("/-/usage", self._get_sums)
        router.add_get("/-/usage/history", self._get_history)

    async def _get_sums(self, request: web.Request) -> web.Response:
        query = _read_query(request, _SumQuery)
        groups = query.list_groups()
        store = self._get_settings().usage
        since = _DAY * (self._wall_clock() // _DAY - query.days + 1)
        totals = await self._query(lambda: _read_sums(store, groups, since))
        if len(totals) > _MAX_GROUPS:
            message = f"there are more than {_MAX_GROUPS} groups: choose fewer days or fewer groups"
            raise AdminError(HTTPStatus.BAD_REQUEST, message, "days")
        if query.format == "csv":
            return _csv_response(groups, totals)
        problem = _NO_STORE if store is None else ""
        return json_response(HTTPStatus.OK, {"problem": problem, "since": since, "totals": totals})

    async def _get_history(self, request: web.Request) -> web.Response:
        interval, count = _RANGES[_read_query(request, _HistoryQuery).range]
        store = self._get_settings().usage
        end = int(self._wall_clock() // interval) + 1
        since = (end - count) * interval
        points = await self._query(lambda: _read_intervals(store, interval, since))
        versions: dict[tuple[str, str], VersionPoints] = {}
        for point in points:
            key = point.model, point.version
            versions.setdefault(key, VersionPoints(*key, [])).points.append(point)
        return json_response(
            HTTPStatus.OK,
            {
                "problem": _NO_STORE if store is None else "",
                "interval": interval,
                "end": end,
                "intervals": count,
                "versions": list(versions.values()),
            },
        )

    async def _query(self, read: Callable[[], ResultT]) -> ResultT:
        async with self._lock:
            try:
                return await asyncio.to_thread(read)
            except Exception as error:  # noqa: BLE001 - of either database, neither of which is loaded
                message = f"the usage rows can't be read now ({type(error).__name__})"
                raise AdminError(HTTPStatus.SERVICE_UNAVAILABLE, message) from None


QueryT = TypeVar("QueryT", bound=Struct)


def _read_query(request: web.Request, kind: type[QueryT]) -> QueryT:
    """The parameters in the URL. Raises AdminError."""
    values: dict[str, str] = {}
    for name, value in request.query.items():
        if name in values or name not in kind.__struct_fields__:
            message = "it is given twice" if name in values else "there is no such parameter"
            raise AdminError(HTTPStatus.BAD_REQUEST, message, name)
        values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        raise AdminError(HTTPStatus.BAD_REQUEST, text, path.rstrip("`") or None) from None


def _read_sums(store: UsageConfig | None, groups: Sequence[str], since: float) -> list[UsageTotal]:
    limit = _MAX_GROUPS + 1
    if store is None:
        return []
    if store.postgres is not None:
        from gateway.observability.usage_postgres import (  # noqa: PLC0415 - optional
            query_postgres_usage,
        )

        return query_postgres_usage(store.postgres.reveal(), groups, since, limit)
    assert store.sqlite is not None  # noqa: S101 - the loader refuses rows without a place
    return query_sqlite_usage(store.sqlite, groups, since, limit)


def _read_intervals(
    store: UsageConfig | None, interval: float, since: float
) -> list[UsageInterval]:
    if store is None:
        return []
    if store.postgres is not None:
        from gateway.observability.usage_postgres import (  # noqa: PLC0415 - optional
            query_postgres_intervals,
        )

        return query_postgres_intervals(store.postgres.reveal(), interval, since)
    assert store.sqlite is not None  # noqa: S101 - as above
    return query_sqlite_intervals(store.sqlite, interval, since)


def _csv_response(groups: Sequence[str], totals: Sequence[UsageTotal]) -> web.Response:
    text = io.StringIO()
    writer = csv.writer(text)
    numbers = [name for name in UsageTotal.__struct_fields__ if name != "by"]
    writer.writerow([*groups, *numbers])
    for total in totals:
        names = (_as_text(total.by[name]) for name in groups)
        writer.writerow([*names, *(getattr(total, name) for name in numbers)])
    return web.Response(
        body=text.getvalue().encode(),
        headers={
            "Content-Type": "text/csv; charset=utf-8",
            "Content-Disposition": 'attachment; filename="usage.csv"',
        },
    )


def _as_text(value: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{value}" if value.startswith(_FORMULA_STARTS) else value
