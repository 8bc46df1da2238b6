"""An unknown finish reason ends a whole answer: no other worker is tried, and none is ejected."""

from backends.pool.retry import classify_error
from protocols.core.errors import UnknownFinishReason


def test_unknown_finish_reason_is_not_retried() -> None:
    assert classify_error(UnknownFinishReason("zzz"), accepted=True) is None
