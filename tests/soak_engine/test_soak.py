"""A short soak test of the engine; the long one is ``python -m tests.soak_engine``."""

from pathlib import Path
from typing import Any

import pytest

from protocols.core.events import ChoiceEnd, Event, StreamEnd, Usage
from protocols.core.request import GenerationRequest
from tests.soak_engine.soak_run import SLACK, Checkpoint, check_complete, check_flat, run_soak
from tests.support.tiny_model import byte_tokenizer, tiny_llama

REQUEST = GenerationRequest(model="m", kind="completion", prompts=("x",), n=2)
RIGHT: list[Event] = [ChoiceEnd("stop"), ChoiceEnd("length", 1), Usage(1, 2), StreamEnd()]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_many_short_requests_do_not_leak(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)

    done = await run_soak(str(tmp_path), 1500, 6, seed=1)

    assert sum(done.ends.values()) == 1500
    assert done.ends["done"] > 600
    assert done.ends["left"] > 150
    assert {"DeadlineExceeded", "InvalidParameter"} <= done.ends.keys()
    assert not done.ends.keys() & {"StreamBroken", "WorkerFailed", "InternalError"}
    check_flat(done.checkpoints, 2)


@pytest.mark.parametrize(
    "events",
    [RIGHT[1:], [RIGHT[0], *RIGHT], RIGHT[:-1], [*RIGHT, StreamEnd()], [StreamEnd(), *RIGHT[:-1]]],
    ids=["an end too few", "an end too many", "no Done", "two of them", "one too early"],
)
def test_incomplete_response_fails_the_check(events: list[Event]) -> None:
    check_complete(REQUEST, RIGHT)
    with pytest.raises(AssertionError):
        check_complete(REQUEST, events)


@pytest.mark.parametrize("grown", [{"gateway_memory": SLACK}, {"engine": SLACK}, {"tasks": 3}])
def test_growth_fails_the_check(grown: dict[str, Any]) -> None:
    first = Checkpoint(10, 0, 0, 2)
    fields = {"requests": 20, "gateway_memory": 0, "engine": 0, "tasks": 2, **grown}

    check_flat([first, Checkpoint(20, 0, 0, 2)], 0)
    with pytest.raises(AssertionError):
        check_flat([first, Checkpoint(**fields)], 0)
