"""Checks fallbacks: their targets exist, serve the same task, and form no circle."""

from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from gateway.config.errors import ConfigPath, quote, suggest_name
from gateway.config.schema import ModelConfig
from gateway.config.validation_context import ValidationContext, is_set
from protocols.core.catalog import ModelTask


def check_fallbacks(
    models: Mapping[str, ModelConfig],
    names: Mapping[str, str],
    tasks: Mapping[str, ModelTask],
    context: ValidationContext,
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
                check_task(name, names[fallback], path, tasks, context)


def check_task(
    name: str,
    other: str,
    path: ConfigPath,
    tasks: Mapping[str, ModelTask],
    context: ValidationContext,
) -> None:
    """Report the model ``other``, named at ``path``, if its task is not that of ``name``."""
    if name not in tasks or other not in tasks:
        return
    if tasks[name] != tasks[other]:
        text = quote(context.get_raw_text(path))
        message = f"{text} has the task {tasks[other]}, and this model has {tasks[name]}"
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
