"""Whether a configuration makes sense: names that lead somewhere, and traffic that gets there."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.config import fallbacks, mounts, quotas, rules, shadows, validate_backends
from gateway.config.complaints import ConfigPath, join_names, quote, suggest_name
from gateway.config.dialects import describe_type_mismatch
from gateway.config.ground import ValidationContext, is_set
from gateway.config.pools import PoolConfig, WorkerSourceConfig
from gateway.config.shape import (
    ApiKeyConfig,
    Config,
    ModelConfig,
    TrafficSplitConfig,
    is_numeric_version,
)

_FULL_PERCENTAGE = 100
_SOURCES: Final = ("url", "dns", "srv", "file")
_DISCOVERY: Final = ("every", "scheme", "nameserver")
_DEFAULT_WORKER: Final = WorkerSourceConfig()


def validate_config(config: Config, ground: ValidationContext, *, insecure: bool) -> None:
    """Complain of whatever can be read and still can't be meant."""
    mounts.check_listeners(config, ground, insecure=insecure)
    validate_backends.check(config, ground)
    if is_set(config.backends):
        for name, backend in config.backends.items():
            if is_set(backend) and isinstance(backend, PoolConfig):
                _check_pool(backend, ("backends", name), ground)
    if is_set(config.models):
        _check_aliases(config.models, ground)
        backends = list(config.backends) if is_set(config.backends) else None
        for name, model in config.models.items():
            if is_set(model):
                _check_model(model, ("models", name), backends, ground)
        fallbacks.check_fallbacks(config.models, ground)
        shadows.check_shadows(config, ground)
    if is_set(config.keys):
        _check_keys(config, ground)
    quotas.check_rate_limits(config, ground)
    rules.check_routes(config, ground)


# --- pools ---------------------------------------------------------------------------------------


def _check_pool(pool: PoolConfig, path: ConfigPath, ground: ValidationContext) -> None:
    health = pool.health.path if is_set(pool.health) else None
    if is_set(health) and health is not None and not health.startswith("/"):
        message = "is no path; write it as /health, as it follows a worker's URL"
        ground.add_issue((*path, "health", "path"), message)
    if is_set(pool.workers):
        _check_workers(pool.workers, (*path, "workers"), ground)
        _check_pool_tls(pool, (*path, "tls"), ground)


def _check_workers(
    workers: Sequence[WorkerSourceConfig], path: ConfigPath, ground: ValidationContext
) -> None:
    seen: dict[str, int] = {}
    for n, worker in enumerate(workers):
        if not is_set(worker):
            continue
        at = (*path, n)
        where = [name for name in _SOURCES if getattr(worker, name) is not None]
        if len(where) != 1:
            ground.add_issue(
                at, f"a worker is told by one of {join_names(_SOURCES)}; give exactly one"
            )
        elif is_set(worker.url) and worker.url is not None:
            first = seen.setdefault(worker.url, n)
            if first != n:
                message = f"this is workers[{first}] again; give that one a greater weight"
                ground.add_issue((*at, "url"), message)
            for name in _DISCOVERY:
                if getattr(worker, name) != getattr(_DEFAULT_WORKER, name):
                    message = "has no meaning beside url, which nobody looks up; remove it"
                    ground.add_issue((*at, name), message, key=True)
        elif worker.dns is not None and worker.scheme == "https":
            ground.add_issue(
                (*at, "scheme"),
                "https needs a name to verify, and dns gives addresses; list the workers by url, "
                "or find them by srv",
            )


def check_listed_workers(workers: Sequence[WorkerSourceConfig], ground: ValidationContext) -> None:
    """Report on workers in a file of their own, where each must have a URL."""
    _check_workers(workers, (), ground)
    for n, worker in enumerate(workers):
        if is_set(worker) and worker.url is None:
            ground.add_issue((n,), "a file lists workers by url, and nothing else; give it one")


def _check_pool_tls(pool: PoolConfig, path: ConfigPath, ground: ValidationContext) -> None:
    plain = [
        is_set(one) and is_set(one.url) and is_set(one.scheme)
        and not (one.url or "https:").startswith("https:")
        and one.scheme == "http"
        for one in pool.workers
    ]  # fmt: skip
    if pool.tls is not None and plain and all(plain):
        message = "no worker is spoken to over TLS, so this has no effect"
        ground.add_issue(path, f"{message}; write https:// or remove it", key=True)


# --- models --------------------------------------------------------------------------------------


def _check_aliases(models: Mapping[str, ModelConfig], ground: ValidationContext) -> None:
    owners = {name: name for name in models}
    for name, model in models.items():
        if not is_set(model) or not is_set(model.aliases):
            continue
        for n, alias in enumerate(model.aliases):
            if not is_set(alias):
                continue
            at = ("models", name, "aliases", n)
            if alias in owners:
                what = "a model" if alias in models else f"an alias of {quote(owners[alias])}"
                ground.add_issue(
                    at, f"{quote(ground.get_raw_text(at))} is {what} already; choose another name"
                )
            owners.setdefault(alias, name)


