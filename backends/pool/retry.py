"""Whether a request may be sent to another worker. Pure.

Generation changes nothing in the world, so a request may be sent again while its client has seen
nothing. Each worker is asked once at most. A worker that can't be reached costs nothing, so any
number of them is passed over; one that took the request and said nothing is made up for once, so
that a request which brings workers down does not go round them all.
"""

from msgspec import Struct, field

from gateway.core.errors import DeadlineExceeded, GatewayError, StreamBroken, WorkerUnreachable


class Retry(Struct):
    """What was tried for one request: the keys of the workers, and how many fell silent."""

    tried: set[int] = field(default_factory=set[int])
    silent: int = 0
    most_silent: int = 1

    def again(self, error: GatewayError) -> bool:
        """Whether another worker may be asked after ``error``; nothing was passed on so far."""
        match error:
            case WorkerUnreachable():
                return True
            case StreamBroken() | DeadlineExceeded(which="first_token"):
                self.silent += 1
                return self.silent <= self.most_silent
            case _:
                return False
