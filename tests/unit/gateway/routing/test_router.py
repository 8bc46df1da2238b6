"""The router sends each name to the configured target."""

from collections.abc import Iterator

import pytest

from backends.echo import EchoBackend
from gateway.config.schema import OnLoss
from gateway.routing.router import (
    Model,
    PrincipalCatalog,
    RequestDefaults,
    Router,
    Target,
    compile_model,
)
from protocols.core.catalog import ModelFeatures, ModelInfo, ModelState
from protocols.core.errors import Forbidden, ModelNotFound, VersionNotFound
from protocols.core.interfaces import NO_SETTINGS, ModelSettings, RoutingInfo

BACKEND = EchoBackend()


def make_target(version: str, model: str) -> Target:
    return Target(version, model, BACKEND, "echo")


def make_model(name: str, weights: dict[str, int], **info: object) -> Model:
    targets = {version: make_target(version, f"{name}-{version}") for version in weights}
    return compile_model(ModelInfo(name, (), **info), targets, weights)  # type: ignore[arg-type]


def make_router(*models: Model, draw: float = 0.0) -> Router:
    return Router({one.info.name: one for one in models}, draw=lambda: draw)


@pytest.mark.parametrize(("draw", "version"), [(0.0, "1"), (0.89, "1"), (0.9, "2"), (0.999, "2")])
def test_traffic_split_follows_its_weights(draw: float, version: str) -> None:
    table = make_router(make_model("chat", {"1": 90, "2": 10}), draw=draw)

    route = table.route("chat")

    assert (route.target.version, route.pinned) == (version, False)


def test_version_without_weight_is_reached_only_by_name() -> None:
    table = make_router(make_model("chat", {"1": 1, "2": 0}), draw=0.9999)

    assert table.route("chat").target.version == "1"
    assert table.route("chat", "2").target.backend_model == "chat-2"
    assert table.route("chat@2").pinned


class Observer:
    """Draws the given numbers; no rule uses other attributes."""

    def __init__(self, numbers: Iterator[float]) -> None:
        self.draw = numbers.__next__

    def on_rule(self, *_: object) -> None:
        raise AssertionError


def test_single_version_draws_no_random_number_unless_observed() -> None:
    never, twice = iter(()), iter([0.5, 0.5])
    table = Router({"chat": make_model("chat", {"1": 1, "2": 0})}, draw=never.__next__)

    assert table.route("chat") is table.route("chat")
    assert table.route("chat", observer=Observer(twice)) == table.route("chat")
    assert next(twice) == 0.5
    assert next(twice, None) is None


def build_wildcard_router() -> Router:
    models = {
        name: compile_model(ModelInfo(name, ()), {"1": make_target("1", backend_model)}, {"1": 1})
        for name, backend_model in (
            ("chat", "llama"),
            ("openai/*", "*"),
            ("openai/o*", "openai/o*"),
            ("fixed-*", "always"),
        )
    }
    return Router(models, draw=lambda: 0.0)


@pytest.mark.parametrize(
    ("name", "backend_model"),
    [
        ("chat", "llama"),
        ("openai/gpt-4.1", "gpt-4.1"),
        ("openai/x/m", "x/m"),
        ("openai/o3", "openai/o3"),
        ("openai/o", "o"),
        ("fixed-a", "always"),
    ],
)
def test_model_of_the_longest_beginning_serves_a_name(name: str, backend_model: str) -> None:
    route = build_wildcard_router().route(name)
    assert (route.model.info.name, route.target.backend_model) == (name, backend_model)


def test_beginning_of_a_wildcard_is_no_model_itself() -> None:
    table = build_wildcard_router()
    assert [one.name for one in table.list_models()] == ["chat"]
    for name in ("openai/", "openai", "other/m", "fixed-", "openai/../x", ""):
        with pytest.raises(ModelNotFound):
            table.route(name)


