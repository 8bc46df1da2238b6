"""Where the gateway's time goes under a load: its functions, and its rooms.

What runs in C, the loop's own work and the kernel's among it, counts for the function of Python
that calls it, or that comes next.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from tests.bench import ours, running
from tests.bench.load_generator import Load
from tests.bench.targets import Gateway, Seat, Start, Way

_ROOT: Final = Path(__file__).parents[2]
_SAMPLED: Final = Path(__file__).with_name("sampled.py")
_HOUSE: Final = ("gateway", "backends", "protocols")
_LOOP: Final = "the event loop"
"""Where no function of Python is at work."""
_MOST: Final = 30
"""Functions that are told."""

Stacks = Sequence[tuple[Sequence[str], int]]
"""``file:function`` from the innermost on, and how often that was seen."""


def profiled(load: Load, way: Way) -> Stacks:
    """Put a load on the gateway, and look where it is. Raises RuntimeError where it fails.

    Only what the event loop runs counts, without what runs the loop.
    """
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        out = Path(folder) / "stacks.json"

        def start(seat: Seat) -> Start:
            told = ours.start(seat)
            _, _, _, *arguments = told.command  # what stands behind "python -m gateway"
            return replace(told, command=[sys.executable, str(_SAMPLED), str(out), *arguments])

        one = Gateway(name="profiled", start=start, version=ours.OURS.version, ways=(way,))
        plan = running.Plan(
            gateways=[one], loads=[load], rounds=1, seconds=60, group=1, tries=1, streams=False
        )
        found = running.run(plan, lambda _: None)
        wrong = [*found.missing.values(), *(s.outcome.why for s in found.samples if s.outcome.why)]
        if wrong or not out.exists():
            raise RuntimeError(f"no profile: {wrong[0] if wrong else 'it did not end by itself'}")
        stacks = msgspec.json.decode(out.read_bytes(), type=list[tuple[list[str], int]])
    return [
        ([*takewhile(lambda one: not _is_loop(one), stack)], count)
        for stack, count in stacks
        if any(map(_is_loop, stack))
    ]


def told(stacks: Stacks) -> Iterator[str]:
    """Lines: the share of each room of the house, and of the functions that have most."""
    rooms, functions = Counter[str](), Counter[str]()
    for stack, count in stacks:
        own = next(filter(None, map(_placed, stack)), "")
        rooms[_room(own)] += count
        functions[_placed(stack[0]) or _foreign(stack[0]) if stack else _LOOP] += count
    total = max(rooms.total(), 1)
    yield f"{total} looks"
    for what, counts in (("room", rooms), ("function", functions)):
        yield f"\n  share  {what}"
        for name, count in counts.most_common(_MOST):
            yield f"{count / total:7.1%}  {name}"


def _placed(entry: str) -> str:
    """A function of the house, by its path there; "" of others."""
    file, _, function = entry.rpartition(":")
    path = Path(file)
    if not path.is_relative_to(_ROOT) or path.relative_to(_ROOT).parts[0] not in _HOUSE:
        return ""
    return f"{path.relative_to(_ROOT)}:{function}"


def _room(place: str) -> str:
    """The folder, or the file where that is of the first row."""
    return "/".join(place.partition(":")[0].split("/")[:2]) or _LOOP


def _foreign(entry: str) -> str:
    file, _, function = entry.rpartition(":")
    return f"{Path(file).name}:{function}"


def _is_loop(entry: str) -> bool:
    return entry.endswith((":Runner.run", ":BaseEventLoop.run_forever"))