def _check_model(
    model: ModelConfig, path: ConfigPath, backends: list[str] | None, ground: ValidationContext
) -> None:
    _check_client_protocol(model, path, ground)
    _check_model_options(model.options, path, ground)
    single, several = model.backend is not None, model.versions is not None
    if single and several:
        ground.add_issue(
            (*path, "versions"), "give either backend and model, or versions; not both", key=True
        )
    elif several:
        if model.model is not None:
            message = "each version has its own model; move this into the versions"
            ground.add_issue((*path, "model"), message, key=True)
    elif not single:
        ground.add_issue(
            path, "the model leads nowhere; give it a backend, or versions with backends"
        )
    if model.backend is not None:
        _check_backend(model.backend, (*path, "backend"), backends, ground)
    if is_set(model.versions) and model.versions is not None:
        for version, target in model.versions.items():
            if is_set(target):
                at = (*path, "versions", version, "backend")
                _check_backend(target.backend, at, backends, ground)
    _check_split(model, path, ground)


def _check_backend(
    name: str, path: ConfigPath, backends: list[str] | None, ground: ValidationContext
) -> None:
    if is_set(name) and backends is not None and name not in backends:
        shown = quote(ground.get_raw_text(path))
        ground.add_issue(path, f"there is no backend {shown}; {suggest_name(name, backends)}")


def _check_split(model: ModelConfig, path: ConfigPath, ground: ValidationContext) -> None:
    if not is_set(model.versions) or not is_set(model.split):
        return
    versions = list(model.versions or ())
    if model.split is None:
        if len(versions) > 1 and not any(map(is_numeric_version, versions)):
            weights = ", ".join(f'"{version}": 1' for version in versions)
            mend = f"give one a number, or add split: {{weights: {{{weights}}}}}"
            message = f"nothing says which version gets the traffic; {mend}"
            ground.add_issue((*path, "versions"), message, key=True)
        return
    if not versions:
        message = "there is nothing to split; it shares the traffic among versions"
        ground.add_issue((*path, "split"), message, key=True)
    elif is_set(model.split.weights):
        _check_weights(model.split, versions, (*path, "split", "weights"), ground)
    if is_set(model.split.sticky) and model.split.sticky is not None:
        _check_sticky(model.split.sticky, (*path, "split", "sticky"), ground)


def _check_sticky(sticky: Sequence[str], path: ConfigPath, ground: ValidationContext) -> None:
    for n, source in enumerate(sticky):
        if not is_set(source):
            continue
        if source in sticky[:n]:
            ground.add_issue((*path, n), "stands here already; remove one of the two")
        elif "address" in sticky[:n]:
            message = "is never asked for, since every request has an address; put it before that"
            ground.add_issue((*path, n), message)


def _check_weights(
    split: TrafficSplitConfig, versions: list[str], path: ConfigPath, ground: ValidationContext
) -> None:
    for version in split.weights:
        if version not in versions:
            message = f"there is no version {quote(version)}; {suggest_name(version, versions)}"
            ground.add_issue((*path, version), message, key=True)
    weights = list(split.weights.values())
    if not all(map(is_set, weights)):
        return
    percent = [ground.get_raw_text((*path, version)).endswith("%") for version in split.weights]
    if not any(weights):
        ground.add_issue(path, "every weight is 0, so no request gets anywhere; give one a weight")
    elif all(percent) and sum(weights) != _FULL_PERCENTAGE:
        ground.add_issue(path, f"the shares make {sum(weights)}%; they must make 100%")
    elif any(percent) and not all(percent):
        ground.add_issue(
            path, "some weights are percentages and some are not; write all in one way"
        )


def _check_model_options(
    options: Mapping[str, Any], path: ConfigPath, ground: ValidationContext
) -> None:
    """What only one dialect asks of a model."""
    for name, given in options.items():
        if not is_set(given) or not ground.check_protocol(name, None, (*path, name)):
            continue
        takes = ground.protocols.get_model_options(name)
        if takes is None:
            continue
        for key, value in given.items():
            at = (*path, name, key)
            if key not in takes:
                message = f"{name} asks no {quote(key)} of a model; {suggest_name(key, takes)}"
                ground.add_issue(at, message, key=True)
            elif is_set(value) and (wrong := describe_type_mismatch(value, takes[key])):
                ground.add_issue(at, wrong)


# --- keys ----------------------------------------------------------------------------------------


def _check_keys(config: Config, ground: ValidationContext) -> None:
    keys = [(n, key) for n, key in enumerate(config.keys) if is_set(key)]
    for field in ("name", "sha256"):
        seen: dict[str, int] = {}
        for n, key in keys:
            value = getattr(key, field)
            if is_set(value) and seen.setdefault(value, n) != n:
                message = f"keys[{seen[value]}] has the same {field}; each key has its own"
                ground.add_issue(("keys", n, field), message)
    if not is_set(config.models):
        return
    names = [*config.models]
    for model in config.models.values():
        if is_set(model) and is_set(model.aliases):
            names += [alias for alias in model.aliases if is_set(alias)]
    for n, key in keys:
        _check_key_models(key, ("keys", n, "models"), names, ground)
        _check_client_protocol(key, ("keys", n), ground)


def _check_client_protocol(
    holder: ApiKeyConfig | ModelConfig, path: ConfigPath, ground: ValidationContext
) -> None:
    if is_set(holder.dialect) and holder.dialect is not None:
        ground.check_client_protocol(holder.dialect, None, (*path, "dialect"))


def _check_key_models(
    key: ApiKeyConfig, path: ConfigPath, names: list[str], ground: ValidationContext
) -> None:
    if not is_set(key.models) or "*" in names:
        return
    for n, name in enumerate(key.models or ()):
        if is_set(name) and name not in names:
            shown = quote(ground.get_raw_text((*path, n)))
            ground.add_issue((*path, n), f"there is no model {shown}; {suggest_name(name, names)}")
