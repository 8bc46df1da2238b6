"""Asking workers about models, for dialects that have to know before they send a request."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from backends.pool.errand import fetch
from backends.pool.member import Member
from backends.upstream import Upstream
from gateway.core.context import Clock, Deadline
from gateway.core.errors import GatewayError
from gateway.core.ports import Learning, WireRequest

_SECONDS: Final = 2.0
"""How long one question may take, and how long a request waits for what is asked for its sake."""
_PAUSE: Final = 30.0
"""How long a model is not asked about again when nobody knew of it."""
_MOST: Final = 1024
"""Names of models that are kept in mind: where any name is taken, clients make them up."""


class Learner:
    """Knows which models the workers were asked about.

    What the dialect makes of the answers is its own; only how many requests a worker takes at a
    time is kept here, in its Member.
    """

    def __init__(
        self, dialect: Learning, models: Sequence[str], upstream: Upstream, clock: Clock
    ) -> None:
        self._dialect = dialect
        self._models = models
        self._upstream = upstream
        self._clock = clock
        self._until: dict[str, float] = {}
        """The models that need not be asked about before that moment."""
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def meet(self, member: Member) -> None:
        """Ask a worker that is there about every model of the pool."""
        for model in self._models:
            if model not in member.learned:
                await self._learn(member, model)

    def knows(self, model: str) -> bool:
        """Whether ``model`` need not be asked about now."""
        until = self._until.get(model)
        return until is not None and self._clock() < until

    async def know(self, model: str, members: Sequence[Member], deadline: Deadline) -> None:
        """Ask about ``model``, if nobody has yet: the first of ``members``, or else the second.

        Returns when that is known, or when it has taken too long. Raises DeadlineExceeded.
        """
        if not members or self.knows(model):
            return
        seconds = deadline.remaining(_SECONDS)
        task = self._asking.get(model)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask(model, members[:2]))
            self._asking[model] = task
            task.add_done_callback(lambda _: self._asking.pop(model))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(task)

    async def aclose(self) -> None:
        """Ask no more."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, model: str, members: Sequence[Member]) -> None:
        for member in members:
            if await self._learn(member, model):
                return
        self._remember(model, self._clock() + _PAUSE)

    async def _learn(self, member: Member, model: str) -> bool:
        """Whether the worker answered any of the questions, or there were none."""
        answers: list[bytes | None] = []
        answered = False
        for question in (questions := self._dialect.questions(model)):
            status, body = await self._answer(member, question)
            answered = answered or status is not None
            answers.append(body)
        if questions and not answered:
            return False
        told = self._dialect.learn(model, answers)
        member.learned.add(model)
        member.told.pop(model, None)
        if told is not None:
            member.told[model] = max(told, 1)
        self._remember(model, float("inf"))
        return True

    async def _answer(
        self, member: Member, question: WireRequest
    ) -> tuple[int | None, bytes | None]:
        try:
            status, body = await fetch(self._upstream, member.worker, question, _SECONDS)
        except GatewayError:
            return None, None
        return status, body if status == 200 else None  # noqa: PLR2004 - HTTP's word for yes

    def _remember(self, model: str, until: float) -> None:
        if len(self._until) >= _MOST and model not in self._until:
            del self._until[next(iter(self._until))]
        self._until[model] = until
