"""Several choices, prompts or inputs, for a worker that takes one at a time.

Each becomes a request of its own, and their responses are merged into one: choice ``i`` of prompt
``p`` has the index ``p * n + i`` in any case.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import (
    DetokenizedText,
    Event,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    Timing,
    TokenList,
    Usage,
)
from protocols.core.request import EmbeddingRequest, GenerationRequest, Prompt, Request

FAN_OUT_FIELDS: Final = frozenset({"n", "prompts", "inputs"})
"""The fields that are emulated by several requests."""
_SEED_COUNT: Final = 2**64


class RequestPart(Struct, frozen=True):
    """One of the requests. ``indexes`` are those of its choices or vectors in the merged response.

    Parts of the same ``group`` have the same prompt.
    """

    request: Request
    number: int
    group: int
    indexes: tuple[int, ...]


class FanOut:
    """A request split into parts, which are built on iteration: there may be thousands.

    If the client sent a seed, each copy of a prompt gets the seed plus its number: the copies
    differ, and the same request has the same response again.
    """

    def __init__(self, request: Request, emulated_fields: Collection[str]) -> None:
        self._request = request
        name, prompts = _read_prompts(request)
        self._prompt_groups: list[tuple[Prompt, ...]] = [prompts]
        if prompts and name in emulated_fields:
            self._prompt_groups = [(prompt,) for prompt in prompts]
        self._choice_count = request.n or 1 if isinstance(request, GenerationRequest) else 1
        self._splits_choices = "n" in emulated_fields
        self._copies = self._choice_count if self._splits_choices else 1

    @property
    def group_count(self) -> int:
        """The number of different prompts, or sets of prompts, of the parts."""
        return len(self._prompt_groups)

    def __len__(self) -> int:
        """The number of parts."""
        return len(self._prompt_groups) * self._copies

    def __iter__(self) -> Iterator[RequestPart]:
        first_prompt, choices_per_copy = 0, self._choice_count // self._copies
        for group, group_prompts in enumerate(self._prompt_groups):
            prompts = range(first_prompt, first_prompt + max(len(group_prompts), 1))
            for copy in range(self._copies):
                indexes = tuple(
                    p * self._choice_count + copy + i
                    for p in prompts
                    for i in range(choices_per_copy)
                )
                number = group * self._copies + copy
                yield RequestPart(self._build_request(group_prompts, copy), number, group, indexes)
            first_prompt += len(group_prompts)

    def _build_request(self, prompts: tuple[Prompt, ...], copy: int) -> Request:
        request = self._request
        if isinstance(request, EmbeddingRequest):
            return replace(request, inputs=prompts)
        if not self._splits_choices:
            return replace(request, prompts=prompts)
        sampling = request.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + copy) % _SEED_COUNT)
        best_of = request.best_of if (request.best_of or 0) > self._choice_count else None
        return replace(request, prompts=prompts, n=None, best_of=best_of, sampling=sampling)


def _read_prompts(request: Request) -> tuple[str, tuple[Prompt, ...]]:
    if isinstance(request, EmbeddingRequest):
        return "inputs", request.inputs
    return "prompts", request.prompts


class FanIn:
    """Merges the parts' events: one StreamStart, one Usage, one StreamEnd."""

    def __init__(self, fan_out: FanOut, *, running: bool) -> None:
        """``running``: report the total whenever a part reports usage."""
        self._group_count = fan_out.group_count
        self._parts_left = len(fan_out)
        self._reports_running_usage = running
        self._total = _UsageTotal()
        self._started = False
        self._has_metadata = False

    def apply(self, part: RequestPart, events: Sequence[Event]) -> list[Event]:
        """The merged events for those of a part. Raises WorkerFailed for an unknown choice."""
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
                    if part.number == 0:  # timings are those of one choice
                        out.append(event)
                case StreamEnd():
                    self._parts_left -= 1
                case TokenList() | DetokenizedText():
                    pass  # no request for them has parts
                case _:
                    out.append(replace(event, index=_map_index(part, event.index)))
            self._started = True
        return out

    def finish(self) -> list[Event]:
        """The last events. Raises StreamBroken unless every part has ended."""
        if self._parts_left:
            raise StreamBroken("the response ended early")
        return [StreamEnd()] if self._reports_running_usage else [self._total.usage, StreamEnd()]


def _map_index(part: RequestPart, index: int) -> int:
    try:
        return part.indexes[index]
    except IndexError:
        raise WorkerFailed("the worker sent a choice that was not requested") from None


_SOURCE_RANKS: Final[Mapping[str, int]] = {"worker": 0, "counted": 1, "estimated": 2}
_ZERO_USAGE: Final = Usage(0)


class _UsageTotal:
    """The usage of all parts. A prompt counts once, however many copies of it there are."""

    def __init__(self) -> None:
        self.usage = _ZERO_USAGE
        self._by_part: dict[int, Usage] = {}
        self._prompt_parts: dict[int, int] = {}
        """The part whose prompt tokens count for each group: the first that reported usage."""

    def add(self, part: RequestPart, usage: Usage) -> None:
        """Add a part's usage; it replaces the part's earlier one."""
        old = self._by_part.get(part.number, _ZERO_USAGE)
        self._by_part[part.number] = usage
        total = self.usage
        changed: dict[str, Any] = {
            "completion_tokens": total.completion_tokens
            + usage.completion_tokens
            - old.completion_tokens,
            "reasoning_tokens": _replace_in_sum(
                total.reasoning_tokens, usage.reasoning_tokens, old.reasoning_tokens
            ),
            "source": max(total.source, usage.source, key=_SOURCE_RANKS.__getitem__),
        }
        if self._prompt_parts.setdefault(part.group, part.number) == part.number:
            changed["prompt_tokens"] = total.prompt_tokens + usage.prompt_tokens - old.prompt_tokens
            changed["cached_tokens"] = _replace_in_sum(
                total.cached_tokens, usage.cached_tokens, old.cached_tokens
            )
        self.usage = replace(total, **changed)


def _replace_in_sum(total: int | None, new: int | None, old: int | None) -> int | None:
    """``total`` with ``new`` in place of ``old``; None is a number that nobody reported."""
    return total if new is None else (total or 0) + new - (old or 0)
