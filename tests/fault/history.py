"""Whether what clients, the gateway and the workers say of the same requests fits together.

Each request ends exactly once, as one of

complete    the client had all of it
refused     the gateway said no, and why
failed      a worker failed before the first byte, and the client was told
truncated   the answer broke off, and the client was told
left        the client left

every call of a worker ends, completed or cancelled; and the tokens that were delivered are those
that were recorded, and those that a worker said.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from gateway.observability.record import RequestOutcome, RequestRecord

Seen = Literal["complete", "error", "error event", "left", "cut"]
"""How an answer ended before its client's eyes. ``error``: it was one from the beginning;
``told``: it broke off with an error; ``cut``: it broke off, and that was all."""
End = Literal["complete", "refused", "failed", "truncated", "left"]


class ClientObservation(Struct, frozen=True):
    """One request, as its client saw it. ``tokens`` are the numbers of the words, as they came."""

    id: str
    protocol: str
    stream: bool
    seen: Seen
    status: int = 0
    size: int = 0
    """Bytes of the answer's body."""
    tokens: tuple[int, ...] = ()


class WorkerLogLine(Struct, frozen=True):
    """A line of a worker's log: a request came (``asked``), or its answer ended."""

    id: str
    what: Literal["received", "completed", "cancelled"]
    tokens: int = 0


class Violation(Struct, frozen=True):
    """What does not fit. ``id`` is the request's."""

    kind: str
    id: str
    why: str = ""


class History(Struct, frozen=True):
    """All that was said of some time. ``lines`` are the logs of the workers, one after another."""

    observations: Sequence[ClientObservation]
    records: Sequence[RequestRecord]
    lines: Sequence[WorkerLogLine]

    def ends(self) -> Counter[End]:
        """How many requests ended how, where both sides agree."""
        records = {record.id: record for record in self.records}
        ended = ((one, records.get(one.id)) for one in self.observations)
        return Counter(
            end
            for one, record in ended
            if record is not None and (end := _classify_end(one, record))
        )

    def violations(self) -> list[Violation]:
        """Everything that does not fit, or nothing."""
        return [*self.astray(), *self._find_wrong_counts()]

    def astray(self) -> list[Violation]:
        """What does not fit of how requests and calls ended, whatever was said in them."""
        return [*self._once(), *self._agreed(), *self._calls()]

    # --- each request ends once -------------------------------------------------------------------

    def _once(self) -> Iterator[Violation]:
        counts = Counter(one.id for one in self.observations)
        recorded = Counter(record.id for record in self.records)
        yield from (Violation("sent twice", id_) for id_, times in counts.items() if times > 1)
        yield from (Violation("recorded twice", one) for one, n in recorded.items() if n > 1)
        yield from (Violation("not recorded", id_) for id_ in counts if id_ not in recorded)
        yield from (Violation("not asked", id_) for id_ in recorded if id_ not in counts)

    def _agreed(self) -> Iterator[Violation]:
        """The client and the record say the same of the end."""
        for one, record in self._pairs():
            if one.seen == "cut":
                yield Violation("cut", one.id, f"after {one.size} bytes, and nothing was told")
            elif _classify_end(one, record) is None:
                yield Violation("ends differ", one.id, f"{one.seen} and {record.outcome}")
            elif one.seen != "left" and one.status != record.status:
                yield Violation("statuses differ", one.id, f"{one.status} and {record.status}")

    # --- each call ends ---------------------------------------------------------------------------

    def _calls(self) -> Iterator[Violation]:
        counts = defaultdict[str, Counter[str]](Counter)
        for line in self.lines:
            counts[line.id][line.what] += 1
        seen = {one.id: one.seen for one in self.observations}
        for id_, times in counts.items():
            ended = times["completed"] + times["cancelled"]
            if id_ not in seen:
                yield Violation("a call for nobody", id_)
            if times["received"] > ended:
                yield Violation("a call without an end", id_)
            if times["received"] < ended:
                yield Violation("a call that ended twice", id_)
            if times["completed"] > 1:
                yield Violation("answered twice", id_, f"{times['completed']} times")
        for id_, end in seen.items():
            if end == "complete" and not counts[id_]["completed"]:
                yield Violation("made up", id_, "no worker completed it")

    # --- tokens -----------------------------------------------------------------------------------

    def _find_wrong_counts(self) -> Iterator[Violation]:
        tokens_by_id = {line.id: line.tokens for line in self.lines if line.what == "cancelled"}
        tokens_by_id |= {line.id: line.tokens for line in self.lines if line.what == "completed"}
        for one, record in self._pairs():
            delivered = len(one.tokens)
            recorded = _count_billed_tokens(one, record)
            if one.tokens != tuple(range(delivered)):
                yield Violation("garbled", one.id, f"{one.tokens}")
            if one.seen == "left" and delivered > recorded:
                yield Violation("tokens differ", one.id, f"{delivered} > {recorded} recorded")
            if one.seen != "left" and delivered != recorded:
                yield Violation("tokens differ", one.id, f"{delivered} and {recorded} recorded")
            if recorded > (most := tokens_by_id.get(one.id, 0)):
                yield Violation("tokens made up", one.id, f"{recorded}, and {most} said")
            if one.seen == "complete" and recorded < most:
                yield Violation("tokens lost", one.id, f"{recorded} of {most}")

    def _pairs(self) -> Iterator[tuple[ClientObservation, RequestRecord]]:
        records = {record.id: record for record in self.records}
        for one in self.observations:
            if one.id in records:
                yield one, records[one.id]


_ENDS: Final[dict[tuple[Seen, RequestOutcome], End]] = {
    ("complete", "ok"): "complete",
    ("error", "client_error"): "refused",
    ("error", "gateway_error"): "refused",
    ("error", "worker_error"): "failed",
    ("error event", "truncated"): "truncated",
    ("left", "cancelled"): "left",
    ("left", "ok"): "left",  # all of it was on its way when the client left
}


def _classify_end(one: ClientObservation, record: RequestRecord) -> End | None:
    return _ENDS.get((one.seen, record.outcome))


def _count_billed_tokens(one: ClientObservation, record: RequestRecord) -> int:
    """The tokens for which the gateway would ask to be paid."""
    if one.stream:
        return record.tokens
    return record.usage.completion_tokens or 0 if record.usage is not None else 0


def read_logs(paths: Iterable[Path]) -> list[WorkerLogLine]:
    """The lines of these logs of workers; a log that is not there has none."""
    decode = msgspec.json.Decoder(WorkerLogLine).decode
    return [decode(line) for one in paths if one.exists() for line in one.read_bytes().splitlines()]
