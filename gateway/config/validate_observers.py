"""Checks what observes requests: shadow traffic, judges and recordings."""

import re
import warnings
from collections.abc import Iterator, Mapping

from gateway.config.errors import ConfigPath, quote, suggest_name
from gateway.config.schema import Config, ModelConfig, RecordConfig
from gateway.config.validate_fallbacks import check_task, list_versions
from gateway.config.validation_context import ValidationContext, is_set
from protocols.core.catalog import ModelTask


def check_shadows(
    config: Config,
    names: Mapping[str, str],
    tasks: Mapping[str, ModelTask],
    context: ValidationContext,
) -> None:
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
            check_task(name, names[to], path, tasks, context)


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


def check_judges(
    config: Config,
    names: Mapping[str, str],
    tasks: Mapping[str, ModelTask],
    context: ValidationContext,
) -> None:
    """Report judges that do not exist, judge themselves, or whose verdicts are not stored."""
    models = config.models
    for name, model in models.items():
        if not is_set(model) or not is_set(model.judge) or model.judge is None:
            continue
        judge, path = model.judge.model, ("models", name, "judge")
        if is_set(config.observe) and config.observe.feedback is None:
            message = "verdicts are stored as feedback; add it: observe.feedback: {}"
            context.add_issue(path, message, key=True)
        if (task := tasks.get(name, "chat")) != "chat":
            message = f"answers of the task {task} have no text to judge; remove the key"
            context.add_issue(path, message, key=True)
        if not is_set(judge):
            continue
        if judge not in names:
            text = quote(context.get_raw_text((*path, "model")))
            message = f"there is no model {text}; {suggest_name(judge, names)}"
            context.add_issue((*path, "model"), message)
        elif names[judge] == name:
            context.add_issue((*path, "model"), "is this model itself; name another one")
        elif tasks.get(names[judge], "chat") != "chat":
            context.add_issue(
                (*path, "model"), "does not chat; a judge is a model of the task chat"
            )


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
