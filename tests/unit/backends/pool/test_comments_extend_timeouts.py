"""A worker that sends comments is alive: it may go on up to ``idle_max`` without content."""

import asyncio

import pytest

from backends.deadline_timer import DeadlineTimer
from backends.interfaces import Deadline, ModelTimeouts, Timeouts
from backends.pool.attempt_timeouts import AttemptTimeouts
from protocols.core.errors import DeadlineExceeded, StreamBroken


class Clock:
    """A clock that tests set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Attempt(AttemptTimeouts):
    """Counts how often its response was aborted."""

    aborted: int = 0

    def abort_response(self) -> None:
        self.aborted += 1


def make_attempt(
    clock: Clock, *, first: float = 60, idle: float = 30, idle_max: float = 600
) -> Attempt:
    timer = DeadlineTimer(clock, asyncio.get_running_loop)
    deadline = Deadline(clock, 3600)
    return Attempt(timer, deadline, clock() + first, idle, idle_max)


def send_comments(attempt: Attempt, clock: Clock, seconds: float) -> float:
    """Send a comment each second; return the seconds until the response was aborted."""
    begin = clock.now
    while clock.now < begin + seconds and not attempt.aborted:
        clock.now += 1
        attempt.on_deadline(clock.now)
        if not attempt.aborted:
            attempt.stop_wait()
            attempt.record_life()
            attempt.wait_next(had_content=False)
    return clock.now - begin


async def test_first_token_may_come_late_while_comments_come() -> None:
    clock = Clock()
    attempt = make_attempt(clock)

    attempt.start_wait(clock.now)

    assert send_comments(attempt, clock, 500) == 500
    assert send_comments(attempt, clock, 500) == 100
    assert attempt.aborted == 1


async def test_comments_keep_a_stream_up_to_the_longest_silence() -> None:
    clock = Clock()
    attempt = make_attempt(clock)
    attempt.has_started = True

    attempt.wait_next()

    assert send_comments(attempt, clock, 1000) == 600


async def test_stream_without_comments_ends_at_the_idle_timeout() -> None:
    clock = Clock()
    attempt = make_attempt(clock)
    attempt.has_started = True
    attempt.wait_next()
    send_comments(attempt, clock, 40)

    clock.now += 29
    attempt.on_deadline(clock.now)
    assert not attempt.aborted

    clock.now += 1
    attempt.on_deadline(clock.now)
    assert attempt.aborted


async def test_content_restarts_the_longest_silence() -> None:
    clock = Clock()
    attempt = make_attempt(clock)
    attempt.has_started = True
    attempt.wait_next()
    send_comments(attempt, clock, 500)

    attempt.wait_next(had_content=True)

    assert send_comments(attempt, clock, 1000) == 600


async def test_longest_silence_never_shortens_a_timeout() -> None:
    clock = Clock()
    attempt = make_attempt(clock, idle=300, idle_max=10)
    attempt.has_started = True

    attempt.wait_next()

    assert send_comments(attempt, clock, 1000) == 300


async def test_rest_of_a_body_is_not_extended_by_comments() -> None:
    clock = Clock()
    attempt = make_attempt(clock)
    attempt.has_started = True
    attempt.wait_next()
    attempt.set_drain_deadline(1)

    attempt.wait_next()

    assert send_comments(attempt, clock, 100) == 1


@pytest.mark.parametrize("has_started", [False, True])
@pytest.mark.parametrize(("comments", "is_longest"), [(1000, True), (100, False)])
async def test_error_after_comments_names_the_setting_that_ended_the_wait(
    comments: float, *, is_longest: bool, has_started: bool
) -> None:
    clock = Clock()
    attempt = make_attempt(clock)
    attempt.has_started = has_started
    attempt.start_wait(clock.now)
    attempt.wait_next()
    send_comments(attempt, clock, comments)
    clock.now += 30
    attempt.on_deadline(clock.now)

    error = attempt.get_cause(StreamBroken("closed"))

    setting = "idle_max" if is_longest else "idle" if has_started else "first_token"
    assert f"(timeouts.{setting})" in error.message


@pytest.mark.parametrize(
    ("has_started", "setting"), [(False, "timeouts.first_token"), (True, "timeouts.idle")]
)
async def test_error_names_the_setting(*, has_started: bool, setting: str) -> None:
    clock = Clock()
    attempt = make_attempt(clock)
    attempt.has_started = has_started
    attempt.wait_next()
    clock.now += 61
    attempt.on_deadline(clock.now)

    cause = attempt.get_cause(StreamBroken("aborted"))
    assert isinstance(cause, DeadlineExceeded)
    assert setting in cause.message


def test_timeouts_of_a_model_replace_those_of_its_backend() -> None:
    own = ModelTimeouts(first_token=5.0, idle_max=9.0).override(Timeouts(idle=7.0))

    assert (own.first_token, own.idle, own.idle_max) == (5.0, 7.0, 9.0)
    assert own.total > own.first_token


def test_total_is_above_the_other_defaults() -> None:
    defaults = Timeouts()

    assert (defaults.first_token, defaults.idle, defaults.idle_max) == (600, 300, 600)
    assert defaults.total > defaults.first_token + defaults.idle_max
