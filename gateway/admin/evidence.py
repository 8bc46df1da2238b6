"""What the admin listener shows of usage rows: experiments and rollouts.

Experiments are traffic splits with the outcomes of their versions, as ``interlingua ab`` compares
them.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

from aiohttp import web

from gateway.admin.http import AdminError, json_response
from gateway.config.schema import Config
from protocols.core.interfaces import Clock

_MAX_AGE: Final = 10.0
"""Seconds for which a result is shown again by default: it is some seconds of work."""


class EvidenceService:
    """Answers with a report on the usage rows, which it computes for one request at a time."""

    def __init__(
        self,
        name: str,
        compute: Callable[..., Sequence[object]],
        get_config: Callable[[], Config],
        clock: Clock,
        options: Mapping[str, Collection[str]] = MappingProxyType({}),
        *,
        max_age: float = _MAX_AGE,
    ) -> None:
        """``name`` is that of the report; ``get_config`` gives the current configuration.

        ``options`` are the parameters of a request with their values, which ``compute`` gets beside
        the configuration. ``max_age``: seconds for which a result is shown again.
        """
        self._max_age = max_age
        self._options = options
        self._name = name
        self._report = compute
        self._get_config = get_config
        self._clock = clock
        self._lock = asyncio.Lock()
        self._result: Sequence[object] = ()
        self._computed: tuple[float, Config, Mapping[str, str]] | None = None
        """The time of the result, its configuration, and its options."""

    async def handle(self, request: web.Request) -> web.Response:
        """Answer a GET."""
        config, options = self._get_config(), self._read_options(request)
        if config.observe.usage is None:
            text = "There are no usage rows to compare: the setting observe.usage records them."
            return json_response(HTTPStatus.OK, {self._name: [], "problem": text})
        async with self._lock:
            now, computed = self._clock(), self._computed
            if (
                computed is None
                or now - computed[0] >= self._max_age
                or computed[1:] != (config, options)
            ):
                self._result = await self._compute(config, options)
                self._computed = self._clock(), config, options
        return json_response(HTTPStatus.OK, {self._name: self._result, "problem": ""})

    def _read_options(self, request: web.Request) -> Mapping[str, str]:
        """The parameters of a request. Raises AdminError."""
        for name, value in request.query.items():
            if name not in self._options:
                raise AdminError(HTTPStatus.BAD_REQUEST, "there is no such parameter", name)
            if value not in self._options[name]:
                message = f"{value!r} is not one of {', '.join(self._options[name])}"
                raise AdminError(HTTPStatus.BAD_REQUEST, message, name)
        return dict(request.query)

    async def _compute(self, config: Config, options: Mapping[str, str]) -> Sequence[object]:
        try:
            return await asyncio.to_thread(self._report, config, **options)
        except Exception as error:  # noqa: BLE001 - of either database, neither of which is loaded
            message = f"the usage rows can't be read now ({type(error).__name__})"
            raise AdminError(HTTPStatus.SERVICE_UNAVAILABLE, message) from None
