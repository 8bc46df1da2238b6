"""Checks API keys and rate limits."""

from collections.abc import Mapping, Sequence

from gateway.config.errors import ConfigPath, quote, suggest_name
from gateway.config.schema import ApiKeyConfig, Config, KeyRateLimitConfig
from gateway.config.validate_listeners import check_client_protocol
from gateway.config.validate_routes import matches_wildcard
from gateway.config.validation_context import ValidationContext, is_set


def check_keys(
    all_keys: Sequence[ApiKeyConfig], names: Mapping[str, str] | None, context: ValidationContext
) -> None:
    """Report keys that are not unique, and models and protocols that they can't have."""
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
        check_client_protocol(key, ("keys", n), context)


def _check_key_models(
    key: ApiKeyConfig, path: ConfigPath, names: Mapping[str, str], context: ValidationContext
) -> None:
    if not is_set(key.models):
        return
    for n, name in enumerate(key.models or ()):
        if is_set(name) and name not in names and not matches_wildcard(name, names):
            text = quote(context.get_raw_text((*path, n)))
            context.add_issue((*path, n), f"there is no model {text}; {suggest_name(name, names)}")


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
