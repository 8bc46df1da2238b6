"""Validates a configuration as a whole: references, and routes and fallbacks that never apply."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from backends.pool.settings import PoolSettings, WorkerAuthSettings, WorkerSourceSettings
from gateway.config import validate_backends
from gateway.config.errors import ConfigPath, join_names, quote, suggest_name
from gateway.config.registry import describe_type_mismatch
from gateway.config.schema import (
    ApiKeyConfig,
    Config,
    KeyRateLimitConfig,
    ListenerConfig,
    ModelConfig,
    RecordConfig,
    RouteConfig,
    RouteMatchConfig,
    TrafficSplitConfig,
    is_numeric_version,
    map_model_names,
)
from gateway.config.validation_context import ValidationContext, is_set
from protocols.core.units import has_dot_segment, parse_ip, split_address

# Listeners.

_WILDCARD_HOSTS = frozenset({"0.0.0.0", "::"})


def check_listeners(config: Config, context: ValidationContext, *, insecure: bool) -> None:
    """Report addresses that conflict, or that are reachable without authentication."""
    addresses: list[tuple[str, int]] = []
    if is_set(config.admin) and config.admin is not None and is_set(config.admin.address):
        address, address_path = config.admin.address, ("admin", "address")
        _check_listen_address(address, address_path, addresses, context)
        if config.admin.sha256 is None and not is_loopback(address):
            context.add_issue(
                address_path,
                "anyone who reaches this address could change the workers; "
                "set the sha256 of an admin key, or listen on 127.0.0.1",
            )
        if config.admin.key_for == "changes" and not is_loopback(address):
            context.add_issue(
                ("admin", "key_for"),
                "beyond loopback addresses every request needs the key; remove key_for",
            )
    if not is_set(config.listeners):
        return
    for n, listener in enumerate(config.listeners):
        path = ("listeners", n)
        if not is_set(listener):
            continue
        if listener.proxy_protocol is not None and listener.trusted_proxies == ():
            context.add_issue(
                (*path, "proxy_protocol"),
                "anyone could name another address: set trusted_proxies to the proxies' networks",
            )
        if is_set(listener.address):
            _check_listen_address(listener.address, (*path, "address"), addresses, context)
            if not insecure and _has_no_auth(config) and not is_loopback(listener.address):
                context.add_issue(
                    (*path, "address"),
                    "anyone who reaches this address may use every model, since there are no keys; "
                    "add keys, listen on 127.0.0.1, or start with --insecure-no-auth",
                )


def _has_no_auth(config: Config) -> bool:
    """Whether neither API keys nor tokens are configured."""
    return config.keys == () and config.keys_file is None and config.identity is None


def _check_listen_address(
    address: str, path: ConfigPath, addresses: list[tuple[str, int]], context: ValidationContext
) -> None:
    host, port = split_address(address)
    for other, other_port in addresses:
        is_same_host = host == other or not _WILDCARD_HOSTS.isdisjoint((host, other))
        if port and port == other_port and is_same_host:
            context.add_issue(
                path,
                f"another listener uses {other}:{other_port} already; "
                "choose another port, or serve the protocols on one listener",
            )
            return
    addresses.append((host, port))


def is_loopback(address: str) -> bool:
    host, _ = split_address(address)
    ip = parse_ip(host)
    return ip.is_loopback if ip is not None else host == "localhost"


# Fallbacks.


def check_fallbacks(
    models: Mapping[str, ModelConfig], names: Mapping[str, str], context: ValidationContext
) -> None:
    """Report fallbacks that do not exist, have another task or form a cycle."""
    followers = {name: list(_list_fallback_models(models[name], names)) for name in models}
    has_cycle = _has_cycle(followers)
    for name, model in models.items():
        if not is_set(model) or not is_set(model.fallback):
            continue
        if not model.fallback:
            if is_set(model.fallback_requires_access) and model.fallback_requires_access:
                context.add_issue(
                    ("models", name, "fallback_requires_access"),
                    "this model has no fallback; add `fallback`, or remove this line",
                )
            continue
        versions = list_versions(model)
        for n, fallback in enumerate(model.fallback):
            path = ("models", name, "fallback", n)
            if not is_set(fallback) or fallback in versions:
                continue
            if fallback not in names:
                text = quote(context.get_raw_text(path))
                context.add_issue(
                    path,
                    f"{text} is neither a version of this model nor another model; "
                    f"{suggest_name(fallback, [*versions, *names])}",
                )
            elif has_cycle and (cycle := _find_cycle(names[fallback], name, followers)):
                chain = " to ".join([name, *cycle])
                context.add_issue(path, f"the fallbacks form a cycle: {chain}; remove one of them")
            else:
                check_task(model, models[names[fallback]], path, context)


def check_task(
    model: ModelConfig, other: ModelConfig, path: ConfigPath, context: ValidationContext
) -> None:
    """Report the model ``other``, named at ``path``, if its task is not that of ``model``."""
    if not is_set(other) or not is_set(model.task) or not is_set(other.task):
        return
    if model.task != other.task:
        text = quote(context.get_raw_text(path))
        message = f"{text} has the task {other.task}, and this model has {model.task}"
        context.add_issue(
            path, f"{message}; name a model of the same task, or correct one of the two"
        )


def _has_targets(model: ModelConfig) -> bool:
    return (
        is_set(model.versions) and is_set(model.backend) and bool(model.versions or model.backend)
    )


def _list_fallback_models(model: ModelConfig, names: Mapping[str, str]) -> Iterator[str]:
    """The other models that are fallbacks of a model."""
    if not is_set(model) or not is_set(model.fallback):
        return
    versions = list_versions(model)
    for name in model.fallback or ():
        if is_set(name) and name in names and name not in versions:
            yield names[name]


def _has_cycle(followers: Mapping[str, Sequence[str]]) -> bool:
    """Whether the fallbacks form any cycle, in linear time."""
    try:
        TopologicalSorter(followers).prepare()
    except CycleError:
        return True
    return False


def _find_cycle(start: str, goal: str, followers: Mapping[str, Sequence[str]]) -> list[str] | None:
    """The chain of fallbacks from ``start`` to ``goal``; None if there is none."""
    chains, visited = [[start]], {start}
    while chains:
        chain = chains.pop()
        if chain[-1] == goal:
            return chain
        for name in followers[chain[-1]]:
            if name not in visited:
                visited.add(name)
                chains.append([*chain, name])
    return None


def list_versions(model: ModelConfig) -> list[str]:
    """The names of a model's versions, if they could be read."""
    return list(model.resolve_targets()) if _has_targets(model) else []


