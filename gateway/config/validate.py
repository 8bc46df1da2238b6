"""Validates a configuration as a whole: references, and routes and fallbacks that never apply."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, Final

from backends.pool.settings import PoolSettings
from gateway.config import validate_backends, validate_pools
from gateway.config.errors import ConfigPath, quote, suggest_name
from gateway.config.registry import describe_type_mismatch
from gateway.config.schema import (
    JUDGE_FEEDBACK,
    ApiKeyConfig,
    Config,
    KeyRateLimitConfig,
    ListenerConfig,
    ModelConfig,
    RecordConfig,
    TrafficSplitConfig,
    is_numeric_version,
    map_model_names,
)
from gateway.config.validate_routes import WILDCARD_MODEL, check_routes, matches_wildcard
from gateway.config.validation_context import ValidationContext, is_set
from protocols.core.units import format_duration, has_dot_segment, parse_ip, split_address

# Listeners.

_WILDCARD_HOSTS = frozenset({"0.0.0.0", "::"})


_ALLOWED_HOST: Final = re.compile(r"\*|\[[0-9A-Fa-f:.]+\]|[\w-]+(\.[\w-]+)*", re.ASCII)
"""A name, an address, or every name; IPv6 in brackets, as in ``Host``."""


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
        for number, host in enumerate(listener.allowed_hosts):
            if is_set(host) and not _ALLOWED_HOST.fullmatch(host):
                message = "no Host can match this: write a name alone, such as gateway.example"
                context.add_issue(
                    (*path, "allowed_hosts", number),
                    f"{message}, without scheme, port, path, blank or final dot; * is every name",
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
        if name not in owners and not matches_wildcard(name, owners):
            message = f"there is no model {quote(name)}; {suggest_name(name, owners)}"
            context.add_issue(at, message, key=True)
        elif (owner := owners.get(name, name)) in names_by_owner:
            message = f"is {quote(names_by_owner[owner])} again, which already has limits; keep one"
            context.add_issue(at, message, key=True)
        else:
            names_by_owner[owner] = name
    return list(names_by_owner.values())


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


# Judges.


def check_judges(config: Config, names: Mapping[str, str], context: ValidationContext) -> None:
    """Report judges that do not exist, judge themselves, or whose verdicts are not stored."""
    models = config.models
    for name, model in models.items():
        if not is_set(model) or not is_set(model.judge) or model.judge is None:
            continue
        judge, path = model.judge.model, ("models", name, "judge")
        if is_set(config.observe) and config.observe.feedback is None:
            message = "verdicts are stored as feedback; add it: observe.feedback: {}"
            context.add_issue(path, message, key=True)
        if is_set(model.task) and model.task != "chat":
            message = f"answers of the task {model.task} have no text to judge; remove the key"
            context.add_issue(path, message, key=True)
        if not is_set(judge):
            continue
        if judge not in names:
            text = quote(context.get_raw_text((*path, "model")))
            message = f"there is no model {text}; {suggest_name(judge, names)}"
            context.add_issue((*path, "model"), message)
        elif names[judge] == name:
            context.add_issue((*path, "model"), "is this model itself; name another one")
        elif is_set(other := models[names[judge]]) and is_set(other.task) and other.task != "chat":
            context.add_issue(
                (*path, "model"), "does not chat; a judge is a model of the task chat"
            )


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


def validate_config(config: Config, context: ValidationContext, *, insecure: bool) -> None:
    """Report all issues of what could be read."""
    check_listeners(config, context, insecure=insecure)
    validate_backends.check(config, context)
    if is_set(config.backends):
        for name, backend in config.backends.items():
            if is_set(backend) and isinstance(backend, PoolSettings):
                validate_pools.check_pool(backend, ("backends", name), context)
    names: dict[str, str] | None = None
    if is_set(config.models):
        names = map_model_names(config.models)
        targets = {
            name: model for name, model in names.items() if not name.endswith(WILDCARD_MODEL)
        }
        _check_aliases(config.models, context)
        backends = config.backends if is_set(config.backends) else None
        for name, model in config.models.items():
            if is_set(model):
                _check_model(model, ("models", name), backends, context)
        check_fallbacks(config.models, targets, context)
        check_shadows(config, targets, context)
        check_judges(config, targets, context)
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
        if not matches_wildcard(name, names):
            message = f"there is no model {quote(name)}; {suggest_name(name, names)}"
            context.add_issue(("listeners", n, "default_model"), message)


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
    _check_rollout(model, (*path, "rollout"), context)


_ALL_PERCENT: Final = 100
_MIN_CHECK_INTERVAL: Final = 1.0


def _has_shadow(model: ModelConfig, version: str) -> bool:
    """Whether the shadow traffic of a model goes to a version, as far as both can be read."""
    shadow = model.shadow
    if not is_set(shadow) or not is_set(version):
        return True
    return shadow is not None and (not is_set(shadow.to) or shadow.to == version)


def _check_rollout(model: ModelConfig, path: ConfigPath, context: ValidationContext) -> None:
    rollout = model.rollout
    if not is_set(rollout) or rollout is None or not is_set(model.split):
        return
    if model.split is None:
        context.add_issue(path, "a rollout needs a split with the other versions", key=True)
        return
    weights = model.split.weights
    if is_set(rollout.to) and is_set(weights):
        if rollout.to not in (model.versions or ()):
            hint = suggest_name(rollout.to, model.versions or {})
            context.add_issue((*path, "to"), f"there is no version {quote(rollout.to)}; {hint}")
        elif not any(weight for name, weight in weights.items() if name != rollout.to):
            message = "the split has no other version with a weight above 0"
            context.add_issue((*path, "to"), message)
    feedback = rollout.guardrails.feedback if is_set(rollout.guardrails) else {}
    if model.judge is None and is_set(feedback) and JUDGE_FEEDBACK in feedback:
        message = "the model has no judge; add one to it: judge: {model: …, rubric: …}"
        context.add_issue((*path, "guardrails", "feedback", JUDGE_FEEDBACK), message, key=True)
    steps = rollout.steps
    if is_set(steps) and all(map(is_set, steps)):
        rises = all(low < high for low, high in pairwise(steps))
        if not rises or steps[-1] > _ALL_PERCENT:
            context.add_issue((*path, "steps"), "must rise, to at most 100 percent")
    if rollout.start_with == "shadow" and not _has_shadow(model, rollout.to):
        message = "needs shadow traffic to the version; add to the model: shadow: {to: …, share: …}"
        context.add_issue((*path, "start_with"), message)
    if is_set(rollout.check_every) and rollout.check_every < _MIN_CHECK_INTERVAL:
        context.add_issue((*path, "check_every"), "must be at least 1s")
    least, most = rollout.step_at_least, rollout.step_at_most
    if is_set(least) and is_set(least.time) and is_set(most) and most < least.time:
        message = f"must be at least step_at_least.time, which is {format_duration(least.time)}"
        context.add_issue((*path, "step_at_most"), f"{message}; no step could end before it holds")


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
        if is_set(name) and name not in names and not matches_wildcard(name, names):
            text = quote(context.get_raw_text((*path, n)))
            context.add_issue((*path, n), f"there is no model {text}; {suggest_name(name, names)}")
