"""Several choices, prompts or inputs, for a worker that takes them one at a time.

Each is a request of its own, and their answers are one: choice ``i`` of prompt ``p`` is ``p * n +
i`` however it was asked for.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import Event, ResponseMetadata, StreamEnd, StreamStart, Timing, Usage
from protocols.core.request import EmbeddingRequest, GenerationRequest, Prompt, Request

FAN_OUT_FIELDS: Final = frozenset({"n", "prompts", "inputs"})
"""The paths that are made up for by more than one request."""
_SEED_COUNT: Final = 2**64


class RequestPart(Struct, frozen=True):
    """One of the requests. ``places`` are its choices' (or vectors') indexes in the whole answer.

    Parts of one ``group`` have the same prompt.
    """

    request: Request
    number: int
    group: int
    indexes: tuple[int, ...]


class FanOut:
    """A request as parts, which are made when they are needed: there may be thousands.

    Copies of a prompt have seeds of their own, if the client gave one: the seed and the copy's
    number, so that they differ, and the same request has the same answer again.
    """

    def __init__(self, request: Request, does: Collection[str]) -> None:
        """``does``: the paths that are made up for."""
        self._request = request
        name, said = _read_prompts(request)
        self._prompt_groups: list[tuple[Prompt, ...]] = [said]
        if said and name in does:
            self._prompt_groups = [(one,) for one in said]
        self._choice_count = request.n or 1 if isinstance(request, GenerationRequest) else 1
        self._splits_choices = "n" in does
        self._copies = self._choice_count if self._splits_choices else 1

    @property
    def group_count(self) -> int:
        """How many different prompts, or sets of them, the parts have."""
        return len(self._prompt_groups)

    def __len__(self) -> int:
        """How many parts there are."""
        return len(self._prompt_groups) * self._copies

    def __iter__(self) -> Iterator[RequestPart]:
        before, each = 0, self._choice_count // self._copies
        for group, row in enumerate(self._prompt_groups):
            prompts = range(before, before + max(len(row), 1))
            for copy in range(self._copies):
                places = tuple(
                    p * self._choice_count + copy + i for p in prompts for i in range(each)
                )
                number = group * self._copies + copy
                yield RequestPart(self._build_request(row, copy), number, group, places)
            before += len(row)

    def _build_request(self, row: tuple[Prompt, ...], copy: int) -> Request:
        request = self._request
        if isinstance(request, EmbeddingRequest):
            return replace(request, inputs=row)
        if not self._splits_choices:
            return replace(request, prompts=row)
        sampling = request.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + copy) % _SEED_COUNT)
        best = request.best_of if (request.best_of or 0) > self._choice_count else None
        return replace(request, prompts=row, n=None, best_of=best, sampling=sampling)


def _read_prompts(request: Request) -> tuple[str, tuple[Prompt, ...]]:
    if isinstance(request, EmbeddingRequest):
        return "inputs", request.inputs
    return "prompts", request.prompts


class FanIn:
    """The parts' events as those of one answer: one Start, one usage, one Done."""

    def __init__(self, spread: FanOut, *, running: bool) -> None:
        """``running``: usage is told whenever a part tells it."""
        self._group_count = spread.group_count
        self._parts_left = len(spread)
        self._reports_running_usage = running
        self._total = _UsageTotal()
        self._started = False
        self._has_metadata = False

    def apply(self, part: RequestPart, events: Sequence[Event]) -> list[Event]:
        """The events of ``part``. Raises WorkerFailed for a choice that it does not have."""
        out: list[Event] = []
        for event in events:
            match event:
                case StreamStart(tokens):
                    if not self._started:
                        out.append(StreamStart(tokens if self._group_count == 1 else None))
                case Usage():
                    self._total.add(part, event)
                    if self._reports_running_usage:
                        out.append(self._total.usage)
                case ResponseMetadata():
                    if not self._has_metadata:
                        out.append(event)
                    self._has_metadata = True
                case Timing():
                    if part.number == 0:  # a list of steps is one choice's
                        out.append(event)
                case StreamEnd():
                    self._parts_left -= 1
                case _:
                    out.append(replace(event, index=_map_index(part, event.index)))
            self._started = True
        return out

    def finish(self) -> list[Event]:
        """The end of the answer. Raises StreamBroken unless every part came to its own."""
        if self._parts_left:
            raise StreamBroken("the answer stopped before its end")
        return [StreamEnd()] if self._reports_running_usage else [self._total.usage, StreamEnd()]


def _map_index(part: RequestPart, index: int) -> int:
    try:
        return part.indexes[index]
    except IndexError:
        raise WorkerFailed("the worker answered with a choice that was not asked for") from None


_SOURCE_RANKS: Final[Mapping[str, int]] = {"worker": 0, "counted": 1, "estimated": 2}
_ZERO_USAGE: Final = Usage(0)


class _UsageTotal:
    """What all parts spent. A prompt counts once, however many copies there are of it."""

    def __init__(self) -> None:
        self.usage = _ZERO_USAGE
        self._by_part: dict[int, Usage] = {}
        self._prompt_parts: dict[int, int] = {}
        """Which part tells of each group's prompt: the first that told anything."""

    def add(self, part: RequestPart, told: Usage) -> None:
        """``told`` takes the place of what the part told before."""
        old = self._by_part.get(part.number, _ZERO_USAGE)
        self._by_part[part.number] = told
        total = self.usage
        changed: dict[str, Any] = {
            "completion_tokens": total.completion_tokens
            + told.completion_tokens
            - old.completion_tokens,
            "reasoning_tokens": _replace_in_sum(
                total.reasoning_tokens, told.reasoning_tokens, old.reasoning_tokens
            ),
            "source": max(total.source, told.source, key=_SOURCE_RANKS.__getitem__),
        }
        if self._prompt_parts.setdefault(part.group, part.number) == part.number:
            changed["prompt_tokens"] = total.prompt_tokens + told.prompt_tokens - old.prompt_tokens
            changed["cached_tokens"] = _replace_in_sum(
                total.cached_tokens, told.cached_tokens, old.cached_tokens
            )
        self.usage = replace(total, **changed)


def _replace_in_sum(total: int | None, told: int | None, old: int | None) -> int | None:
    """``total`` with ``told`` in place of ``old``; None is what nobody told."""
    return total if told is None else (total or 0) + told - (old or 0)
