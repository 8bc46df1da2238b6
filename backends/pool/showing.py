"""What is told of one request to who looks on; nothing is, as a rule."""

from typing import Literal

from msgspec.structs import asdict

from backends.pool.attempt import Work
from backends.pool.errand import keyed
from backends.pool.member import Member
from backends.pool.policy import Scores
from backends.pool.roster import Roster, Wish
from backends.pool.settings import PoolSettings
from gateway.core.errors import GatewayError
from gateway.core.ports import WireRequest
from gateway.core.watching import Candidate, Choice, Watch

Can = Literal["yes", "no", "full", "tried"]


class Shown:
    """Tells who looks on how an answer comes about."""

    def __init__(self, watch: Watch, settings: PoolSettings, roster: Roster, work: Work) -> None:
        self._watch = watch
        self._settings = settings
        self._roster = roster
        self._work = work

    def before(self, wish: Wish) -> None:
        """A worker is about to be chosen: tells of the choice, which is not made by that.

        Raises what the watch raises.
        """
        free, scores, likely = self._roster.foresee(wish)
        can: dict[int, Can] = dict.fromkeys(wish.tried, "tried")
        can |= {one.key: "full" for one in self._roster.choices(wish)}
        can |= {one.key: "yes" for one in free}
        candidates = [
            _candidate(one, can.get(one.key, "no"), scores) for one in self._roster.members
        ]
        self._watch.chooses(self._choice(candidates, scores, likely), self._wire(likely))

    def asked(self, member: Member) -> None:
        """It was chosen, and is asked now."""
        self._watch.sends(member.name, self._wire(member))

    def failed(self, member: Member, error: GatewayError) -> None:
        """It failed, and nothing of its answer was passed on."""
        self._watch.fails(member.name, error)

    def _wire(self, member: Member | None) -> WireRequest:
        """The request as this worker gets it; None: without a key."""
        wire, own = self._work.wire, self._work.own
        told = own if member is None else keyed(own, member.worker)
        return WireRequest(wire.path, wire.body, (*wire.headers, *told), wire.method)

    def _choice(self, candidates: list[Candidate], scores: Scores, likely: Member | None) -> Choice:
        told = self._settings
        return Choice(
            policy=told.policy,
            wins=scores.wins,
            candidates=candidates,
            likely="" if likely is None else likely.name,
            waiting=self._roster.waiting,
            queue=told.queue.max,
            wait=told.queue.wait,
            timeouts=asdict(told.timeouts) | {"total": self._work.deadline.remaining()},
            retries=told.retries.max,
            budget=told.retries.budget,
            retried=sorted(told.retries.on),
        )


def _candidate(member: Member, can: Can, scores: Scores) -> Candidate:
    report = member.report()
    return Candidate(
        url=report.url,
        state=report.state,
        weight=report.weight,
        in_flight=report.in_flight,
        limit=report.limit,
        latency=report.latency,
        can=can,
        score=scores.of.get(member.key),
    )