# Rate limits.


def check_rate_limits(
    config: Config, owners: Mapping[str, str], context: ValidationContext
) -> None:
    """Report limits that never apply. ``owners`` is the model of each name."""
    if is_set(config.defaults):
        _check_model_limits(config.defaults.limits, ("defaults", "limits"), owners, context)
    for n, key in enumerate(config.keys if is_set(config.keys) else ()):
        if not is_set(key) or key.limits is None or context.is_full:
            continue
        path = ("keys", n, "limits")
        limited_names = _check_model_limits(key.limits, path, owners, context)
        if is_set(key.models) and key.models is not None and all(map(is_set, key.models)):
            allowed_models = {owners.get(name, name) for name in key.models}
            for name in limited_names:
                if owners.get(name, name) not in allowed_models:
                    message = "the key may not use this model; remove it, or add it to models"
                    context.add_issue((*path, "models", name), message, key=True)


def _check_model_limits(
    limits: KeyRateLimitConfig | None,
    path: ConfigPath,
    owners: Mapping[str, str],
    context: ValidationContext,
) -> list[str]:
    """Report unknown and repeated models. Returns the others."""
    if not is_set(limits) or limits is None or not is_set(limits.models):
        return []
    names_by_owner: dict[str, str] = {}
    for name in limits.models or ():
        at = (*path, "models", name)
        if name not in owners and not _matches_wildcard(name, owners):
            message = f"there is no model {quote(name)}; {suggest_name(name, owners)}"
            context.add_issue(at, message, key=True)
        elif (owner := owners.get(name, name)) in names_by_owner:
            message = f"is {quote(names_by_owner[owner])} again, which already has limits; keep one"
            context.add_issue(at, message, key=True)
        else:
            names_by_owner[owner] = name
    return list(names_by_owner.values())


# Routes.

_WILDCARD_MODEL = "*"


def _matches_wildcard(name: str, names: Iterable[str]) -> bool:
    """Whether a model for every name with some beginning serves this name."""
    return any(
        other.endswith(_WILDCARD_MODEL) and name.startswith(other.removesuffix(_WILDCARD_MODEL))
        for other in names
    )


