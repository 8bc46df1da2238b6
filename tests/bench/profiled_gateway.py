"""The gateway under a sampling profiler that reads the stack every millisecond of CPU time.

``profiled_gateway.py OUT ARGUMENTS...`` runs ``python -m gateway ARGUMENTS...``. At the end it
writes each sampled stack to OUT, innermost function first, and its count.
"""

import atexit
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import msgspec

_EVERY = 0.001
"""Seconds of CPU time; the kernel's clock may be coarser."""


def main(out: Path, arguments: list[str]) -> None:
    """Run the gateway until it exits."""
    stacks = Counter[tuple[str, ...]]()

    def look(number: int, frame: FrameType | None) -> None:
        del number
        stack = []
        while frame is not None:
            stack.append(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        stacks[tuple(stack)] += 1

    atexit.register(lambda: out.write_bytes(msgspec.json.encode([*stacks.items()])))
    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, _EVERY, _EVERY)
    sys.argv[1:] = arguments
    runpy.run_module("gateway", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
