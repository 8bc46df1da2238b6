"""Who waits, whose prompt is read, who has a row: places, memory, order.

Everything has a rank: priority, then arrival, then number. When memory runs out, whoever ranks last
gives up his blocks, and is read again later as if nothing had been; nobody notices but the clock.
Whose client takes no tokens gives way first: his place too, when others wait for one.
"""

from collections.abc import Iterator

from msgspec import Struct

from backends.torch.attention import Segment
from backends.torch.kv import BLOCK, Pool
from backends.torch.queueing import Line
from backends.torch.reading import Refused, too_long
from backends.torch.rows import Group, Job, Row


class Limits(Struct, frozen=True):
    """How much at once."""

    rows: int = 16
    waiting: int = 256
    batch: int = 2048
    """Prompts of one request, and samples of one prompt."""
    chunk: int = 256
    """Prompt tokens read in one step: the more, the longer the other rows wait for theirs."""
    memory: int = 1 << 30
    """Bytes for the past of all rows; one whole context is always had."""


class Chunk(Struct, frozen=True):
    """The next piece of what is read."""

    reader: Group | Row
    segment: Segment


class Scheduler:
    """The requests by what they are at: waiting, being read, read, in rows."""

    def __init__(self, limits: Limits, pool: Pool) -> None:
        self._limits = limits
        self._pool = pool
        self._waiting = Line()
        self._arrivals = 0
        self._lost: list[Group | Row] = []
        """Those that have begun and gave up their blocks."""
        self.reading: list[Group | Row] = []
        self.read: list[Group] = []
        """Prompts that are read, and have samples yet to be started."""
        self.rows: list[Row] = []
        self.preempted = 0
        """How often blocks were given up."""

    @property
    def busy(self) -> int:
        """Rows and prompts in work."""
        return len(self.rows) + len(self.reading)

    @property
    def waiting(self) -> int:
        """Prompts, or samples of prompts, that have no place."""
        return len(self._waiting) + len(self._lost) + len(self.read)

    @property
    def free(self) -> int:
        """Places that nobody has."""
        return self._limits.rows - self.busy

    # --- who comes and goes ---------------------------------------------------------------------

    def check(self, choices: int) -> None:
        """Raises Refused: the queue is full, or a request wants too much of one thing."""
        if len(self._waiting) >= self._limits.waiting:
            raise Refused("overloaded", "the queue of the local model is full")
        if choices > self._limits.batch:
            most = self._limits.batch
            raise Refused("invalid", f"at most {most} choices and prompts", param="n")

    def check_beams(self, width: int, prompt: int) -> None:
        """Raises Refused: beams need places and memory for all of them at once."""
        if width > self._limits.rows:
            most = self._limits.rows
            raise Refused("invalid", f"at most {most} beams at a time", param="best_of")
        room = self._pool.blocks // width * BLOCK
        if prompt >= room:
            raise too_long(prompt, room, "prompt")

    def add(self, job: Job) -> None:
        """Its prompts wait from now on."""
        for group in job.groups:
            group.arrival = self._arrivals
            self._arrivals += 1
            self._waiting.add(group)

    def remove(self, job: Job) -> None:
        """Nothing of it waits or works any more."""
        self._waiting.remove(job)
        for one in [one for one in self._holders() if one.group.job is job]:
            one.kv.free()
        self.rows = [row for row in self.rows if row.group.job is not job]
        self.reading = [one for one in self.reading if one.group.job is not job]
        self.read = [group for group in self.read if group.job is not job]
        self._lost = [one for one in self._lost if one.group.job is not job]

    def end(self, row: Row) -> None:
        """A row is complete."""
        self.rows.remove(row)
        row.kv.free()

    def start(self, row: Row) -> None:
        """A row goes on from here."""
        self.rows.append(row)

    def _holders(self) -> Iterator[Group | Row]:
        yield from self.rows
        yield from self.reading
        yield from self.read

    # --- places ---------------------------------------------------------------------------------

    def admit(self, now: float) -> None:
        """Begins to read prompts, where there is room.

        What is read comes first: its samples have the next places, if its client takes tokens.
        """
        if any(group.job.credit > 0 for group in self.read):
            return
        while (one := self._next()) is not None:
            while self.free <= 0 or not self._has_room(one):
                if not self._displace(one):
                    return
            if one in self._lost:
                self._lost.remove(one)
            else:
                self._waiting.take()
            if one.group.job.admitted is None:
                one.group.job.admitted = now
            self.reading.append(one)
            self.reading.sort(key=_rank)

    def _next(self) -> Group | Row | None:
        """Who has the next place: of those equally urgent one that had a place before."""
        head = self._waiting.head()
        for one in self._lost:
            if one.group.job.credit > 0 and (head is None or one.rank[0] <= head.rank[0]):
                return one
        return head

    def fits(self, group: Group) -> bool:
        """Whether there are places for the next sample of a prompt."""
        return group.job.credit > 0 and self.free >= group.places

    def clear(self) -> bool:
        """Whether a sample of a prompt that is read can be started, if need be in another's place.

        Between two passes only.
        """
        for group in list(self.read):
            while self._lacks_places(group) and self._displace(group):
                pass
        return any(map(self.fits, self.read))

    def _lacks_places(self, group: Group) -> bool:
        return group in self.read and group.job.credit > 0 and self.free < group.places

    def _has_room(self, one: Group | Row) -> bool:
        """For what is to be read of it and all others, and a block more for each other row."""
        others = sum(row.group is not one.group for row in self.rows)
        return sum(map(_need, [one, *self.reading])) + others <= self._pool.room

    def _displace(self, one: Group | Row) -> bool:
        """Makes way for it: of one whose client takes nothing, or who is less urgent, if any."""
        last = max(self._holders(), key=_yields, default=one)
        if last.group.job.credit > 0 and last.rank[0] <= one.rank[0]:
            return False
        self._lose(last)
        return True

    # --- memory ---------------------------------------------------------------------------------

    def _secure(self, one: Group | Row, tokens: int) -> bool:
        """Room for so many more tokens, taken from those that rank behind, if need be."""
        while one.kv.needs(tokens) > self._pool.room:
            last = max(self._holders(), key=_yields)
            if last is one or _yields(last) < _yields(one) or last in self._beside(one):
                return False
            self._lose(last)
        one.kv.reserve(tokens)
        return True

    def _lose(self, one: Group | Row) -> None:
        """It gives up its blocks, to be read again; with beams the others do, too."""
        for other in [row for row in self._beside(one) if row is not one]:
            self._drop(other)
        self._drop(one)

    def _beside(self, one: Group | Row) -> list[Row]:
        """The beams of a search that have places."""
        if isinstance(one, Group) or not one.group.searches:
            return []
        held = (row for row in (*self.rows, *self.reading) if isinstance(row, Row))
        return [row for row in held if row.group is one.group]

    def _drop(self, one: Group | Row) -> None:
        one.kv.free()
        if isinstance(one, Group):
            one.scored.clear()
        for place in (self.rows, self.reading, self.read):
            if one in place:
                place.remove(one)  # type: ignore[arg-type]
        self._lost.append(one)
        self._lost.sort(key=_rank)
        self.preempted += 1

    # --- the next pass --------------------------------------------------------------------------

    def plan(self) -> tuple[list[Row], list[Chunk]]:
        """The rows that make a token now, and the next pieces of what is being read."""
        before, going = self.preempted, self._going()
        chunks = self._chunks()
        if self.preempted > before:
            going = [row for row in going if row in self.rows]
            chunks = [chunk for chunk in chunks if chunk.reader in self.reading]
        return going, chunks

    def _going(self) -> list[Row]:
        found = []
        for row in sorted(self.rows, key=_rank):
            if row.group.job.credit <= 0 or row not in self.rows or not self._together(row):
                continue
            if self._secure(row, 1):
                found.append(row)
            else:
                self._lose(row)
        return found

    def _together(self, row: Row) -> bool:
        """Whether all beams of its search are here, if it is one: none goes on alone."""
        if not row.group.searches:
            return True
        here = sum(other.group is row.group for other in self.rows)
        return here + len(row.group.ended) == row.group.job.samples

    def _chunks(self) -> list[Chunk]:
        left, found = max(BLOCK, self._limits.chunk - self._limits.chunk % BLOCK), []
        for one in list(self.reading):
            if left < BLOCK:
                break
            if one not in self.reading:
                continue
            if one.kv.length == 0 and not one.scores:
                one.kv.begin(one.group.hashes)
                if one.group.found is None:
                    one.group.found = one.kv.length
            start = one.kv.length
            end = _until(one, start + left)
            if end > start and self._secure(one, end - start):
                wants = end - start if one.scores else int(one.awaited and end == len(one.past))
                found.append(Chunk(one, Segment(one.kv, one.past[start:end], wants)))
                left -= end - start
        return found

    def advance(self, chunk: Chunk) -> bool:
        """A chunk went through. Whether that was the last of it."""
        one = chunk.reader
        one.kv.publish(one.group.hashes)
        if one.kv.length < len(one.past):
            return False
        self.reading.remove(one)
        if isinstance(one, Row):
            self.rows.append(one)
        else:
            self.read.append(one)
        return True


def _until(one: Group | Row, end: int) -> int:
    """Where a chunk may end that would end there: within a prompt only between blocks."""
    end = min(end, len(one.past))
    return end - end % BLOCK if end < one.kv.prompt else end


def _need(one: Group | Row) -> int:
    """Blocks for what is left of it to be read, and a token more."""
    return one.kv.needs(len(one.past) - one.kv.length + 1)


def _rank(one: Group | Row) -> tuple[int, ...]:
    return one.rank


def _yields(one: Group | Row) -> tuple[int, ...]:
    """The greatest gives way first."""
    return (int(one.group.job.credit <= 0), *one.rank)
