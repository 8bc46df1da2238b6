"""Whether those who answer in a model's stead are there, do its work, and go in no circle."""

from collections.abc import Mapping

from gateway.config.complaints import ConfigPath, quote, suggest_name
from gateway.config.ground import ValidationContext, is_set
from gateway.config.shape import ModelConfig


def check_fallbacks(models: Mapping[str, ModelConfig], ground: ValidationContext) -> None:
    """Complain of fallbacks that lead nowhere, or back."""
    names = map_model_names(models)
    for name, model in models.items():
        if not is_set(model) or not is_set(model.fallback) or not model.fallback:
            continue
        versions = list_versions(model)
        for n, after in enumerate(model.fallback):
            path = ("models", name, "fallback", n)
            if not is_set(after) or after in versions:
                continue
            if after not in names:
                shown = quote(ground.get_raw_text(path))
                ground.add_issue(
                    path,
                    f"{shown} is neither a version of this model nor another model; "
                    f"{suggest_name(after, [*versions, *names])}",
                )
            elif circle := _find_cycle(names[after], name, models, names):
                way = " to ".join([name, *circle])
                ground.add_issue(
                    path, f"the fallbacks lead in a circle: {way}; leave one of them out"
                )
            else:
                check_task(model, models[names[after]], path, ground)


def check_task(
    model: ModelConfig, other: ModelConfig, path: ConfigPath, ground: ValidationContext
) -> None:
    """Complain of an ``other``, named at ``path``, that has another task than a model."""
    if not is_set(other) or not is_set(model.task) or not is_set(other.task):
        return
    if model.task != other.task:
        shown = quote(ground.get_raw_text(path))
        message = f"{shown} has the task {other.task}, and this model has {model.task}"
        ground.add_issue(
            path, f"{message}; name a model of the same task, or correct one of the two"
        )


def _has_targets(model: ModelConfig) -> bool:
    return (
        is_set(model.versions) and is_set(model.backend) and bool(model.versions or model.backend)
    )


def map_model_names(models: Mapping[str, ModelConfig]) -> dict[str, str]:
    """Every name by which a model may be asked for, and the model's own."""
    names = {name: name for name in models if name != "*"}
    for name, model in models.items():
        if is_set(model) and is_set(model.aliases):
            names |= {alias: name for alias in model.aliases if is_set(alias)}
    return names


def _find_cycle(
    start: str, goal: str, models: Mapping[str, ModelConfig], names: Mapping[str, str]
) -> list[str] | None:
    """The way from ``start`` back to ``goal``, by fallbacks; None where there is none."""
    ways, seen = [[start]], {start}
    while ways:
        way = ways.pop()
        if way[-1] == goal:
            return way
        model = models[way[-1]]
        fallback = model.fallback if is_set(model) else None
        for after in fallback if is_set(fallback) and fallback else ():
            found = (
                names.get(after) if is_set(after) and after not in list_versions(model) else None
            )
            if found is not None and found not in seen:
                seen.add(found)
                ways.append([*way, found])
    return None


def list_versions(model: ModelConfig) -> list[str]:
    """The names of a model's versions, where they could be read."""
    return list(model.resolve_targets()) if _has_targets(model) else []
