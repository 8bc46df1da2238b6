"""The experiments of the admin listener: traffic splits with the outcomes of their versions.

The comparison is that of ``interlingua ab``. Its code is loaded by its name on the first request,
so that it costs a gateway nothing whose operators do not ask.
"""

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from gateway.admin.api import AdminError, json_response
from gateway.config.registry import load_symbol
from gateway.config.schema import Config
from protocols.core.interfaces import Clock

_LIST_EXPERIMENTS: Final = "gateway.tools.ab.experiments:list_experiments"
_MAX_AGE: Final = 10.0
"""Seconds for which a result is shown again: it is some seconds of work."""


class ExperimentService:
    """Compares the versions of all traffic splits, one request at a time."""

    def __init__(self, get_config: Callable[[], Config], clock: Clock) -> None:
        """``get_config`` gives the current configuration."""
        self._get_config = get_config
        self._clock = clock
        self._lock = asyncio.Lock()
        self._result: Sequence[Any] = ()
        self._computed: tuple[float, Config] | None = None
        """The time of the result, and its configuration."""

    async def handle(self, request: web.Request) -> web.Response:
        """Answer ``GET /-/experiments``."""
        del request
        config = self._get_config()
        if config.observe.usage is None:
            text = "There are no usage rows to compare: the setting observe.usage records them."
            return json_response(HTTPStatus.OK, {"experiments": [], "problem": text})
        async with self._lock:
            now, computed = self._clock(), self._computed
            if computed is None or now - computed[0] >= _MAX_AGE or computed[1] is not config:
                self._result = await self._compute(config)
                self._computed = self._clock(), config
        return json_response(HTTPStatus.OK, {"experiments": self._result, "problem": ""})

    async def _compute(self, config: Config) -> Sequence[Any]:
        list_experiments = load_symbol(_LIST_EXPERIMENTS)
        try:
            result: Sequence[Any] = await asyncio.to_thread(list_experiments, config)
        except Exception as error:  # noqa: BLE001 - of either database, neither of which is loaded
            message = f"the usage rows can't be read now ({type(error).__name__})"
            raise AdminError(HTTPStatus.SERVICE_UNAVAILABLE, message) from None
        return result
