"""Whether what clients may take makes sense: limits of models that there are, each once."""

from collections.abc import Mapping

from gateway.config.allowances import KeyLimits
from gateway.config.complaints import Steps, instead, quoted
from gateway.config.ground import Ground, known
from gateway.config.shape import Config, Model


def check(config: Config, ground: Ground) -> None:
    """Complain of limits that are never looked at."""
    if not known(config.models):
        return
    owners = _owners(config.models)
    if known(config.defaults):
        _check(config.defaults.limits, ("defaults", "limits"), owners, ground)
    for n, key in enumerate(config.keys if known(config.keys) else ()):
        if not known(key):
            continue
        path = ("keys", n, "limits")
        good = _check(key.limits, path, owners, ground)
        if known(key.models) and key.models is not None and all(map(known, key.models)):
            asks = {owners.get(name, name) for name in key.models}
            for name in good:
                if owners.get(name, name) not in asks:
                    message = "the key may not ask for this model; remove it, or add it to models"
                    ground.add_issue((*path, "models", name), message, key=True)


def _owners(models: Mapping[str, Model]) -> Mapping[str, str]:
    """The model that each name stands for."""
    found = {name: name for name in models}
    for name, model in models.items():
        if known(model) and known(model.aliases):
            found.update((alias, name) for alias in model.aliases if known(alias))
    return found


def _check(
    limits: KeyLimits | None, path: Steps, owners: Mapping[str, str], ground: Ground
) -> list[str]:
    """Complain of the models; gives those of which there is nothing to complain."""
    if not known(limits) or limits is None or not known(limits.models):
        return []
    good: dict[str, str] = {}
    for name in limits.models or ():
        at = (*path, "models", name)
        if name not in owners and "*" not in owners:
            message = f"there is no model {quoted(name)}; {instead(name, owners)}"
            ground.add_issue(at, message, key=True)
        elif (owner := owners.get(name, name)) in good:
            message = f"is {quoted(good[owner])} again, which has limits already; keep one"
            ground.add_issue(at, message, key=True)
        else:
            good[owner] = name
    return list(good.values())