def test_key_may_be_allowed_all_names_of_a_wildcard_or_some() -> None:
    table = build_wildcard_router()
    table.check_access("openai/gpt-4.1", frozenset({"openai/*"}))
    table.check_access("openai/gpt-4.1", frozenset({"openai/gpt-4.1"}))
    table.check_access("unknown", frozenset({"chat"}))
    for allowed in ({"chat"}, {"openai/o*"}, {"*"}):
        with pytest.raises(Forbidden):
            table.check_access("openai/gpt-4.1", frozenset(allowed))


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("chat", False),  # its workers call it llama, and may call another one chat
        ("llama", False),
        ("openai/o3", True),
        ("openai/gpt-4.1", False),
        ("openai/o*", True),
        ("unknown", False),
    ],
)
def test_worker_model_is_allowed_where_its_workers_call_it_so(name: str, allowed: bool) -> None:
    table = build_wildcard_router()
    assert table.allows_worker_model(name, frozenset({"chat", "openai/o*"})) is allowed
    assert not table.allows_worker_model(name, frozenset({"fixed-*"}))


def test_alias_routes_to_its_model() -> None:
    table = make_router(make_model("chat", {"1": 1}, aliases=("gpt-4o",)))

    assert table.route("gpt-4o").model.info.name == "chat"
    assert table.find_model("gpt-4o").name == "chat"


def test_unknown_model_or_version_is_named_in_the_error() -> None:
    table = make_router(make_model("chat", {"1": 1}))

    with pytest.raises(ModelNotFound, match="'nope'"):
        table.route("nope")
    with pytest.raises(ModelNotFound, match="'nope@1'"):
        table.route("nope@1")
    with pytest.raises(VersionNotFound, match="'9'"):
        table.route("chat", "9")
    with pytest.raises(VersionNotFound):
        table.route("chat@9")
    with pytest.raises(ModelNotFound) as e:
        table.route("x" * 10_000)
    assert len(e.value.message) < 300


def test_wildcard_model_passes_the_requested_name_on() -> None:
    table = make_router(make_model("*", {"1": 1}), make_model("chat", {"1": 1}))

    route = table.route("any/thing")

    assert (route.model.info.name, route.target.backend_model) == ("any/thing", "any/thing")
    assert table.route("chat").target.backend_model == "chat-1"
    assert [info.name for info in table.list_models()] == ["chat"]
    with pytest.raises(ModelNotFound):
        table.route("")


@pytest.mark.parametrize("name", [".", "..", "a/../b", "%2e%2E", "%252e", "a%2f.", "a\\..\\b"])
def test_the_model_for_every_name_refuses_a_name_with_a_dot_segment(name: str) -> None:
    table = make_router(make_model("*", {"1": 1}))
    assert table.route("a..b/.c").target.backend_model == "a..b/.c"
    with pytest.raises(ModelNotFound):
        table.route(name)


def test_model_list_contains_shares_in_percent_and_readiness() -> None:
    [info] = make_router(make_model("chat", {"1": 3, "2": 1})).list_models()

    assert [(v.name, v.backend_model, v.share, v.ready) for v in info.versions] == [
        ("1", "chat-1", 75, True),
        ("2", "chat-2", 25, True),
    ]


class LocalModelStub(EchoBackend):
    state = ModelState(loaded=False)

    def __init__(self) -> None:
        super().__init__()
        self.durations: list[float | None] = []

    def report_model(self) -> ModelState:
        return self.state

    async def keep_model(self, seconds: float | None) -> bool:
        self.durations.append(seconds)
        return True


def test_listings_and_readiness_follow_the_state_of_a_local_model() -> None:
    local = LocalModelStub()
    targets = {"1": Target("1", "m", local, "echo"), "2": make_target("2", "m")}
    table = make_router(compile_model(ModelInfo("chat", ()), targets, {"1": 1, "2": 1}))
    for state in (local.state, ModelState(loaded=True, features=ModelFeatures(chat=True))):
        before, local.state = table.read_readiness(), state
        [info] = table.list_models()
        assert [version.state for version in info.versions] == [state, None]
        assert (table.read_readiness() == before) == (not state.loaded)


@pytest.mark.parametrize(
    ("configured", "lengths", "expected"),
    [
        (None, [512, 256], 256),
        (1024, [512, 256], 1024),
        (None, [512, None], None),
        (None, [512], None),
        (None, [], None),
    ],
)
def test_listed_context_is_the_shortest_of_local_models(
    configured: int | None, lengths: list[int | None], expected: int | None
) -> None:
    """It is known if both versions are local and have been loaded, or by the configuration."""
    locals_ = [LocalModelStub() for _ in lengths]
    for local, length in zip(locals_, lengths, strict=True):
        local.state = ModelState(loaded=True, features=ModelFeatures(context_length=length))
    backends = [*locals_, EchoBackend(), EchoBackend()][:2]
    targets = {str(i): Target(str(i), "m", one, "torch") for i, one in enumerate(backends)}
    info = ModelInfo("chat", (), context_length=configured)
    table = make_router(compile_model(info, targets, {"0": 1, "1": 1}))
    assert [one.context_length for one in table.list_models()] == [expected]