def check_routes(config: Config, context: ValidationContext) -> None:
    """Report routes with unknown names, and routes that never match."""
    if not is_set(config.routes):
        return
    numbers_by_name: dict[str, int] = {}
    for n, rule in enumerate(config.routes):
        if is_set(rule) and is_set(rule.name) and numbers_by_name.setdefault(rule.name, n) != n:
            message = (
                f"routes[{numbers_by_name[rule.name]}] has the same name; each rule has its own"
            )
            context.add_issue(("routes", n, "name"), message)
    rules = _RouteValidator(config, context)
    earlier: list[tuple[int, RouteMatchConfig]] = []
    for n, rule in enumerate(config.routes):
        if not is_set(rule):
            continue
        rules.check_target(rule, ("routes", n, "to"))
        if is_set(rule.when) and rules.check_match(rule.when, ("routes", n, "when")):
            rules.check_reachable(rule.when, earlier, ("routes", n))
            if rule.when.share in (None, 1):
                earlier.append((n, rule.when))


class _RouteValidator:
    """Validates routes. Names that could not be read are None and are not reported again."""

    def __init__(self, config: Config, context: ValidationContext) -> None:
        self._context = context
        self._models = _get_models(config)
        self._owners = None if self._models is None else map_model_names(self._models)
        self._keys = _get_keys(config)
        self._keys_by_tag = _group_keys_by_tag(self._keys)
        self._listener_protocols = _list_listener_protocols(config)

    def check_target(self, rule: RouteConfig, path: ConfigPath) -> None:
        """Report a target that does not exist."""
        target = rule.to
        if not is_set(target):
            return
        if target.model is None and target.version is None:
            self._context.add_issue(
                path, "the route has no target; give it a model, a version, or both"
            )
        elif is_set(target.model) and (target.model or "").endswith(_WILDCARD_MODEL):
            message = "the wildcard model cannot be a target; name a model"
            self._context.add_issue((*path, "model"), message)
        elif self._check_name(target.model, self._owners, "there is no model", (*path, "model")):
            model_name = rule.when.model if is_set(rule.when) else ""
            if target.version is not None and is_set(target.version):
                self._check_version(target.version, target.model or model_name, (*path, "version"))

    def check_match(self, when: RouteMatchConfig, path: ConfigPath) -> bool:
        """Report conditions that can't be met. Returns False if an issue was reported."""
        results = [
            self._check_name(when.model, self._owners, "there is no model", (*path, "model")),
            self._check_name(when.key, self._keys, "there is no key", (*path, "key")),
            self._check_name(when.tag, self._keys_by_tag, "no key has the tag", (*path, "tag")),
            self._check_protocol(when.protocol, (*path, "protocol")),
            self._check_headers(when.header, (*path, "header")),
            is_set(when.body) and all(map(is_set, when.body.values())),
            is_set(when.share),
        ]
        return all(results) and self._check_key_match(when, path)

    def check_reachable(
        self,
        conditions: RouteMatchConfig,
        earlier: list[tuple[int, RouteMatchConfig]],
        path: ConfigPath,
    ) -> None:
        """Report a route whose requests are all matched by earlier routes."""
        models = [conditions.model] if conditions.model is not None else list(self._models or ())
        rule_numbers: set[int] = set()
        for model in models:
            matching = (
                n
                for n, one in earlier
                if self._applies_to(one, model) and self._covers(one, conditions)
            )
            rule_number = next(matching, None)
            if rule_number is None:
                return
            rule_numbers.add(rule_number)
        if not rule_numbers:  # the models could not be read
            return
        names = " and ".join(f"routes[{n}]" for n in sorted(rule_numbers))
        self._context.add_issue(
            path,
            f"the route never matches: {names} match all its requests before; "
            "move it up, or remove it",
        )

    # --- names ------------------------------------------------------------------------------------

    def _check_name(
        self,
        name: str | None,
        names: Mapping[str, object] | None,
        message_start: str,
        path: ConfigPath,
    ) -> bool:
        """Whether a name that is set is one of ``names``; reports it if not."""
        if name is None or names is None or not is_set(name):
            return name is None
        if name not in names:
            text = quote(self._context.get_raw_text(path))
            self._context.add_issue(path, f"{message_start} {text}; {suggest_name(name, names)}")
        return name in names

    def _check_version(self, version: str, name: str | None, path: ConfigPath) -> None:
        if name is None:
            message = "the model of this version is unknown; add when: {model: NAME}"
            self._context.add_issue(path, message)
            return
        model = (self._models or {}).get((self._owners or {}).get(name, ""))
        if model is None or not is_set(model.versions) or not is_set(model.backend):
            return
        versions = list(model.versions or ("1",))
        if version not in versions:
            text = quote(self._context.get_raw_text(path))
            self._context.add_issue(
                path, f"there is no version {text}; {suggest_name(version, versions)}"
            )

    def _check_protocol(self, name: str | None, path: ConfigPath) -> bool:
        if name is None or not is_set(name):
            return name is None
        if not self._context.check_client_protocol(name, None, path):
            return False
        if self._listener_protocols is not None and name not in self._listener_protocols:
            message = f"no listener serves {name}, so the route never matches"
            self._context.add_issue(
                path, f"{message}; {suggest_name(name, self._listener_protocols)}"
            )
            return False
        return True

    def _check_headers(self, headers: Mapping[str, str], path: ConfigPath) -> bool:
        if not is_set(headers):
            return False
        spellings: dict[str, str] = {}
        for name in headers:
            first = spellings.setdefault(name.lower(), name)
            if first != name:
                message = f"is {quote(first)} again, since headers have no case; keep one"
                self._context.add_issue((*path, name), message, key=True)
        return len(spellings) == len(headers) and all(map(is_set, headers.values()))

    def _check_key_match(self, when: RouteMatchConfig, path: ConfigPath) -> bool:
        """Whether the key can meet the other conditions; reports it if not."""
        key = (self._keys or {}).get(when.key or "")
        if key is None or self._owners is None:
            return True
        if when.tag is not None and when.tag not in key.tags:
            message = f"the key {quote(key.name)} has no such tag, so the route never matches"
            self._context.add_issue((*path, "tag"), message)
            return False
        allowed_models = {self._owners.get(one, one) for one in key.models or ()}
        if (
            key.models
            and when.model not in (None, _WILDCARD_MODEL)
            and self._owners[when.model] not in allowed_models
        ):
            message = f"the key {quote(key.name)} may not use this model, so the route "
            self._context.add_issue((*path, "model"), message + "never matches")
            return False
        return True

    # --- unreachable routes -----------------------------------------------------------------------

    def _applies_to(self, when: RouteMatchConfig, model: str) -> bool:
        owners = self._owners or {}
        return when.model is None or owners[when.model] == owners[model]

    def _covers(self, wide: RouteMatchConfig, narrow: RouteMatchConfig) -> bool:
        """Whether ``wide`` matches whenever ``narrow`` does, models and shares aside."""
        anybody = wide.key is None and wide.tag is None
        keyed = narrow.key is not None or narrow.tag is not None
        headers = {name.lower(): text for name, text in narrow.header.items()}
        return (
            wide.protocol in (None, narrow.protocol)
            and (
                anybody
                or (keyed and self._find_matching_keys(narrow) <= self._find_matching_keys(wide))
            )
            and all(headers.get(name.lower()) == text for name, text in wide.header.items())
            and all(_is_equal_scalar(narrow.body.get(name), one) for name, one in wide.body.items())
        )

    def _find_matching_keys(self, when: RouteMatchConfig) -> AbstractSet[str]:
        """The keys whose requests the conditions can match."""
        keys = self._keys or {}
        names = keys.keys() if when.key is None else keys.keys() & {when.key}
        return names if when.tag is None else names & (self._keys_by_tag or {}).get(when.tag, set())


