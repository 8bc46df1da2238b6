"""Whether those who answer in a model's stead are there, do its work, and go in no circle."""

from collections.abc import Mapping

from gateway.config.complaints import Steps, instead, quoted
from gateway.config.ground import Ground, known
from gateway.config.shape import Model


def check(models: Mapping[str, Model], ground: Ground) -> None:
    """Complain of fallbacks that lead nowhere, or back."""
    names = names_of(models)
    for name, model in models.items():
        if not known(model) or not known(model.fallback) or not model.fallback:
            continue
        versions = versions_of(model)
        for n, after in enumerate(model.fallback):
            path = ("models", name, "fallback", n)
            if not known(after) or after in versions:
                continue
            if after not in names:
                shown = quoted(ground.get_raw_text(path))
                ground.add_issue(
                    path,
                    f"{shown} is neither a version of this model nor another model; "
                    f"{instead(after, [*versions, *names])}",
                )
            elif circle := _circle(names[after], name, models, names):
                way = " to ".join([name, *circle])
                ground.add_issue(
                    path, f"the fallbacks lead in a circle: {way}; leave one of them out"
                )
            else:
                check_task(model, models[names[after]], path, ground)


def check_task(model: Model, other: Model, path: Steps, ground: Ground) -> None:
    """Complain of an ``other``, named at ``path``, that has another task than a model."""
    if not known(other) or not known(model.task) or not known(other.task):
        return
    if model.task != other.task:
        shown = quoted(ground.get_raw_text(path))
        message = f"{shown} has the task {other.task}, and this model has {model.task}"
        ground.add_issue(
            path, f"{message}; name a model of the same task, or correct one of the two"
        )


def _has_targets(model: Model) -> bool:
    return known(model.versions) and known(model.backend) and bool(model.versions or model.backend)


def names_of(models: Mapping[str, Model]) -> dict[str, str]:
    """Every name by which a model may be asked for, and the model's own."""
    names = {name: name for name in models if name != "*"}
    for name, model in models.items():
        if known(model) and known(model.aliases):
            names |= {alias: name for alias in model.aliases if known(alias)}
    return names


def _circle(
    start: str, goal: str, models: Mapping[str, Model], names: Mapping[str, str]
) -> list[str] | None:
    """The way from ``start`` back to ``goal``, by fallbacks; None where there is none."""
    ways, seen = [[start]], {start}
    while ways:
        way = ways.pop()
        if way[-1] == goal:
            return way
        model = models[way[-1]]
        fallback = model.fallback if known(model) else None
        for after in fallback if known(fallback) and fallback else ():
            found = names.get(after) if known(after) and after not in versions_of(model) else None
            if found is not None and found not in seen:
                seen.add(found)
                ways.append([*way, found])
    return None


def versions_of(model: Model) -> list[str]:
    """The names of a model's versions, where they could be read."""
    return list(model.resolve_targets()) if _has_targets(model) else []
