"""The functions and packages in which the gateway spends its time under a load.

C code, including the event loop and the kernel, counts for the Python function that calls it or
that comes next.
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

from tests.bench import interlingua, runner
from tests.bench.gateways import Gateway, LaunchCommand, LaunchContext, ProtocolPair
from tests.bench.loads import Load

_ROOT: Final = Path(__file__).parents[2]
_PROFILED_GATEWAY: Final = Path(__file__).with_name("profiled_gateway.py")
_PACKAGES: Final = ("gateway", "backends", "protocols")
_LOOP: Final = "the event loop"
"""No Python function is running."""
_LISTED: Final = 30
"""The number of listed functions."""

Stacks = Sequence[tuple[Sequence[str], int]]
"""``file:function`` from the innermost on, and the number of samples."""


def record_profile(load: Load, pair: ProtocolPair) -> Stacks:
    """Run a load on the gateway and sample its stacks. Raises RuntimeError on failure.

    Only what the event loop runs counts, without the code that runs the loop.
    """
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        out = Path(folder) / "stacks.json"

        def start(context: LaunchContext) -> LaunchCommand:
            command = interlingua.start(context)
            _, _, _, *arguments = command.command  # after "python -m gateway"
            return replace(
                command, command=[sys.executable, str(_PROFILED_GATEWAY), str(out), *arguments]
            )

        one = Gateway(
            name="profiled", start=start, version=interlingua.INTERLINGUA.version, pairs=(pair,)
        )
        plan = runner.Plan(
            gateways=[one], loads=[load], rounds=1, seconds=60, group_size=1, attempts=1
        )
        results = runner.run(plan, lambda _: None)
        wrong = [
            *results.missing.values(),
            *(s.outcome.last_error for s in results.samples if s.outcome.errors),
        ]
        if wrong or not out.exists():
            raise RuntimeError(f"no profile: {wrong[0] if wrong else 'it did not end by itself'}")
        stacks = msgspec.json.decode(out.read_bytes(), type=list[tuple[list[str], int]])
    return [
        ([*takewhile(lambda one: not _is_loop(one), stack)], count)
        for stack, count in stacks
        if any(map(_is_loop, stack))
    ]


def format_profile(stacks: Stacks) -> Iterator[str]:
    """Format the shares of each package, and of the functions with the largest shares."""
    packages, functions = Counter[str](), Counter[str]()
    for stack, count in stacks:
        own = next(filter(None, map(_find_place, stack)), "")
        packages[_find_package(own)] += count
        functions[_find_place(stack[0]) or _format_library(stack[0]) if stack else _LOOP] += count
    total = max(packages.total(), 1)
    yield f"{total} samples"
    for what, counts in (("package", packages), ("function", functions)):
        yield f"\n  share  {what}"
        for name, count in counts.most_common(_LISTED):
            yield f"{count / total:7.1%}  {name}"


def _find_place(entry: str) -> str:
    """Return a function of this project by its path, "" for others."""
    file, _, function = entry.rpartition(":")
    path = Path(file)
    if not path.is_relative_to(_ROOT) or path.relative_to(_ROOT).parts[0] not in _PACKAGES:
        return ""
    return f"{path.relative_to(_ROOT)}:{function}"


def _find_package(place: str) -> str:
    """Return the folder, or the file if it is at the top."""
    return "/".join(place.partition(":")[0].split("/")[:2]) or _LOOP


def _format_library(entry: str) -> str:
    file, _, function = entry.rpartition(":")
    return f"{Path(file).name}:{function}"


def _is_loop(entry: str) -> bool:
    return entry.endswith((":Runner.run", ":BaseEventLoop.run_forever"))