def _get_models(config: Config) -> Mapping[str, ModelConfig] | None:
    """Every model by its name, if all could be read."""
    models = config.models
    if not is_set(models) or not all(map(is_set, models.values())):
        return None
    aliases = [one.aliases for one in models.values()]
    is_complete = all(map(is_set, aliases)) and all(
        is_set(alias) for group in aliases for alias in group
    )
    return models if is_complete else None


def _get_keys(config: Config) -> Mapping[str, ApiKeyConfig] | None:
    """Every key by its name, if all could be read."""
    keys = config.keys
    if not is_set(keys) or not all(map(is_set, keys)):
        return None
    read = (is_set(key.name) and is_set(key.tags) and is_set(key.models) for key in keys)
    return {key.name: key for key in keys} if all(read) else None


def _group_keys_by_tag(
    keys: Mapping[str, ApiKeyConfig] | None,
) -> Mapping[str, AbstractSet[str]] | None:
    """The names of the keys that have a tag, by tag."""
    if keys is None:
        return None
    names_by_tag: dict[str, set[str]] = {}
    for name, key in keys.items():
        for tag in key.tags:
            names_by_tag.setdefault(tag, set()).add(name)
    return names_by_tag


def _list_listener_protocols(config: Config) -> list[str] | None:
    """The protocols of the listeners, if all could be read; every protocol without listeners."""
    if not is_set(config.listeners) or not config.listeners:
        return None
    if not all(is_set(one) and is_set(one.protocols) for one in config.listeners):
        return None
    protocols = [protocol for one in config.listeners for protocol in one.protocols]
    if not all(is_set(protocol) and is_set(protocol.name) for protocol in protocols):
        return None
    return [protocol.name for protocol in protocols]


