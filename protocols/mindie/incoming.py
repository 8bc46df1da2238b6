"""What a server answers to generate and generate_stream, read as generously as real ones need it.

Times are in milliseconds, ``queue_wait_time`` is in microseconds. Whole answers have lists of them,
one figure for each step; events have one of each. ``perf_stat`` is a list of pairs, a token and its
time. Sources: MindIE-LLM 0695772, single_req_triton_text_infer_interface.cpp (FillResponseBody);
for ``perf_stat`` the published pages of 1.0.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocols.core.events import FinishReason, Timing

FINISH_REASONS: Final[Mapping[str, FinishReason | None]] = {
    "eos_token": "eos",
    "length": "length",
    "stop_sequence": None,
}
"""None is a failure of the worker: the request was stopped, or broke off. All else is unknown."""
_MAX_NUMBER = 1e12


class WorkerTextDetails(Struct):
    """What is only told when asked for."""

    finish_reason: str | None = None
    generated_tokens: Any = None
    batch_size: Any = None
    queue_wait_time: Any = None
    perf_stat: Any = None


class WorkerTextResponse(Struct):
    """An answer, or an event of one."""

    id: Any = None
    model_name: Any = None
    text_output: str | None = None
    details: WorkerTextDetails | None = None
    finish_reason: str | None = None
    prefill_time: Any = None
    decode_time: Any = None
    error: Any = None


decode_text_response = msgspec.json.Decoder(WorkerTextResponse).decode


def get_token_count(details: WorkerTextDetails) -> int | None:
    """How many tokens the server has made so far, where it says."""
    got = _parse_number(details.generated_tokens)
    return None if got is None else int(got)


def list_timings(wire: WorkerTextResponse, details: WorkerTextDetails) -> list[Timing]:
    """What was measured, step by step."""
    batches, queues = _parse_numbers(details.batch_size), _parse_numbers(details.queue_wait_time)
    prefills, decodes = _parse_numbers(wire.prefill_time), _parse_numbers(wire.decode_time)
    if stat := _parse_perf_stat(details.perf_stat):
        prefills, decodes = stat[:1], [None, *stat[1:]]
    found = []
    for i in range(max(map(len, (batches, queues, prefills, decodes)))):
        batch = _get_item(batches, i)
        found.append(
            Timing(
                _to_seconds(_get_item(queues, i), 1e6),
                _to_seconds(_get_item(prefills, i), 1e3),
                _to_seconds(_get_item(decodes, i), 1e3),
                None if batch is None else int(batch),
            )
        )
    return [one for one in found if one != Timing()]


def _parse_perf_stat(got: Any) -> list[float | None]:
    if not isinstance(got, list):
        return []
    return [_parse_number(pair[1]) for pair in got if isinstance(pair, list) and len(pair) > 1]


def _parse_numbers(got: Any) -> list[float | None]:
    return [_parse_number(one) for one in (got if isinstance(got, list) else [got])]


def _parse_number(got: Any) -> float | None:
    """A number that can have been counted or measured."""
    if isinstance(got, bool) or not isinstance(got, int | float):
        return None
    return got if 0 <= got < _MAX_NUMBER else None


def _get_item(figures: Sequence[float | None], i: int) -> float | None:
    return figures[i] if i < len(figures) else None


def _to_seconds(figure: float | None, scale: float) -> float | None:
    return None if figure is None else figure / scale
