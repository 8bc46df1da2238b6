"""What a configuration tells of, made: each part from the Struct that describes it."""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import asdict, replace

from backends import KINDS
from gateway import __version__, openapi
from gateway import config as c
from gateway.auth import Principal
from gateway.core.catalog import ModelInfo
from gateway.core.context import Timeouts
from gateway.core.ports import Backend, Dialect, Learning, Reply
from gateway.crew import crew, restricted
from gateway.descriptors import clients
from gateway.front.limits import Limits
from gateway.limits.accounts import Accounts
from gateway.limits.allowance import KeyRates, Rates
from gateway.limits.limiter import UNKEYED, Limiter
from gateway.paths import Mount
from gateway.router import ANY, Defaults, Model, Shadow, Target, compile_model
from gateway.rules import Rule, When
from gateway.server import Surroundings
from protocols import DIALECTS

if TYPE_CHECKING:
    from gateway.identity import Issuer, Tokens


def load(reference: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def make_dialect(name: str, profile: str | None, options: Mapping[str, Any]) -> Dialect:
    """The dialect of this name and profile."""
    return cast("Dialect", load(DIALECTS[name])(profile, **options))


def make_mount(dialect: c.ListenerDialect) -> Mount:
    """A dialect, where a listener has it."""
    return Mount(make_dialect(dialect.name, dialect.profile, dialect.options), dialect.prefix)


def make_pages(
    mounts: Sequence[Mount], ready: Callable[[], bool], *, keyed: bool
) -> dict[str, Callable[[], Reply]]:
    """What a listener answers by itself; the larger page is made when it is first asked for.

    ``ready`` tells whether requests may come.
    """
    well, leaving = Reply(200, b'{"status":"ok"}'), Reply(503, b'{"status":"draining"}')

    @functools.cache
    def told() -> Reply:
        return Reply(200, openapi.document(mounts, version=__version__, keyed=keyed))

    return {"/health": lambda: well if ready() else leaving, "/openapi.json": told}


def make_backend(
    settings: c.Backend, outside: Surroundings, name: str = "", models: Sequence[str] = ()
) -> Backend:
    """The backend that these settings describe. ``models`` are what it is asked for."""
    make = load(KINDS[settings.kind])
    match settings:
        case c.Pool():
            dialect = make_worker_dialect(settings)
            told = crew(name, settings, dialect, models)
            backend = make(clock=outside.clock, draw=outside.draw, **told)
        case _:
            given = msgspec.to_builtins(settings)
            backend = make(**{key: value for key, value in given.items() if key != "kind"})
    return cast("Backend", backend)


def asked_of(backend: str, config: c.Config) -> list[str]:
    """The models that a backend is asked for, by its own names."""
    targets = [
        (target.backend, target.model or name)
        for name, model in config.models.items()
        for target in model.resolve_targets().values()
    ]
    named = (model for asked, model in targets if asked == backend and model != ANY)
    return list(dict.fromkeys(named))


def asks(pool: c.Pool) -> bool:
    """Whether a pool's workers are asked about the models that they are to serve."""
    return issubclass(load(DIALECTS[pool.dialect]), Learning)


def make_worker_dialect(pool: c.Pool) -> Dialect:
    """What a pool's workers are spoken to in."""
    options: dict[str, Any] = dict(pool.options)
    if pool.fields is not None:
        options["fields"] = pool.fields
    if pool.template is not None:
        from gateway.templating import ChatTemplate  # noqa: PLC0415 - jinja2 may not be installed

        options["renderer"] = ChatTemplate(pool.template)
    return restricted(pool, make_dialect(pool.dialect, pool.profile, options))


def make_model(
    name: str, model: c.Model, backends: Mapping[str, Backend], defaults: c.Defaults, created: int
) -> Model:
    """A public model, compiled for the router."""
    targets = {
        version: Target(version, target.model or name, backends[target.backend], target.backend)
        for version, target in model.resolve_targets().items()
    }
    info = ModelInfo(
        name,
        (),
        model.task,
        model.aliases,
        created,
        model.limits.context,
        model.limits.max_tokens,
        model.options,
    )
    silent = Defaults(
        model.defaults.get_sampling_defaults(), model.defaults.get_stopping_defaults()
    )
    on_loss = model.on_loss or defaults.on_loss
    salt, sticky = (model.split.name or "", model.split.sticky or ()) if model.split else ("", ())
    compiled = compile_model(info, targets, model.resolve_weights(), on_loss, silent, salt=salt)
    return replace(
        compiled,
        protocol=model.dialect,
        fallbacks=model.fallback or (),
        sticky=sticky,
        shadow=None if model.shadow is None else make_shadow(name, model.shadow),
    )


def make_shadow(name: str, shadow: c.Shadow) -> Shadow:
    """What is copied of the requests to the model of this name."""
    return Shadow(name, shadow.to, shadow.share, shadow.max_concurrent, shadow.timeout)


def make_rule(rule: c.Rule) -> Rule:
    """An exception, as the router tries it."""
    when = rule.when
    headers = {name.lower(): text for name, text in when.header.items()}
    share = 1.0 if when.share is None else when.share
    compiled = When(when.dialect, headers, when.body, when.key, when.tag, share)
    return Rule(rule.name, when.model, compiled, rule.use.model, rule.use.version)


def make_principal(key: c.Key, aliases: Mapping[str, str]) -> Principal:
    """The holder of a configured key. ``aliases`` gives the model that each stands for."""
    models = frozenset(aliases.get(name, name) for name in key.models) if key.models else None
    tags = frozenset(key.tags)
    return Principal(key.name, key.sha256, models, key.dialect, tags, key.explain)


def make_limiter(config: c.Config, accounts: Accounts) -> Limiter | None:
    """What holds the keys to their limits; None where there are none."""
    aliases = {alias: name for name, one in config.models.items() for alias in one.aliases}
    common = config.defaults.limits
    named = {key.name: key.limits or common for key in config.keys} or {UNKEYED: common}
    told = {name: _make_rates(one, aliases) for name, one in named.items() if one is not None}
    others = None if common is None else _make_rates(common, aliases)
    return Limiter(told, accounts, others) if told else None


def _make_rates(limits: c.KeyLimits, aliases: Mapping[str, str]) -> KeyRates:
    models = limits.models or {}
    narrow = {aliases.get(name, name): _rates(one) for name, one in models.items()}
    return KeyRates(_rates(limits), narrow)


def _rates(told: c.Allowance) -> Rates:
    return Rates(told.requests, told.tokens, told.concurrent, told.budget)


def make_issuer(config: c.Config, clock: Callable[[], float]) -> "Issuer | None":
    """Who signs tokens, if somebody does."""
    if config.identity is None:
        return None
    from gateway.identity import Issuer  # noqa: PLC0415 - its libraries may not be installed

    return Issuer(config.identity, clock)


def make_tokens(
    config: c.Config, issuer: "Issuer | None", now: Callable[[], float]
) -> "Tokens | None":
    """What verifies tokens, if somebody signs them."""
    if config.identity is None or issuer is None:
        return None
    from gateway.identity import Rules, Tokens  # noqa: PLC0415 - as above

    aliases = {alias: name for name, one in config.models.items() for alias in one.aliases}
    return Tokens(Rules(config.identity, aliases), issuer, now)


def make_timeouts(timeouts: c.Timeouts) -> Timeouts:
    """The limits of an exchange, from the configuration."""
    return Timeouts(**asdict(timeouts))


def make_limits(limits: c.Limits) -> Limits:
    """What a listener holds its clients to."""
    return Limits(
        max_header_size=limits.header,
        max_connections=min(limits.connections, clients()),
        max_per_address=limits.connections_per_address,
        header_timeout=limits.head_time,
        body_timeout=limits.body_pause,
        idle_timeout=limits.keep,
    )
