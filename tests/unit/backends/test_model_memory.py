"""The memory that local models share: the least recently used make room."""

import asyncio

import pytest

from backends.model_memory import ModelMemory

pytestmark = pytest.mark.asyncio


class ModelStub:
    """A model whose running request ends when the test says so."""

    def __init__(self, memory: ModelMemory, last_used: float, *, idle: bool = True) -> None:
        self._memory = memory
        self.last_used = last_used
        self.idle = idle
        self.unload_count = 0
        self.drained = asyncio.Event()
        if idle:
            self.drained.set()

    async def unload(self) -> None:
        self.unload_count += 1
        await self.drained.wait()
        self._memory.release(self)


async def test_least_recently_used_models_make_room() -> None:
    memory = ModelMemory(100)
    models = [ModelStub(memory, last_used) for last_used in (3.0, 1.0, 2.0)]
    for model in models:
        await memory.reserve(model, 30)
    await memory.reserve(ModelStub(memory, 0.0), 60)
    assert [model.unload_count for model in models] == [0, 1, 1]


async def test_idle_model_is_unloaded_before_one_that_was_used_earlier() -> None:
    memory = ModelMemory(100)
    busy, idle = ModelStub(memory, 1.0, idle=False), ModelStub(memory, 2.0)
    for model in (busy, idle):
        await memory.reserve(model, 50)
    await memory.reserve(ModelStub(memory, 0.0), 50)
    assert (busy.unload_count, idle.unload_count) == (0, 1)


async def test_reservation_waits_for_a_busy_model_and_later_ones_for_their_turn() -> None:
    memory = ModelMemory(100)
    busy = ModelStub(memory, 1.0, idle=False)
    await memory.reserve(busy, 80)
    first = asyncio.ensure_future(memory.reserve(ModelStub(memory, 2.0), 80))
    second = asyncio.ensure_future(memory.reserve(ModelStub(memory, 3.0), 10))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (first.done(), second.done()) == (False, False)
    busy.drained.set()
    await asyncio.gather(first, second)
    assert busy.unload_count == 1


async def test_corrected_size_unloads_others_and_not_the_model_itself() -> None:
    memory = ModelMemory(100)
    other, model = ModelStub(memory, 1.0), ModelStub(memory, 2.0)
    await memory.reserve(other, 40)
    await memory.reserve(model, 40)
    await memory.reserve(model, 90)
    assert (other.unload_count, model.unload_count) == (1, 0)


async def test_nothing_is_unloaded_without_a_limit() -> None:
    memory = ModelMemory()
    model = ModelStub(memory, 1.0)
    for one in (model, ModelStub(memory, 2.0)):
        await memory.reserve(one, 1 << 60)
    assert model.unload_count == 0
