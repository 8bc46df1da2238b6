"""Whether the targets of shadows are there, do the same work, and are not the originals'."""

from gateway.config.complaints import ConfigPath, quote, suggest_name
from gateway.config.fallbacks import check_task, list_versions, map_model_names
from gateway.config.ground import ValidationContext, is_set
from gateway.config.shape import Config, ModelConfig


def check_shadows(config: Config, ground: ValidationContext) -> None:
    """Complain of shadows that are sent nowhere, or where their originals go."""
    models = config.models
    names = map_model_names(models)
    for name, model in models.items():
        if not is_set(model) or not is_set(model.shadow) or model.shadow is None:
            continue
        to, path = model.shadow.to, ("models", name, "shadow", "to")
        if not is_set(to):
            continue
        versions = list_versions(model)
        if to in versions:
            _check_shadow_version(to, model, config, path, ground)
        elif to not in names:
            shown = quote(ground.get_raw_text(path))
            ground.add_issue(
                path,
                f"{shown} is neither a version of this model nor another model; "
                f"{suggest_name(to, [*versions, *names])}",
            )
        elif names[to] == name:
            message = "is this model itself; name one of its versions, or another model"
            ground.add_issue(path, message)
        else:
            check_task(model, models[names[to]], path, ground)


def _check_shadow_version(
    to: str, model: ModelConfig, config: Config, path: ConfigPath, ground: ValidationContext
) -> None:
    """Complain of a version that takes all of the traffic, if no rule could send some elsewhere."""
    split = model.split
    if not is_set(split) or (len(model.resolve_targets()) > 1 and config.routes != ()):
        return
    if split is not None and not (
        is_set(split.weights) and all(map(is_set, split.weights.values()))
    ):
        return
    if {version for version, weight in model.resolve_weights().items() if weight} == {to}:
        message = "every request goes to this version already, and none of those is copied"
        ground.add_issue(path, f"{message}; name another, or share the traffic with a split")
