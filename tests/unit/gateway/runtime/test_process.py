"""The set-up of a serving process."""

import gc
import sys

from gateway.runtime.process import tune_interpreter


def test_threads_give_the_interpreter_lock_to_the_event_loop_soon() -> None:
    """A request takes some ten turns: at Python's 5 ms, each thread would delay it by 50 ms."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    try:
        tune_interpreter()
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)


def test_a_pass_of_the_garbage_collector_over_new_objects_is_short() -> None:
    """Each object takes about a microsecond, in which no thread runs."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    try:
        tune_interpreter()
        youngest, middle, _ = gc.get_threshold()
        assert youngest * (middle + 1) <= 50_000
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
