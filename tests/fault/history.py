"""Checks that clients, the gateway and the workers agree about the same requests.

Each request ends exactly once, as one of

    complete    the client got the entire response
    refused     the gateway answered with an error
    failed      a worker failed before the first byte, and the client got an error
    truncated   the response broke off, and the client got an error in the stream
    left        the client disconnected

Each request to a worker ends, completed or cancelled; and the tokens delivered to the client equal
those recorded and those sent by a worker.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from gateway.observability.record import RequestOutcome, RequestRecord

ObservedEnd = Literal["complete", "error", "error event", "left", "cut"]
"""How a response ended for the client.

``error``: an error response; ``error event``: an error inside the stream; ``cut``: the connection
closed without an error.
"""
End = Literal["complete", "refused", "failed", "truncated", "left"]


class ClientObservation(Struct, frozen=True):
    """A request as its client saw it. ``tokens`` are the numbers of the received words."""

    id: str
    protocol: str
    stream: bool
    seen: ObservedEnd
    status: int = 0
    size: int = 0
    """Bytes of the response's body."""
    tokens: tuple[int, ...] = ()


class WorkerLogLine(Struct, frozen=True):
    """A line of a worker's log: a request was received, or its response ended."""

    id: str
    what: Literal["received", "completed", "cancelled"]
    tokens: int = 0


class Violation(Struct, frozen=True):
    """A contradiction. ``id`` is the request's."""

    kind: str
    id: str
    why: str = ""


class History(Struct, frozen=True):
    """All observations of a period. ``lines`` are the workers' logs, one after another."""

    observations: Sequence[ClientObservation]
    records: Sequence[RequestRecord]
    lines: Sequence[WorkerLogLine]

    def ends(self) -> Counter[End]:
        """Return the number of requests by end, where client and gateway agree."""
        records = {record.id: record for record in self.records}
        ended = ((one, records.get(one.id)) for one in self.observations)
        return Counter(
            end
            for one, record in ended
            if record is not None and (end := _classify_end(one, record))
        )

    def violations(self) -> list[Violation]:
        """Return all contradictions."""
        return [*self.find_end_violations(), *self._find_wrong_counts()]

    def find_end_violations(self) -> list[Violation]:
        """Return the contradictions about how requests ended, without those about tokens."""
        return [
            *self._find_wrong_numbers_of_records(),
            *self._find_different_ends(),
            *self._find_unfinished_calls(),
        ]

    # --- each request ends once -------------------------------------------------------------------

    def _find_wrong_numbers_of_records(self) -> Iterator[Violation]:
        counts = Counter(one.id for one in self.observations)
        recorded = Counter(record.id for record in self.records)
        yield from (Violation("sent twice", id_) for id_, times in counts.items() if times > 1)
        yield from (Violation("recorded twice", one) for one, n in recorded.items() if n > 1)
        yield from (Violation("not recorded", id_) for id_ in counts if id_ not in recorded)
        yield from (Violation("not asked", id_) for id_ in recorded if id_ not in counts)

    def _find_different_ends(self) -> Iterator[Violation]:
        """The client and the record have the same end."""
        for one, record in self._pairs():
            if one.seen == "cut":
                yield Violation("cut", one.id, f"after {one.size} bytes, and nothing was told")
            elif _classify_end(one, record) is None:
                yield Violation("ends differ", one.id, f"{one.seen} and {record.outcome}")
            elif one.seen != "left" and one.status != record.status:
                yield Violation("statuses differ", one.id, f"{one.status} and {record.status}")

    # --- each request to a worker ends ------------------------------------------------------------

    def _find_unfinished_calls(self) -> Iterator[Violation]:
        counts = defaultdict[str, Counter[str]](Counter)
        for line in self.lines:
            counts[line.id][line.what] += 1
        ends = {one.id: one.seen for one in self.observations}
        for id_, times in counts.items():
            ended = times["completed"] + times["cancelled"]
            if id_ not in ends:
                yield Violation("a call for nobody", id_)
            if times["received"] > ended:
                yield Violation("a call without an end", id_)
            if times["received"] < ended:
                yield Violation("a call that ended twice", id_)
            if times["completed"] > 1:
                yield Violation("answered twice", id_, f"{times['completed']} times")
        for id_, end in ends.items():
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


_ENDS: Final[dict[tuple[ObservedEnd, RequestOutcome], End]] = {
    ("complete", "ok"): "complete",
    ("error", "client_error"): "refused",
    ("error", "gateway_error"): "refused",
    ("error", "worker_error"): "failed",
    ("error event", "truncated"): "truncated",
    ("left", "cancelled"): "left",
    ("left", "ok"): "left",  # the response was sent before the client disconnected
}


def _classify_end(one: ClientObservation, record: RequestRecord) -> End | None:
    return _ENDS.get((one.seen, record.outcome))


def _count_billed_tokens(one: ClientObservation, record: RequestRecord) -> int:
    """Return the completion tokens that the gateway recorded."""
    if one.stream:
        return record.tokens
    return record.usage.completion_tokens or 0 if record.usage is not None else 0


def read_logs(paths: Iterable[Path]) -> list[WorkerLogLine]:
    """Read the lines of these worker logs; a missing log has none."""
    decode = msgspec.json.Decoder(WorkerLogLine).decode
    return [decode(line) for one in paths if one.exists() for line in one.read_bytes().splitlines()]