def _is_equal_scalar(first: object, second: object) -> bool:
    """Whether two scalars are equal: 1 is 1.0, but not true."""
    return first == second and isinstance(first, bool) == isinstance(second, bool)


# Shadow traffic.


def check_shadows(config: Config, names: Mapping[str, str], context: ValidationContext) -> None:
    """Report shadow targets that do not exist, or that serve the original requests."""
    models = config.models
    for name, model in models.items():
        if not is_set(model) or not is_set(model.shadow) or model.shadow is None:
            continue
        to, path = model.shadow.to, ("models", name, "shadow", "to")
        if not is_set(to):
            continue
        versions = list_versions(model)
        if to in versions:
            _check_shadow_version(to, model, config, path, context)
        elif to not in names:
            text = quote(context.get_raw_text(path))
            context.add_issue(
                path,
                f"{text} is neither a version of this model nor another model; "
                f"{suggest_name(to, [*versions, *names])}",
            )
        elif names[to] == name:
            message = "is this model itself; name one of its versions, or another model"
            context.add_issue(path, message)
        else:
            check_task(model, models[names[to]], path, context)


def _check_shadow_version(
    to: str, model: ModelConfig, config: Config, path: ConfigPath, context: ValidationContext
) -> None:
    """Report a version that gets all of the traffic, if no route could send some elsewhere."""
    split = model.split
    if not is_set(split) or (len(model.resolve_targets()) > 1 and config.routes != ()):
        return
    if split is not None and not (
        is_set(split.weights) and all(map(is_set, split.weights.values()))
    ):
        return
    if {version for version, weight in model.resolve_weights().items() if weight} == {to}:
        message = "every request goes to this version already, so there is nothing to mirror"
        context.add_issue(path, f"{message}; name another version, or add a split")


# Recordings.


def check_recordings(config: Config, context: ValidationContext) -> None:
    """Report patterns that can't be searched for, and folders with two limits."""
    folders = dict[str, RecordConfig]()
    for path, record in _list_records(config):
        _check_redaction(record, path, context)
        if not (is_set(record.to) and is_set(record.size) and is_set(record.retention)):
            continue
        first = folders.setdefault(record.to.rstrip("/"), record)
        for name in ("size", "retention"):
            if getattr(first, name) != getattr(record, name):
                message = "another model or route records to this folder with another limit"
                context.add_issue((*path, name), f"{message}; write the same, or another folder")


def _list_records(config: Config) -> Iterator[tuple[ConfigPath, RecordConfig]]:
    """Every ``record`` that could be read, with its path."""
    sections: list[tuple[ConfigPath, object]] = [(("defaults",), config.defaults)]
    if is_set(config.models):
        sections += ((("models", name), model) for name, model in config.models.items())
    if is_set(config.routes):
        sections += ((("routes", number), route) for number, route in enumerate(config.routes))
    for path, section in sections:
        record = getattr(section, "record", None)
        if isinstance(record, RecordConfig):
            yield (*path, "record"), record


def _check_redaction(record: RecordConfig, path: ConfigPath, context: ValidationContext) -> None:
    """Report patterns that are no regular expressions, and redaction that does not apply."""
    path, redact = (*path, "redact"), record.redact
    if not is_set(redact):
        return
    if is_set(record.bodies) and record.bodies != "redacted" and context.is_present(path):
        context.add_issue(
            path, f"bodies are {record.bodies}, so nothing is redacted; write bodies: redacted"
        )
    for name, text in redact.patterns.items() if is_set(redact.patterns) else ():
        if not is_set(text):
            continue
        try:
            with warnings.catch_warnings(action="error"):  # what Python may read otherwise later
                matches_nothing = re.compile(text).search("") is not None
        except (re.error, FutureWarning) as error:
            context.add_issue(
                (*path, "patterns", name), f"{quote(text)} is no regular expression: {error}"
            )
        else:
            if matches_nothing:
                message = "matches the empty string, so it would match everywhere"
                context.add_issue((*path, "patterns", name), f"{quote(text)} {message}")


