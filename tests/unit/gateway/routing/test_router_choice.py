"""A pin precedes rules, rules precede the split, and a route has its reason."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from backends.echo import EchoBackend
from gateway.config.schema import ShadowConfig
from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.router import (
    Model,
    Route,
    Router,
    RouteReason,
    ShadowRule,
    Target,
    compile_model,
)
from gateway.routing.rules import RouteRule
from gateway.routing.traffic_split import TrafficSplit, compute_bucket
from protocols.core.catalog import ModelInfo
from protocols.core.errors import ModelNotFound
from tests.unit.gateway.routing.compiled_rules import make_rule

BACKEND = EchoBackend()
STICKY = ("header:x-user-id", "body:user", "key", "address")
BETA: dict[str, Any] = {"header": {"x-cohort": "beta"}}
SOMEBODY = RequestAttributes(headers={"x-user-id": "user-4"}, key="web")


def make_model(name: str, weights: Mapping[str, int], **fields: Any) -> Model:
    targets = {one: Target(one, f"{name}-{one}", BACKEND, "echo") for one in weights}
    info = ModelInfo(name, (), aliases=fields.pop("aliases", ()))
    compiled = compile_model(info, targets, weights, salt=fields.pop("salt", ""))
    return replace(compiled, **fields)


def make_router(*models: Model, rules: tuple[RouteRule, ...] = (), draw: float = 0.0) -> Router:
    return Router({one.info.name: one for one in models}, draw=lambda: draw, rules=rules)


def describe_route(route: Route) -> tuple[str, str, str]:
    return route.target_name, route.reason.rule, route.reason.sticky


def make_attributes(**traits: Any) -> Any:
    return lambda: RequestAttributes(**traits)


CHAT = make_model("chat", {"1": 90, "2": 10}, aliases=("talk",))
OTHER = make_model("other", {"1": 90, "2": 10}, sticky=STICKY)
SALTED = make_model("chat", {"1": 90, "2": 10}, salt="llama31-rollout", sticky=STICKY)


# --- sticky splits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("traits", "sticky"),
    [
        ({"headers": {"x-user-id": "user-4"}, "body": b'{"user":"user-1"}'}, "header:x-user-id"),
        ({"body": b'{"user":"user-4"}', "key": "user-1"}, "body:user"),
        ({"key": "user-4", "address": "user-1"}, "key"),
        ({"address": "user-4"}, "address"),
    ],
)
def test_first_available_sticky_source_assigns_the_version(traits: Any, sticky: str) -> None:
    route = make_router(SALTED).route("chat", None, make_attributes(**traits))

    assert route.target_name == "chat@2"
    assert route.reason == RouteReason("", sticky, compute_bucket("llama31-rollout", "2", "user-4"))
    assert not route.pinned


def test_request_without_a_sticky_source_is_assigned_at_random() -> None:
    assert describe_route(
        make_router(SALTED, draw=0.95).route("chat", None, make_attributes())
    ) == ("chat@2", "", "")
    assert describe_route(make_router(SALTED, draw=0.1).route("chat")) == ("chat@1", "", "")


def test_unnamed_split_assigns_by_the_model_name_for_every_alias() -> None:
    one = replace(CHAT, sticky=("key",))
    people = [f"user-{n}" for n in range(200)]
    split = TrafficSplit({"1": 90, "2": 10}, "chat")

    for who in people:
        for name in ("chat", "talk"):
            version = make_router(one).route(name, None, make_attributes(key=who)).target.version
            assert version == split.assign_version(who).version


def test_pinned_version_overrides_rules_and_split() -> None:
    table = make_router(SALTED, rules=(make_rule("all", version="1"),))

    for route in (
        table.route("chat@2", None, _fail_if_called),
        table.route("chat", "2", _fail_if_called),
    ):
        assert route.pinned
        assert describe_route(route) == ("chat@2", "", "")
        assert list(table.list_fallbacks(route)) == []


def test_request_attributes_are_not_read_if_the_model_name_decides() -> None:
    table = make_router(CHAT, OTHER, rules=(make_rule("r", "other", version="1", **BETA),))

    assert table.route("chat", None, _fail_if_called).target_name == "chat@1"
    assert (
        list(table.list_fallbacks(table.route("chat", None, _fail_if_called), _fail_if_called))
        == []
    )


# --- rules ----------------------------------------------------------------------------------------


def test_rule_selects_a_version() -> None:
    table = make_router(SALTED, rules=(make_rule("testers", "chat", version="1", **BETA),))

    route = table.route(
        "chat", None, make_attributes(headers={"x-cohort": "beta", "x-user-id": "user-4"})
    )
    other = table.route("chat", None, make_attributes(headers={"x-user-id": "user-4"}))

    assert route.reason == RouteReason("testers")
    assert (route.target_name, route.requested_model) == ("chat@1", "chat")
    assert describe_route(other) == ("chat@2", "", "header:x-user-id")


def test_first_matching_rule_applies_to_a_model_and_its_aliases() -> None:
    rules = (
        make_rule("other", "other", version="1"),
        make_rule("alias", "talk", version="2", key="web"),
        make_rule("rest", version="1"),
    )
    table = make_router(CHAT, OTHER, rules=rules, draw=0.99)

    assert describe_route(table.route("chat", None, make_attributes(key="web"))) == (
        "chat@2",
        "alias",
        "",
    )
    assert describe_route(table.route("talk", None, make_attributes(key="app"))) == (
        "chat@1",
        "rest",
        "",
    )


def test_rule_to_another_model_applies_its_split_but_not_its_rules() -> None:
    rules = (make_rule("away", "chat", to="other"), make_rule("back", "other", to="chat"))
    table = make_router(CHAT, replace(OTHER, split=SALTED.split), rules=rules)

    route = table.route("talk", None, lambda: SOMEBODY)

    assert describe_route(route) == ("other@2", "away", "header:x-user-id")
    assert route.requested_model == "chat"
    assert table.find_model("chat").name == "chat"


def test_rule_selects_a_version_of_another_model() -> None:
    table = make_router(CHAT, OTHER, rules=(make_rule("away", "chat", to="other", version="1"),))

    route = table.route("chat", None, lambda: SOMEBODY)

    assert (route.target.backend_model, route.requested_model) == ("other-1", "chat")
    assert describe_route(route) == ("other@1", "away", "")


def test_rule_to_the_same_model_keeps_its_split() -> None:
    rules = (make_rule("exempt", "chat", to="chat", **BETA), make_rule("rest", "chat", version="2"))
    table = make_router(CHAT, rules=rules)

    route = table.route("chat", None, make_attributes(headers={"x-cohort": "beta"}))

    assert describe_route(route) == ("chat@1", "exempt", "")
    assert (route.original_model, route.requested_model) == ("", "chat")


def test_rule_share_uses_the_sticky_sources_of_the_requested_model() -> None:
    rule = make_rule("early", "chat", version="2", share=0.05)
    table = make_router(SALTED, rules=(rule,), draw=0.99)

    taken = table.route("chat", None, make_attributes(key="user-9"))
    left = table.route("chat", None, make_attributes(key="user-1"))

    assert taken.reason == RouteReason("early", "key", 207121674519990)
    assert describe_route(taken) == ("chat@2", "early", "key")
    assert describe_route(left) == ("chat@1", "", "key")


def test_random_rule_share_draws_separately_from_the_split() -> None:
    draws = iter([0.06, 0.0])
    rules = (make_rule("early", "chat", version="2", share=0.05),)
    table = Router({"chat": CHAT}, draw=lambda: next(draws), rules=rules)

    assert describe_route(table.route("chat", None, make_attributes())) == ("chat@1", "", "")


# --- the wildcard model ---------------------------------------------------------------------------


def test_wildcard_model_has_rules_and_fallbacks() -> None:
    anyone = make_model("*", {"1": 1, "2": 1}, sticky=("key",), fallbacks=("2", "chat"))
    rules = (make_rule("small", "*", to="chat", **BETA), make_rule("first", "*", version="1"))
    table = make_router(anyone, CHAT, rules=rules)

    away = table.route("any/thing", None, make_attributes(headers={"x-cohort": "beta"}))
    here = table.route("any/thing", None, make_attributes())

    assert (away.target_name, away.requested_model) == ("chat@1", "any/thing")
    assert (here.target_name, here.target.backend_model, here.requested_model) == (
        "any/thing@1",
        "any/thing",
        "any/thing",
    )

    after = [
        (one.target_name, one.target.backend_model)
        for one in table.list_fallbacks(here, make_attributes())
    ]
    assert after == [("any/thing@2", "any/thing"), ("chat@1", "chat-1")]
    with pytest.raises(ModelNotFound):
        table.route("", None, make_attributes())


# --- fallbacks ------------------------------------------------------------------------------------


def test_fallback_model_applies_its_sticky_split_but_no_rules() -> None:
    first = make_model("first", {"1": 1, "2": 0}, fallbacks=("1", "2", "chat"))
    rules = (make_rule("mine", "first", version="1"), make_rule("away", "chat", to="first"))
    table = make_router(first, SALTED, rules=rules)

    route = table.route("first", None, lambda: SOMEBODY)
    after = list(table.list_fallbacks(route, lambda: SOMEBODY))

    assert describe_route(route) == ("first@1", "mine", "")
    assert [describe_route(one) for one in after] == [
        ("first@2", "mine", ""),
        ("chat@2", "mine", "header:x-user-id"),
    ]
    assert {one.requested_model for one in after} == {"first"}


def _fail_if_called() -> RequestAttributes:
    raise AssertionError("the request was read")


# --- shadows --------------------------------------------------------------------------------------


def test_shadow_share_is_drawn_at_random() -> None:
    shadow = ShadowRule("chat", ShadowConfig(to="2", share=0.25))
    one = replace(CHAT, shadow=shadow)

    for draw, copied in ((0.0, "chat@2"), (0.2499, "chat@2"), (0.25, None), (0.9, None)):
        table = make_router(one, draw=draw)
        route = Route(one, one.targets["1"])
        shadow_route = table.route_shadow(route, shadow, _fail_if_called)
        assert (shadow_route and shadow_route.target_name) == copied

    assert make_router(one).route_shadow(Route(one, one.targets["1"], pinned=True), shadow) is None
    assert make_router(one).route_shadow(Route(one, one.targets["2"]), shadow) is None


def test_shadow_to_another_model_ignores_its_rules() -> None:
    shadow = ShadowRule("other", ShadowConfig(to="talk", share=1.0))
    salted = replace(SALTED, info=replace(SALTED.info, aliases=("talk",)))
    table = make_router(OTHER, salted, rules=(make_rule("all", version="1"),))

    shadow_route = table.route_shadow(Route(OTHER, OTHER.targets["1"]), shadow, lambda: SOMEBODY)

    assert shadow_route is not None
    assert describe_route(shadow_route) == ("chat@2", "", "header:x-user-id")

    plain = make_router(OTHER, CHAT, draw=0.5)
    there = ShadowRule("other", ShadowConfig(to="chat", share=1.0))
    drawn = plain.route_shadow(Route(OTHER, OTHER.targets["1"]), there, _fail_if_called)

    assert drawn is not None
    assert drawn.target_name == "chat@1"
