"""Whether the targets of shadows are there, do the same work, and are not the originals'."""

from gateway.config.complaints import Steps, instead, quoted
from gateway.config.fallbacks import check_task, names_of, versions_of
from gateway.config.ground import Ground, known
from gateway.config.shape import Config, Model


def check(config: Config, ground: Ground) -> None:
    """Complain of shadows that are sent nowhere, or where their originals go."""
    models = config.models
    names = names_of(models)
    for name, model in models.items():
        if not known(model) or not known(model.shadow) or model.shadow is None:
            continue
        to, path = model.shadow.to, ("models", name, "shadow", "to")
        if not known(to):
            continue
        versions = versions_of(model)
        if to in versions:
            _check_version(to, model, config, path, ground)
        elif to not in names:
            shown = quoted(ground.get_raw_text(path))
            ground.add_issue(
                path,
                f"{shown} is neither a version of this model nor another model; "
                f"{instead(to, [*versions, *names])}",
            )
        elif names[to] == name:
            message = "is this model itself; name one of its versions, or another model"
            ground.add_issue(path, message)
        else:
            check_task(model, models[names[to]], path, ground)


def _check_version(to: str, model: Model, config: Config, path: Steps, ground: Ground) -> None:
    """Complain of a version that takes all of the traffic, if no rule could send some elsewhere."""
    split = model.split
    if not known(split) or (len(model.resolve_targets()) > 1 and config.routes != ()):
        return
    if split is not None and not (known(split.weights) and all(map(known, split.weights.values()))):
        return
    if {version for version, weight in model.resolve_weights().items() if weight} == {to}:
        message = "every request goes to this version already, and none of those is copied"
        ground.add_issue(path, f"{message}; name another, or share the traffic with a split")