_FULL_PERCENTAGE = 100
_SOURCES: Final = ("url", "dns", "srv", "file")
_DISCOVERY: Final = ("refresh_interval", "scheme", "nameserver")
_DEFAULT_WORKER: Final = WorkerSourceSettings()
_AUTH_KINDS: Final = ("bearer", "header", "query", "basic")
_OWN_HEADERS: Final = frozenset(
    {"accept", "accept-encoding", "connection", "content-length", "content-type", "expect", "host",
     "te", "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip
"""Headers that no key of a worker may have: the HTTP client or the protocol sets them."""


def validate_config(config: Config, context: ValidationContext, *, insecure: bool) -> None:
    """Report all issues of what could be read."""
    check_listeners(config, context, insecure=insecure)
    validate_backends.check(config, context)
    if is_set(config.backends):
        for name, backend in config.backends.items():
            if is_set(backend) and isinstance(backend, PoolSettings):
                _check_pool(backend, ("backends", name), context)
    names: dict[str, str] | None = None
    if is_set(config.models):
        names = map_model_names(config.models)
        targets = {
            name: model for name, model in names.items() if not name.endswith(_WILDCARD_MODEL)
        }
        _check_aliases(config.models, context)
        backends = config.backends if is_set(config.backends) else None
        for name, model in config.models.items():
            if is_set(model):
                _check_model(model, ("models", name), backends, context)
        check_fallbacks(config.models, targets, context)
        check_shadows(config, targets, context)
    if names is not None and is_set(config.listeners):
        _check_default_models(config.listeners, names, context)
    if is_set(config.keys):
        _check_keys(config.keys, names, context)
    if names is not None:
        check_rate_limits(config, names, context)
    check_routes(config, context)
    check_recordings(config, context)


def _check_default_models(
    listeners: Sequence[ListenerConfig], names: Mapping[str, str], context: ValidationContext
) -> None:
    """Report default models of listeners that do not exist."""
    for n, listener in enumerate(listeners):
        name = listener.default_model if is_set(listener) else None
        if not is_set(name) or name is None or name in names:
            continue
        if not _matches_wildcard(name, names):
            message = f"there is no model {quote(name)}; {suggest_name(name, names)}"
            context.add_issue(("listeners", n, "default_model"), message)


# --- pools ---------------------------------------------------------------------------------------


def _check_pool(pool: PoolSettings, path: ConfigPath, context: ValidationContext) -> None:
    health = pool.health.path if is_set(pool.health) else None
    if is_set(health) and health is not None and not health.startswith("/"):
        message = "is not a path; write it as /health: it is appended to the worker's URL"
        context.add_issue((*path, "health", "path"), message)
    if is_set(pool.workers):
        _check_workers(pool.workers, (*path, "workers"), context)
        _check_pool_tls(pool, (*path, "tls"), context)


def _check_workers(
    workers: Sequence[WorkerSourceSettings], path: ConfigPath, context: ValidationContext
) -> None:
    numbers_by_url: dict[str, int] = {}
    for n, worker in enumerate(workers):
        if not is_set(worker):
            continue
        at = (*path, n)
        _check_worker_auth(worker.auth, (*at, "auth"), context)
        sources = [name for name in _SOURCES if getattr(worker, name) is not None]
        if len(sources) != 1:
            context.add_issue(at, f"a worker needs one of {join_names(_SOURCES)}; give exactly one")
        elif is_set(worker.url) and worker.url is not None:
            first = numbers_by_url.setdefault(worker.url, n)
            if first != n:
                message = f"this is workers[{first}] again; increase the weight of that one"
                context.add_issue((*at, "url"), message)
            for name in _DISCOVERY:
                if getattr(worker, name) != getattr(_DEFAULT_WORKER, name):
                    message = "has no effect together with url; remove it"
                    context.add_issue((*at, name), message, key=True)
        elif worker.dns is not None and worker.scheme == "https":
            context.add_issue(
                (*at, "scheme"),
                "https verifies a name, and dns gives only addresses; list the workers by url, "
                "or use srv",
            )


def _check_worker_auth(
    auth: WorkerAuthSettings | None, path: ConfigPath, context: ValidationContext
) -> None:
    """Report credentials of no kind or of several, and headers that a client may not set."""
    if not is_set(auth) or auth is None:
        return
    kinds = [name for name in _AUTH_KINDS if getattr(auth, name) is not None]
    empty = [
        name for name in _AUTH_KINDS if name not in kinds and context.is_present((*path, name))
    ]
    for name in empty:
        context.add_issue((*path, name), "has no value; give it one or remove the key")
    if len(kinds) != 1 and not empty:
        context.add_issue(path, f"auth needs one of {join_names(_AUTH_KINDS)}; give exactly one")
    name = auth.header.name if is_set(auth.header) and auth.header is not None else ""
    if is_set(name) and name.lower() in _OWN_HEADERS:
        message = f"the gateway sets {name} itself; name the header of the key"
        context.add_issue((*path, "header", "name"), message)


def check_listed_workers(
    workers: Sequence[WorkerSourceSettings], context: ValidationContext
) -> None:
    """Report issues of the workers in a worker list file, where each must have a URL."""
    _check_workers(workers, (), context)
    for n, worker in enumerate(workers):
        if is_set(worker) and worker.url is None:
            context.add_issue((n,), "each worker in a file needs a url; add it")


def _check_pool_tls(pool: PoolSettings, path: ConfigPath, context: ValidationContext) -> None:
    plaintext = [
        is_set(one) and is_set(one.url) and is_set(one.scheme)
        and not (one.url or "https:").startswith("https:")
        and one.scheme == "http"
        for one in pool.workers
    ]  # fmt: skip
    if pool.tls is not None and plaintext and all(plaintext):
        message = "no worker uses TLS, so this has no effect"
        context.add_issue(path, f"{message}; write https:// or remove it", key=True)


# --- models --------------------------------------------------------------------------------------


def _check_aliases(models: Mapping[str, ModelConfig], context: ValidationContext) -> None:
    owners = {name: name for name in models}
    for name, model in models.items():
        if not is_set(model) or not is_set(model.aliases):
            continue
        for n, alias in enumerate(model.aliases):
            if not is_set(alias):
                continue
            at = ("models", name, "aliases", n)
            if alias in owners:
                owner = "a model" if alias in models else f"an alias of {quote(owners[alias])}"
                context.add_issue(
                    at,
                    f"{quote(context.get_raw_text(at))} is {owner} already; choose another name",
                )
            owners.setdefault(alias, name)


def _check_model(
    model: ModelConfig,
    path: ConfigPath,
    backends: Mapping[str, object] | None,
    context: ValidationContext,
) -> None:
    _check_client_protocol(model, path, context)
    _check_model_options(model.options, path, context)
    single, several = model.backend is not None, model.versions is not None
    if single and several:
        context.add_issue(
            (*path, "versions"), "give either backend and model, or versions; not both", key=True
        )
    elif several:
        if model.model is not None:
            message = "each version has its own model; move this into the versions"
            context.add_issue((*path, "model"), message, key=True)
    elif not single:
        context.add_issue(
            path, "the model has no target; give it a backend, or versions with backends"
        )
    _check_backend_model(model.model, (*path, "model"), context)
    if model.backend is not None:
        _check_backend(model.backend, (*path, "backend"), backends, context)
    if is_set(model.versions) and model.versions is not None:
        for version, target in model.versions.items():
            if is_set(target):
                at = (*path, "versions", version)
                _check_backend(target.backend, (*at, "backend"), backends, context)
                _check_backend_model(target.model, (*at, "model"), context)
    _check_split(model, path, context)


def _check_backend(
    name: str,
    path: ConfigPath,
    backends: Mapping[str, object] | None,
    context: ValidationContext,
) -> None:
    if is_set(name) and backends is not None and name not in backends:
        text = quote(context.get_raw_text(path))
        context.add_issue(path, f"there is no backend {text}; {suggest_name(name, backends)}")


def _check_backend_model(name: str | None, path: ConfigPath, context: ValidationContext) -> None:
    if is_set(name) and name is not None and has_dot_segment(name):
        text = quote(context.get_raw_text(path))
        context.add_issue(path, f"{text} holds '.' or '..', which mean folders in a worker's path")


def _check_split(model: ModelConfig, path: ConfigPath, context: ValidationContext) -> None:
    if not is_set(model.versions) or not is_set(model.split):
        return
    versions = list(model.versions or ())
    if model.split is None:
        if len(versions) > 1 and not any(map(is_numeric_version, versions)):
            weights = ", ".join(f'"{version}": 1' for version in versions)
            hint = f"give one a number, or add split: {{weights: {{{weights}}}}}"
            message = f"it is undefined which version gets the traffic; {hint}"
            context.add_issue((*path, "versions"), message, key=True)
        return
    if not versions:
        message = "a split needs versions; add them, or remove it"
        context.add_issue((*path, "split"), message, key=True)
    elif is_set(model.split.weights):
        _check_weights(model.split, versions, (*path, "split", "weights"), context)
    if is_set(model.split.sticky) and model.split.sticky is not None:
        _check_sticky(model.split.sticky, (*path, "split", "sticky"), context)


def _check_sticky(sticky: Sequence[str], path: ConfigPath, context: ValidationContext) -> None:
    for n, source in enumerate(sticky):
        if not is_set(source):
            continue
        if source in sticky[:n]:
            context.add_issue((*path, n), "is listed twice; remove one")
        elif "address" in sticky[:n]:
            message = "is never used, since every request has an address; move it before address"
            context.add_issue((*path, n), message)


def _check_weights(
    split: TrafficSplitConfig, versions: list[str], path: ConfigPath, context: ValidationContext
) -> None:
    for version in split.weights:
        if version not in versions:
            message = f"there is no version {quote(version)}; {suggest_name(version, versions)}"
            context.add_issue((*path, version), message, key=True)
    weights = list(split.weights.values())
    if not all(map(is_set, weights)):
        return
    percent = [context.get_raw_text((*path, version)).endswith("%") for version in split.weights]
    if not any(weights):
        context.add_issue(path, "every weight is 0, so no version gets requests; increase one")
    elif all(percent) and sum(weights) != _FULL_PERCENTAGE:
        context.add_issue(path, f"the weights add up to {sum(weights)}%; they must add up to 100%")
    elif any(percent) and not all(percent):
        context.add_issue(
            path, "some weights are percentages and some are not; write all in one way"
        )


def _check_model_options(
    options: Mapping[str, Any], path: ConfigPath, context: ValidationContext
) -> None:
    """Report unknown model options of protocols, and wrong values."""
    for name, values in options.items():
        if not is_set(values) or not context.check_protocol(name, None, (*path, name)):
            continue
        types = context.protocols.get_model_options(name)
        if types is None:
            continue
        for key, value in values.items():
            at = (*path, name, key)
            if key not in types:
                message = f"{name} has no model option {quote(key)}; {suggest_name(key, types)}"
                context.add_issue(at, message, key=True)
            elif is_set(value) and (mismatch := describe_type_mismatch(value, types[key])):
                context.add_issue(at, mismatch)


# --- keys ----------------------------------------------------------------------------------------


def _check_keys(
    all_keys: Sequence[ApiKeyConfig], names: Mapping[str, str] | None, context: ValidationContext
) -> None:
    keys = [(n, key) for n, key in enumerate(all_keys) if is_set(key)]
    for field in ("name", "sha256"):
        numbers_by_value: dict[str, int] = {}
        for n, key in keys:
            value = getattr(key, field)
            if is_set(value) and numbers_by_value.setdefault(value, n) != n:
                place = context.describe_key(numbers_by_value[value])
                message = f"{place} has the same {field}; each key has its own"
                context.add_issue(("keys", n, field), message)
                if context.is_full:
                    return
    if names is None:
        return
    for n, key in keys:
        if context.is_full:
            return
        _check_key_models(key, ("keys", n, "models"), names, context)
        _check_client_protocol(key, ("keys", n), context)


def _check_client_protocol(
    section: ApiKeyConfig | ModelConfig, path: ConfigPath, context: ValidationContext
) -> None:
    if is_set(section.protocol) and section.protocol is not None:
        context.check_client_protocol(section.protocol, None, (*path, "protocol"))


def _check_key_models(
    key: ApiKeyConfig, path: ConfigPath, names: Mapping[str, str], context: ValidationContext
) -> None:
    if not is_set(key.models):
        return
    for n, name in enumerate(key.models or ()):
        if is_set(name) and name not in names and not _matches_wildcard(name, names):
            text = quote(context.get_raw_text((*path, n)))
            context.add_issue((*path, n), f"there is no model {text}; {suggest_name(name, names)}")
