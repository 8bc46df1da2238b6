"""One memory budget for all that clients make a process hold."""

import pytest

from gateway.memory import MemoryBudget
from protocols.core.errors import Overloaded


class Connections:
    """Waiting connections: their rates, and the bytes that each holds."""

    min_rate = 10.0

    def __init__(self, memory: MemoryBudget, rates: list[float], idle: int = 0) -> None:
        self._memory = memory
        self.rates = rates
        self.idle = idle
        for _ in rates:
            memory.record_held("responses", 100)
        memory.record_held("connections", 10 * idle)
        memory.listeners.add(self)

    def get_slowest_rate(self) -> float | None:
        return min(self.rates, default=None)

    def close_slowest(self) -> None:
        self.rates.remove(min(self.rates))
        self._memory.record_held("responses", -100)

    def close_idle_longest(self) -> bool:
        if not self.idle:
            return False
        self.idle -= 1
        self._memory.record_held("connections", -10)
        return True


def test_all_uses_share_one_limit() -> None:
    memory = MemoryBudget(100)
    memory.reserve("bodies", 40)
    memory.record_held("responses", 30)
    memory.measure_waiting = lambda: 20

    assert memory.has_room(10)
    assert not memory.has_room(11)
    with pytest.raises(Overloaded, match=r"limits\.memory") as raised:
        memory.reserve("bodies", 11)
    assert raised.value.retry_after

    memory.release("bodies", 40)
    status = memory.get_status()
    assert status.uses == {"bodies": 0, "responses": 30, "recordings": 20, "connections": 0}
    assert (status.limit, status.used, status.refused, status.closed) == (100, 50, 1, 0)
    assert repr(memory) == "<MemoryBudget 50 of 100 bytes>"


def test_memory_is_released_beyond_the_limit() -> None:
    """It was lowered, or connections hold more than it: that is no reason to keep what is free."""
    memory = MemoryBudget(100)
    memory.reserve("responses", 90)
    memory.limit = 50

    memory.reserve("responses", -30)

    status = memory.get_status()
    assert (status.used, status.refused, status.closed) == (60, 0, 0)


def test_slowest_connections_of_all_listeners_make_room() -> None:
    memory = MemoryBudget(500)
    first, second = Connections(memory, [5.0, 1.0]), Connections(memory, [2.0, 9.0])

    assert memory.try_take("bodies", 250)

    assert (first.rates, second.rates) == ([5.0], [9.0])
    assert memory.get_status().closed == 2


def test_announced_bytes_close_slow_connections_and_no_others() -> None:
    memory = MemoryBudget(400)
    waiting = Connections(memory, [20.0, 1.0, 30.0])

    memory.ensure_room(200)

    assert waiting.rates == [20.0, 30.0]
    assert memory.used == 200

    with pytest.raises(Overloaded, match=r"limits\.memory"):
        memory.ensure_room(201)
    assert waiting.rates == [20.0, 30.0]
    assert memory.get_status().refused == 1


def test_what_is_held_already_closes_slow_connections_beyond_the_limit() -> None:
    memory = MemoryBudget(300)
    waiting = Connections(memory, [1.0, 2.0])

    memory.record_held("responses", 150)

    assert waiting.rates == [2.0]
    assert memory.used == 250


def test_idle_connections_make_room_only_where_connections_hold_much() -> None:
    few, many = MemoryBudget(1000), MemoryBudget(1000)
    of_few, of_many = Connections(few, [], idle=25), Connections(many, [], idle=50)

    few.record_held("responses", 760)
    many.record_held("responses", 520)
    assert (of_few.idle, of_many.idle) == (25, 48)

    assert not many.try_take("bodies", 100), "one of them may be the one that sends it"
    assert of_many.idle == 48


def test_client_that_is_not_slow_is_closed_last() -> None:
    memory = MemoryBudget(1000)
    waiting = Connections(memory, [10.0, 9.0, 5e6], idle=40)

    memory.record_held("responses", 330)
    assert (waiting.rates, waiting.idle) == ([10.0, 5e6], 40), "the slow one"

    memory.record_held("responses", 90)
    assert (waiting.rates, waiting.idle) == ([10.0, 5e6], 38), "idle ones"

    assert memory.try_take("bodies", 100)
    assert (waiting.rates, waiting.idle) == ([5e6], 38), "there is no other"
