"""Which errors lead to a fallback target, and what is reported."""

import pytest

from backends.echo import EchoBackend
from gateway.observability.metrics.requests import MetricsCollector
from gateway.observability.record import RequestRecord, ignore_record
from gateway.routing.fallback import FallbackHistory, describe_missing, is_fallback_error
from gateway.routing.router import Route, Target, compile_model
from protocols.core.catalog import ModelInfo
from protocols.core.errors import (
    ClientDisconnected,
    ContentFiltered,
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InternalError,
    InvalidParameter,
    Overloaded,
    RateLimitExceeded,
    UnsupportedFeature,
    WorkerFailed,
    WorkerUnreachable,
)


def make_route(name: str, context: int | None = None) -> Route:
    target = Target("1", name, EchoBackend(), "echo")
    model = compile_model(ModelInfo(name, (), context_length=context), {"1": target}, {"1": 1})
    return Route(model, target)


BUSY = Overloaded("busy")
DOWN = WorkerUnreachable("gone")


@pytest.mark.parametrize(
    ("error", "leads_on"),
    [
        (BUSY, True),
        (DOWN, True),
        (WorkerFailed("500"), True),
        (RateLimitExceeded("429"), True),
        (ContextTooLong("long"), True),
        (DeadlineExceeded("slow", which="first_token"), True),
        (DeadlineExceeded("late", which="total"), False),
        (UnsupportedFeature("no"), False),
        (InvalidParameter("no", param="n"), False),
        (ContentFiltered("no"), False),
        (ClientDisconnected("left"), False),
        (InternalError("bug"), False),
    ],
)
def test_only_errors_not_caused_by_the_client_lead_to_fallback(
    error: GatewayError, *, leads_on: bool
) -> None:
    assert is_fallback_error(error) is leads_on


def describe_history(history: FallbackHistory, at: Route) -> tuple[tuple[str, ...], str]:
    return history.list_failures(at), history.get_first_target(at)


def test_fallback_history_lists_failed_targets_in_order() -> None:
    history = FallbackHistory(make_route("a"), BUSY)
    history.record_skipped(make_route("b"), describe_missing("tools", "images"))

    assert describe_history(history, make_route("c")) == (
        ("a@1 Overloaded", "b@1 lacks tools, images"),
        "a@1",
    )
    assert history.record_failure(make_route("c"), DOWN)
    assert (history.route.target_name, history.error) == ("c@1", DOWN)
    assert describe_history(history, history.route) == (
        ("a@1 Overloaded", "b@1 lacks tools, images"),
        "a@1",
    )
    assert describe_history(FallbackHistory(make_route("a"), BUSY), make_route("a")) == ((), "")


@pytest.mark.parametrize("error", [UnsupportedFeature("no"), InvalidParameter("no", param="n")])
def test_unsupported_request_error_of_a_fallback_keeps_the_first_error(error: GatewayError) -> None:
    history = FallbackHistory(make_route("a"), BUSY)

    assert history.record_failure(make_route("b"), error)
    assert (history.route.target_name, history.error) == ("a@1", BUSY)


@pytest.mark.parametrize(
    "error", [ContentFiltered("no"), ClientDisconnected("left"), InternalError("bug")]
)
def test_final_errors_stop_the_fallback(error: GatewayError) -> None:
    assert not FallbackHistory(make_route("a"), BUSY).record_failure(make_route("b"), error)


@pytest.mark.parametrize(
    ("context", "limit", "other", "fits"),
    [
        (8, None, 9, True),
        (8, None, 8, False),
        (8, None, None, False),
        (8, 4, 5, True),
        (8, 16, 9, False),
        (None, 4, 5, True),
        (None, None, 1_000_000, False),
    ],
)
def test_fallback_after_context_too_long_needs_a_larger_declared_context(
    context: int | None, limit: int | None, other: int | None, *, fits: bool
) -> None:
    history = FallbackHistory(make_route("a", context), ContextTooLong("long", limit=limit))
    assert history.fits_context(make_route("b", other)) is fits
    assert FallbackHistory(make_route("a", context), BUSY).fits_context(make_route("b", other))


@pytest.mark.parametrize(
    ("context", "limit", "fits"), [(8, None, False), (8, 4, True), (None, 4, True), (4, None, True)]
)
def test_context_too_long_at_a_fallback_excludes_smaller_contexts(
    context: int | None, limit: int | None, *, fits: bool
) -> None:
    history = FallbackHistory(make_route("a"), BUSY)
    assert history.record_failure(make_route("b", context), ContextTooLong("long", limit=limit))

    assert history.error is BUSY
    assert history.fits_context(make_route("c", 5)) is fits
    assert history.fits_context(make_route("c")) is False


def test_context_too_long_without_a_limit_allows_declared_contexts_only() -> None:
    history = FallbackHistory(make_route("a"), BUSY)
    assert history.record_failure(make_route("b"), ContextTooLong("long"))
    assert history.fits_context(make_route("c", 1))
    assert not history.fits_context(make_route("c"))


def test_skipped_targets_are_counted_by_missing_capability() -> None:
    metrics = MetricsCollector(ignore_record, dict)
    lacked = ("chat@1 Overloaded", "my model@1 lacks tools, images")
    metrics.record_request(RequestRecord("r", model="spare", version="1", failed_attempts=lacked))
    page = metrics.render_page().decode()

    for target, why in (("chat@1", "Overloaded"), ("my model@1", "lacks tools, images")):
        labels = f'error="{why}",target="{target}"'
        assert f"interlingua_fallbacks_total{{{labels}}} 1.0" in page
