"""A request leaves nothing behind that only the garbage collector would free.

What a cycle holds (prompts, bodies, responses) stays in memory until the collector runs, and makes
each of its runs longer.
"""

import asyncio
import gc
from collections import Counter
from pathlib import Path

import pytest
import uvloop

from tests.integration import test_call_counts as call_counts

REQUESTS = 20
PAIRS = [*call_counts.STATED, ("triton", "triton")]


@pytest.mark.parametrize(("client", "protocol"), PAIRS)
def test_requests_leave_no_reference_cycle(
    client: str, protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Counter[str]()

    def send_requests(caller: call_counts.Client, client: str, protocol: str) -> call_counts.Calls:
        def send() -> None:
            for _ in range(REQUESTS):
                caller.unary(client, protocol)
                caller.stream(client, protocol)

        send()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            send()
            gc.collect()
            left.update(type(one).__name__ for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        return call_counts.Calls(0, 0, 0)

    monkeypatch.setattr(call_counts, "count_fewest_calls", send_requests)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(call_counts.measure_calls(client, protocol, tmp_path))

    assert not {name: count for name, count in left.items() if count >= REQUESTS}
