"""Whether what clients may take makes sense: limits of models that there are, each once."""

from collections.abc import Mapping

from gateway.config.allowances import KeyRateLimitConfig
from gateway.config.complaints import ConfigPath, quote, suggest_name
from gateway.config.ground import ValidationContext, is_set
from gateway.config.shape import Config, ModelConfig


def check_rate_limits(config: Config, ground: ValidationContext) -> None:
    """Complain of limits that are never looked at."""
    if not is_set(config.models):
        return
    owners = _map_limit_owners(config.models)
    if is_set(config.defaults):
        _check_model_limits(config.defaults.limits, ("defaults", "limits"), owners, ground)
    for n, key in enumerate(config.keys if is_set(config.keys) else ()):
        if not is_set(key):
            continue
        path = ("keys", n, "limits")
        good = _check_model_limits(key.limits, path, owners, ground)
        if is_set(key.models) and key.models is not None and all(map(is_set, key.models)):
            asks = {owners.get(name, name) for name in key.models}
            for name in good:
                if owners.get(name, name) not in asks:
                    message = "the key may not ask for this model; remove it, or add it to models"
                    ground.add_issue((*path, "models", name), message, key=True)


def _map_limit_owners(models: Mapping[str, ModelConfig]) -> Mapping[str, str]:
    """The model that each name stands for."""
    found = {name: name for name in models}
    for name, model in models.items():
        if is_set(model) and is_set(model.aliases):
            found.update((alias, name) for alias in model.aliases if is_set(alias))
    return found


def _check_model_limits(
    limits: KeyRateLimitConfig | None,
    path: ConfigPath,
    owners: Mapping[str, str],
    ground: ValidationContext,
) -> list[str]:
    """Complain of the models; gives those of which there is nothing to complain."""
    if not is_set(limits) or limits is None or not is_set(limits.models):
        return []
    good: dict[str, str] = {}
    for name in limits.models or ():
        at = (*path, "models", name)
        if name not in owners and "*" not in owners:
            message = f"there is no model {quote(name)}; {suggest_name(name, owners)}"
            ground.add_issue(at, message, key=True)
        elif (owner := owners.get(name, name)) in good:
            message = f"is {quote(good[owner])} again, which has limits already; keep one"
            ground.add_issue(at, message, key=True)
        else:
            good[owner] = name
    return list(good.values())