async def test_catalog_keeps_only_models_that_are_loaded_on_demand() -> None:
    always, on_demand = LocalModelStub(), LocalModelStub()
    on_demand.state = ModelState(loaded=False, on_demand=True)
    targets = {
        name: Target(name, "m", one, "torch") for name, one in (("1", always), ("2", on_demand))
    }
    local = compile_model(ModelInfo("chat", ()), targets, {"1": 1, "2": 1})
    table = make_router(local, make_model("remote", {"1": 1}))
    catalog = PrincipalCatalog(table, None, shows_targets=True)
    assert catalog.keep_model(catalog.find_model("chat"), 60)
    for load in catalog.loads:
        await load
    assert (always.durations, on_demand.durations) == ([], [60])
    assert not catalog.keep_model(catalog.find_model("remote"), 60)


@pytest.mark.parametrize("wildcard", ["*", "x*"])
async def test_name_that_a_wildcard_serves_is_loaded_on_demand(wildcard: str) -> None:
    local = LocalModelStub()
    local.state = ModelState(loaded=False, on_demand=True)
    model = compile_model(
        ModelInfo(wildcard, ()), {"1": Target("1", "m", local, "torch")}, {"1": 1}
    )
    catalog = PrincipalCatalog(make_router(model), None, shows_targets=True)

    assert catalog.keep_model(catalog.find_model("x1"), 0)

    [load] = catalog.loads
    assert await load
    assert local.durations == [0]


@pytest.mark.parametrize(
    ("most", "on_loss", "defaults", "settings"),
    [
        (None, "report", RequestDefaults(), NO_SETTINGS),
        (None, "reject", RequestDefaults(), NO_SETTINGS),
        (9, "report", RequestDefaults(), ModelSettings(9)),
        (
            None,
            "report",
            RequestDefaults(sampling={"top_k": 1}),
            ModelSettings(None, {"sampling.top_k": 1}),
        ),
        (
            None,
            "report",
            RequestDefaults(stopping={"max_tokens": 1}),
            ModelSettings(None, {"stopping.max_tokens": 1}),
        ),
    ],
)
def test_requests_that_are_passed_through_get_the_limit_and_the_defaults_of_the_model(
    most: int | None, on_loss: OnLoss, defaults: RequestDefaults, settings: ModelSettings
) -> None:
    info = ModelInfo("*", (), max_tokens=most)
    table = make_router(
        compile_model(info, {"1": make_target("1", "m")}, {"1": 1}, on_loss, defaults)
    )

    assert table.route("any").model.settings == settings


NAMES = [
    ("Alpha", ("Alpha:x",), "Alpha"),
    ("nope", ("Alpha",), "Alpha"),
    ("ALPHA", ("ALPHA:x",), "Alpha"),
    ("nope", ("ALPHA",), "Alpha"),
    ("short", ("short:x",), "short"),
    ("beta", ("beta:x",), "beta"),
    ("BETA", ("beta:x",), "BETA"),
    ("nope", ("nope:x",), "nope"),
    ("", (), ""),
]


@pytest.mark.parametrize(("name", "others", "expected"), NAMES)
def test_other_names_are_tried_exactly_and_then_without_case(
    name: str, others: tuple[str, ...], expected: str
) -> None:
    alpha = make_model("Alpha", {"1": 1}, aliases=("short",))
    router = make_router(alpha, make_model("beta", {"1": 1}), make_model("BETA", {"1": 1}))

    assert router.find_name(RoutingInfo(name, other_names=others)) == expected


def test_request_without_a_name_is_for_the_only_model() -> None:
    assert make_router(make_model("a", {"1": 1})).find_name(RoutingInfo("")) == "a"
    assert make_router(make_model("*", {"1": 1})).find_name(RoutingInfo("")) == ""
