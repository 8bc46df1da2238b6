"""What is held to measure a response counts in the memory budget, and is given back."""

from gateway.memory import MemoryBudget
from gateway.pipeline.measures import BudgetedMeasure
from protocols.core.events import ChoiceEnd, StreamEnd, TextDelta

BODY = b'{"messages": [{"role": "user", "content": "Hi"}]}'


def test_events_are_held_until_the_response_is_measured_and_released() -> None:
    memory = MemoryBudget()
    response = BudgetedMeasure(memory, BODY)
    response.add_events([TextDelta("x" * 1000)])
    assert memory.get_use("recordings") > 1000
    response.add_events([ChoiceEnd("eos"), StreamEnd()])
    assert response.measures == {"not_truncated": True, "not_refused": True, "not_empty": True}
    response.release()
    response.release()
    assert memory.get_use("recordings") == 0


def test_response_without_room_is_not_measured() -> None:
    memory = MemoryBudget(1000)
    response = BudgetedMeasure(memory, BODY)
    response.add_events([TextDelta("x")])
    response.add_events([TextDelta("x" * 1000)])
    response.add_events([ChoiceEnd("eos"), StreamEnd()])
    assert response.measures == {}
    response.release()
    assert memory.used == 0
