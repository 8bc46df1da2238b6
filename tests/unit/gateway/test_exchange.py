"""What an exchange records while it passes on."""

from collections.abc import Sequence

import pytest

from gateway.core.context import Context, Deadline
from gateway.core.loss import Loss
from gateway.core.ports import Encoder, Headers, Pieces, Reply, Take
from gateway.core.types import (
    CallStart,
    Done,
    End,
    Event,
    PromptEcho,
    Request,
    Start,
    Text,
    Thought,
    Usage,
)
from gateway.exchange import Exchange
from gateway.telemetry import Record


class Clock:
    """Goes on by a second with each batch."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Batches:
    """An answer whose every batch has its bytes; all but the first are given, if it ``pours``."""

    losses: tuple[Loss, ...] = ()

    def __init__(
        self, clock: Clock, *batches: tuple[bytes, Sequence[Event]], pours: bool = False
    ) -> None:
        self._pours = pours
        self._clock = clock
        self._batches = batches

    @property
    def request(self) -> Request:
        raise AssertionError

    def encoder(self) -> Encoder:
        raise AssertionError

    def opening(self) -> Headers:
        return ()

    def heard(self, events: Sequence[Event]) -> Sequence[Event]:
        return events

    def whole(self, events: Sequence[Event], body: bytes | None) -> Reply:
        raise AssertionError

    async def pieces(self, take: Take | None = None) -> Pieces:
        for number, batch in enumerate(self._batches):
            self._clock.now += 1
            if number and self._pours:
                assert take is not None
                assert take(*batch)
            else:
                yield batch
        yield None, ()


class Sink:
    """Takes it all."""

    started = False
    pressure = False

    def start(self, status: int, headers: Headers) -> None:
        self.started = True

    def write(self, data: bytes) -> None:
        """Forgotten."""

    def finish(self) -> None:
        """Nothing follows."""

    async def drain(self) -> None:
        raise AssertionError


END = (b"end", [End("stop"), End("length", 1), Usage(1, 2), Done()])


@pytest.mark.parametrize(
    ("batches", "first_byte", "first_token"),
    [
        ([(b"t", [Text("a")]), END], 1.0, 1.0),
        ([(b"h", [Start()]), (b"t", [Text("a")]), (b"t", [Text("b")]), END], 1.0, 2.0),
        ([(b"h", [PromptEcho(0, "p")]), (b"t", [Thought("a")]), END], 1.0, 2.0),
        ([(b"", [Text("held back")]), (b"c", [CallStart(0, 0, "id", "f")]), END], 2.0, 2.0),
        ([(b"h", [Start()]), END], 1.0, None),
    ],
)
@pytest.mark.parametrize("pours", [False, True], ids=["read", "poured"])
async def test_the_first_token_is_not_the_heading(
    batches: list[tuple[bytes, Sequence[Event]]],
    first_byte: float,
    first_token: float | None,
    *,
    pours: bool,
) -> None:
    clock, record = Clock(), Record("r")
    context = Context("r", Deadline(clock, 60.0), clock, began=100.0)

    await Exchange(Batches(clock, *batches, pours=pours), context, Sink(), record).run(stream=True)

    assert (record.first_byte, record.first_token) == (first_byte, first_token)
    assert record.finish == ("stop", "length")
    assert record.usage == Usage(1, 2)
