"""Checks backends by what their protocols and models can do: tasks, paths and parameters.

``gateway.config.registry`` answers the questions about protocols.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, get_args
from urllib.parse import urlsplit

import msgspec.inspect

from backends.http.interfaces import parse_version_segment
from backends.pool.settings import PoolSettings
from backends.torch.settings import TorchSettings
from gateway.config.decoder import ConfigDecoder
from gateway.config.errors import (
    ConfigError,
    ConfigPath,
    IssueCollector,
    join_names,
    quote,
    suggest_name,
)
from gateway.config.registry import (
    describe_type_mismatch,
)
from gateway.config.schema import (
    Config,
    ModelConfig,
)
from gateway.config.validate_files import (
    check_ca,
    check_model_files,
    check_template,
)
from gateway.config.validation_context import ValidationContext, is_set
from gateway.config.yaml_reader import compose_yaml, decode_utf8
from protocols.core.catalog import ModelTask
from protocols.core.restricted import PARAMETERS
from protocols.core.units import ConfigSection, NonEmptyStr


def check_backends(config: Config, context: ValidationContext) -> None:
    """Report backends that can't be used on this machine, or by the protocols they name."""
    if is_set(config.backends):
        pools = {}
        for name, backend in config.backends.items():
            path = ("backends", name)
            if is_set(backend) and isinstance(backend, PoolSettings):
                if _check_pool(backend, path, context):
                    pools[name] = backend
            elif is_set(backend) and isinstance(backend, TorchSettings):
                check_template(backend.chat_template, (*path, "chat_template"), context)
                check_model_files(backend, path, context)
        if is_set(config.models):
            _check_tasks(config.models, pools, context)


def _check_pool(pool: PoolSettings, path: ConfigPath, context: ValidationContext) -> bool:
    """Report what is wrong with a pool; returns whether its protocol and its profile are known."""
    is_known = is_set(pool.protocol) and _check_pool_protocol(pool, path, context)
    _check_unsupported_parameters(pool, path, context)
    if is_set(pool.tls) and pool.tls is not None:
        check_ca(pool.tls, (*path, "tls"), context)
    return is_known


def _check_pool_protocol(pool: PoolSettings, path: ConfigPath, context: ValidationContext) -> bool:
    """The same for what depends on the protocol."""
    name, profile_at = pool.protocol, (*path, "profile")
    if not context.check_worker_protocol(name, pool.profile, (*path, "protocol"), profile_at):
        return False
    option_types = context.protocols.get_options(name)
    for key, value in pool.options.items() if is_set(pool.options) else ():
        at = (*path, "options", key)
        if key not in option_types:
            context.add_issue(
                at, f"there is no {quote(key)} here; {suggest_name(key, option_types)}", key=True
            )
        elif is_set(value) and (mismatch := describe_type_mismatch(value, option_types[key])):
            context.add_issue(at, mismatch)
    for key, parameter in (("chat_template", "renderer"), ("fields", "fields")):
        if getattr(pool, key) is not None and not context.protocols.accepts_param(name, parameter):
            context.add_issue((*path, key), f"{name} does not use it; remove it", key=True)
        elif key == "chat_template":
            check_template(pool.chat_template, (*path, key), context)
    if is_set(pool.workers):
        _check_worker_paths(pool, (*path, "workers"), context)
    return True


def _check_tasks(
    models: Mapping[str, ModelConfig], pools: Mapping[str, PoolSettings], context: ValidationContext
) -> None:
    """Report models whose workers' protocol has no requests of their task."""
    for name, model in models.items():
        if not is_set(model) or not is_set(model.task) or model.task in (None, "chat"):
            continue
        for backend in _list_backends(model):
            if (pool := pools.get(backend)) is None:
                continue
            kinds = context.protocols.get_request_kinds(pool.protocol, pool.profile)
            if model.task in kinds:
                continue
            setting = pool.protocol + ("" if pool.profile is None else f" ({pool.profile})")
            tasks = join_names(task for task in get_args(ModelTask) if task in kinds)
            message = f"workers of {quote(backend)} have no {model.task} requests in {setting}"
            context.add_issue(
                ("models", name, "task"), f"{message}; name another backend, or a task of: {tasks}"
            )


def _list_backends(model: ModelConfig) -> list[str]:
    """The names of the backends of a model's targets, as far as they could be read."""
    targets = model.versions.values() if is_set(model.versions) and model.versions else (model,)
    names = [target.backend for target in targets if is_set(target) and is_set(target.backend)]
    return [name for name in dict.fromkeys(names) if name is not None]


def _check_worker_paths(pool: PoolSettings, path: ConfigPath, context: ValidationContext) -> None:
    """Report worker URLs that include the protocol's own path, other than the version ``/v1``."""
    roots = context.protocols.get_path_prefixes(pool.protocol, pool.profile)
    if {root for root in roots if parse_version_segment(root)} == {"/v1"}:
        roots = tuple(root for root in roots if root != "/v1")  # requests have it only once
    for n, worker in enumerate(pool.workers):
        if not is_set(worker) or not is_set(worker.url) or worker.url is None:
            continue
        end = urlsplit(worker.url).path
        root = next((root for root in roots if root.strip("/") and end.endswith(root)), None)
        if root is not None:
            message = f"the protocol {pool.protocol} adds {root} itself; write the URL without it"
            context.add_issue((*path, n, "url"), message)


class _CapabilitiesFile(ConfigSection, frozen=True):
    """A capabilities file: the former place of ``unsupported_parameters``."""

    fields: tuple[NonEmptyStr, ...]


_CAPABILITIES_FILE: Final = msgspec.inspect.type_info(_CapabilitiesFile)


def _check_unsupported_parameters(
    pool: PoolSettings, path: ConfigPath, context: ValidationContext
) -> None:
    former_at = (*path, "capabilities")
    if context.is_present(former_at):
        names = _read_former_parameters(context.file(former_at))
        hint = f"write unsupported_parameters: [{join_names(names or ('NAME', '…'))}]"
        message = (
            f"there is no 'capabilities' here any more; {hint if names != () else 'remove it'}"
        )
        context.add_issue(former_at, message, key=True)
    if not is_set(pool.unsupported_parameters):
        return
    for n, name in enumerate(pool.unsupported_parameters):
        if is_set(name) and name not in PARAMETERS:
            at = (*path, "unsupported_parameters", n)
            text = quote(context.get_raw_text(at))
            context.add_issue(
                at, f"{text} is not a parameter of a request; {_suggest_parameter(name)}"
            )


def _suggest_parameter(name: str) -> str:
    """A suggestion for an unknown parameter, whose section may be missing."""
    same_name = [one for one in sorted(PARAMETERS) if one.rpartition(".")[2] == name]
    return suggest_name(same_name[0] if same_name else name, sorted(PARAMETERS))


def _read_former_parameters(file: str | None) -> Sequence[str] | None:
    """The parameters that a capabilities file lists; None without such a file."""
    if file is None:
        return None
    issues = IssueCollector(file)
    try:
        root = compose_yaml(decode_utf8(Path(file).read_bytes(), file), issues)
    except (OSError, ConfigError):
        return None
    content = ConfigDecoder(issues, {}).decode_document(root, _CAPABILITIES_FILE)
    if not is_set(content) or not is_set(content.fields):
        return None
    return tuple(name for name in content.fields if is_set(name) and name in PARAMETERS)
