"""Validates a configuration as a whole: models, and the checks of other sections' files."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from backends.pool.settings import PoolSettings
from gateway.config import validate_pools
from gateway.config.errors import ConfigPath, quote, suggest_name
from gateway.config.registry import describe_type_mismatch
from gateway.config.schema import (
    JUDGE_FEEDBACK,
    Config,
    ListenerConfig,
    ModelConfig,
    TrafficSplitConfig,
    is_numeric_version,
    map_model_names,
    map_model_tasks,
)
from gateway.config.validate_backends import check_backends
from gateway.config.validate_fallbacks import check_fallbacks
from gateway.config.validate_keys import check_keys, check_rate_limits
from gateway.config.validate_listeners import (
    check_client_protocol,
    check_listener_endpoints,
    check_listeners,
)
from gateway.config.validate_observers import check_judges, check_recordings, check_shadows
from gateway.config.validate_routes import WILDCARD_MODEL, check_routes, matches_wildcard
from gateway.config.validate_services import check_services
from gateway.config.validation_context import ValidationContext, is_set
from protocols.core.units import format_duration, has_dot_segment

_FULL_PERCENTAGE = 100


def validate_config(config: Config, context: ValidationContext, *, insecure: bool) -> None:
    """Report all issues of what could be read."""
    check_listeners(config, context, insecure=insecure)
    check_listener_endpoints(config, context)
    check_backends(config, context)
    check_services(config, context)
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
        tasks = map_model_tasks(config.models, backends or {})
        check_fallbacks(config.models, targets, tasks, context)
        check_shadows(config, targets, tasks, context)
        check_judges(config, targets, tasks, context)
    if names is not None and is_set(config.listeners):
        _check_default_models(config.listeners, names, context)
    if is_set(config.keys):
        check_keys(config.keys, names, context)
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
    check_client_protocol(model, path, context)
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
