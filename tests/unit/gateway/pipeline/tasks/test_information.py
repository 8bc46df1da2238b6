"""Requests that load the models of several backends."""

import pytest

from gateway.pipeline.tasks.information import _complete_all
from protocols.core.errors import WorkerUnreachable


async def test_all_models_are_loaded_before_the_first_error_is_raised() -> None:
    loaded: list[str] = []

    async def load(name: str, error: str = "") -> bool:
        if error:
            raise WorkerUnreachable(error)
        loaded.append(name)
        return True

    with pytest.raises(WorkerUnreachable, match="first"):
        await _complete_all([load("a", "first"), load("b"), load("c", "second"), load("d")])

    assert loaded == ["b", "d"]
