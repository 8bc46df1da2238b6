"""A ``config.yaml`` of the LiteLLM proxy, rewritten as a configuration of this gateway.

What it may hold: docs.litellm.ai/docs/proxy/config_settings. Entries of its ``model_list`` are
called deployments, and those of one name a model group, as LiteLLM does.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from gateway.config.errors import ConfigError, IssueCollector, format_path
from gateway.config.yaml_reader import compose_yaml, decode_utf8
from gateway.tools.migrate.deployments import (
    WEIGHT_KEYS,
    Deployment,
    DeploymentReader,
    PoolKey,
    SourceWorker,
)
from gateway.tools.migrate.providers import (
    CLIENT_PROTOCOLS,
    MOCK_BACKEND,
)
from gateway.tools.migrate.yaml_file import (
    ENV_REFERENCE,
    CommentedValue,
    Env,
    EnvText,
    Note,
    NoteCollector,
    NoteKind,
    SourceMapping,
    SourceValue,
    UnsupportedEntry,
    format_document,
    list_values,
    read_duration,
    read_integer,
    read_model_name,
)
from protocols.core import units

# --- model groups ---------------------------------------------------------------------------------

_MAX_WEIGHT: Final = 1000


class ModelGroup(Struct):
    """A model's name and its deployments, in the order of the file."""

    name: str
    deployments: list[Deployment]


class PoolDefaults(Struct, frozen=True):
    """Settings of every pool, from the settings of the whole file."""

    policy: str
    breaker: Mapping[str, Any]
    max_concurrency: int | None
    keeps_rates: bool = False
    """Whether rate limits of deployments limit their model."""
    joins_groups: bool = False
    """Whether a request may go to any deployment of its group, by load and not by weights."""


class ConfigParts(Struct):
    """The sections of the new configuration."""

    backends: dict[str, Any] = {}
    models: dict[str, Any] = {}
    names: dict[str, str] = {}
    """Each model's name, by all of its names."""
    tasks: dict[str, str] = {}
    """The task of each model."""
    limits: dict[str, Any] = {}
    """The rate limits of each model that has some."""


class _Version(Struct):
    """Workers of one pool, and their share of the model's requests."""

    pool_key: PoolKey
    workers: list[SourceWorker]
    share: float
    comments: list[str]


def add_model(
    group: ModelGroup, pool_defaults: PoolDefaults, parts: ConfigParts, notes: NoteCollector
) -> None:
    """Add the group to the configuration as a model."""
    _drop_other_tasks(group, notes)
    deployments: Sequence[Deployment] = group.deployments
    if pool_defaults.joins_groups:
        deployments = _join_by_load(deployments, notes)
    weight_key = _weight_key(deployments)
    versions = _versions(_ranked(deployments, weight_key), weight_key)
    if pool_defaults.joins_groups and len(versions) > 1:
        reason = "its entries have different models or protocols: the load decides within each only"
        notes.add(deployments[0].source, "changed", reason)
    targets: dict[str, Any] = {}
    for number, version in enumerate(versions, 1):
        name = _free_name(group.name, parts.backends)
        parts.backends[name] = _backend_section(version, weight_key, pool_defaults)
        target = {"backend": name}
        if version.pool_key.model is not None and version.pool_key.script is None:
            target["model"] = version.pool_key.model
        targets[str(number)] = target
    model: dict[str, Any] = targets["1"] if len(versions) == 1 else {"versions": targets}
    if len(versions) > 1:
        model["split"] = {"weights": _weights(versions)}
        model["fallback"] = sorted(targets, key=lambda n: versions[int(n) - 1].pool_key.order)
    task = parts.tasks[group.name] = group.deployments[0].task
    if task != "chat":
        model["task"] = task
    if defaults := _shared_defaults(group, notes):
        model["defaults"] = defaults
    parts.models[group.name] = model
    parts.names[group.name] = group.name
    limits = _rate_limits(group) if pool_defaults.keeps_rates else {}
    if limits:
        parts.limits[group.name] = {name: f"{total}/min" for name, total in limits.items()}
    _note_numbers(group, weight_key, limits, pool_defaults, notes)


def _drop_other_tasks(group: ModelGroup, notes: NoteCollector) -> None:
    """Leave out the deployments with another task than the first: a model has one."""
    task = group.deployments[0].task
    for deployment in [one for one in group.deployments if one.task != task]:
        reason = f"its task is {deployment.task}, and that of its name {task}; the whole entry"
        notes.add(deployment.source, "left out", reason)
        group.deployments.remove(deployment)


_RATE_NAMES: Final = {"rpm": "requests", "tpm": "tokens"}


def _rate_limits(group: ModelGroup) -> Mapping[str, int]:
    """The limits of the model per minute: the sum of those of its deployments, if all have one."""
    limits = {}
    for key, name in _RATE_NAMES.items():
        rates = [one.numbers[key].value for one in group.deployments if key in one.numbers]
        if len(rates) == len(group.deployments) and (total := int(sum(rates))):
            limits[name] = total
    return {} if group.name.endswith("*") else limits


def _note_numbers(
    group: ModelGroup,
    weight_key: str | None,
    limits: Mapping[str, int],
    pool_defaults: PoolDefaults,
    notes: NoteCollector,
) -> None:
    """Note what became of the weight and of the rate limits of each deployment."""
    is_alone = len(group.deployments) == 1
    for deployment in group.deployments:
        for key, number in deployment.numbers.items():
            if key in _RATE_NAMES:
                is_weight = key == weight_key and not is_alone
                kind, reason = _describe_rate(
                    group, key, limits, pool_defaults, is_weight=is_weight
                )
                notes.add(number.source, kind, reason)
            elif key == "order":
                if is_alone:
                    notes.add(number.source, "needless", "the only entry of this name")
            elif pool_defaults.joins_groups:
                reason = "the strategy goes by load, not by weights"
                notes.add(number.source, "needless", reason)
            elif is_alone:
                notes.add(number.source, "needless", "the only entry of this name")
            elif weight_key != key:
                reason = "the first entry of this name has no weight, so LiteLLM does not use it"
                notes.add(number.source, "left out", reason)
        if weight_key is not None and not is_alone and not deployment.worker.shares.get(weight_key):
            number_or_none = deployment.numbers.get(weight_key)
            source = deployment.source if number_or_none is None else number_or_none.source
            notes.add(source, "changed", _describe_no_share(group, weight_key))


def _describe_rate(
    group: ModelGroup,
    key: str,
    limits: Mapping[str, int],
    pool_defaults: PoolDefaults,
    *,
    is_weight: bool,
) -> tuple[NoteKind, str]:
    """What became of a rate limit of a deployment."""
    if _RATE_NAMES[key] in limits:
        weight = "; it is also the weight" if is_weight else ""
        return "changed", f"the limit of the model: the sum of those of its entries{weight}"
    if not pool_defaults.keeps_rates:
        if is_weight:
            return "changed", "used as a weight, not as a limit"
        return (
            "left out",
            "LiteLLM does not limit by it with these settings; see `limits` of `defaults`",
        )
    if group.name.endswith("*"):
        why = "a wildcard model has no rate limits of its own"
    elif all(key in deployment.numbers for deployment in group.deployments):
        why = "0 is no limit"
    else:
        why = "not every entry of this name has one"
    if is_weight:
        return "changed", f"used as a weight, not as a limit: {why}"
    return "left out", f"no limit by {key}: {why}"


def _describe_no_share(group: ModelGroup, weight_key: str) -> str:
    if any(one.worker.shares.get(weight_key) for one in group.deployments):
        return f"without a {weight_key} above 0, it gets requests only if other entries fail"
    return f"no entry of this name has a {weight_key} above 0, so all get the same share"


def _join_by_load(deployments: Sequence[Deployment], notes: NoteCollector) -> Sequence[Deployment]:
    """Let the deployments of one model share a pool: without weights, with the longest timeouts."""
    joined = []
    for deployment in deployments:
        key = deployment.pool_key
        others = [
            other.pool_key
            for other in deployments
            if replace(other.pool_key, total=None, first_token=None, retries=None)
            == replace(key, total=None, first_token=None, retries=None)
        ]
        common = replace(
            key,
            total=_longest(other.total for other in others),
            first_token=_longest(other.first_token for other in others),
            retries=max((one.retries for one in others if one.retries is not None), default=None),
        )
        if common != key:
            reason = "the workers of one pool have the same timeouts and retries: the largest"
            notes.add(deployment.source, "changed", reason)
        worker = replace(deployment.worker, shares={})
        joined.append(replace(deployment, pool_key=common, worker=worker))
    return joined


def _longest(durations: Iterable[str | None]) -> str | None:
    """The longest of some durations in seconds."""
    known = [duration for duration in durations if duration is not None]
    return max(known, key=lambda duration: float(duration.removesuffix("s")), default=None)


def _shared_defaults(group: ModelGroup, notes: NoteCollector) -> Mapping[str, float]:
    """The defaults that all deployments have in common; a model has no others."""
    first, *others = (deployment.defaults for deployment in group.deployments)
    common = {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }
    for deployment in group.deployments:
        for key in deployment.defaults.keys() - common.keys():
            reason = f"its {key} differs from that of other entries of this name; use two names"
            notes.add(deployment.source, "left out", reason)
    return common


# --- who takes how much ---------------------------------------------------------------------------


def _weight_key(deployments: Sequence[Deployment]) -> str | None:
    """The key by which LiteLLM weights these deployments."""
    return next((key for key in WEIGHT_KEYS if key in deployments[0].worker.shares), None)


def _share(worker: SourceWorker, weight_key: str | None) -> float:
    return worker.occurrences if weight_key is None else worker.shares.get(weight_key, 0.0)


def _ranked(deployments: Sequence[Deployment], weight_key: str | None) -> Sequence[Deployment]:
    """Rank deployments without a share behind those with one."""
    if not any(_share(deployment.worker, weight_key) for deployment in deployments):
        return deployments
    last = 1 + max(deployment.pool_key.order for deployment in deployments)

    def rank(deployment: Deployment) -> Deployment:
        if _share(deployment.worker, weight_key):
            return deployment
        return replace(deployment, pool_key=replace(deployment.pool_key, order=last))

    return [rank(deployment) for deployment in deployments]


def _weights(versions: Sequence[_Version]) -> Mapping[str, int]:
    """The weights of the first rank; the other versions are fallbacks only."""
    lowest = min(version.pool_key.order for version in versions)
    shares = [version.share if version.pool_key.order == lowest else 0 for version in versions]
    return {str(n): share for n, share in enumerate(_scaled(shares, 1_000_000), 1)}


def _versions(deployments: Sequence[Deployment], weight_key: str | None) -> list[_Version]:
    """Join deployments with equal settings, unless one address has two keys."""
    versions: list[_Version] = []
    for deployment in deployments:
        endpoint, share = deployment.worker, _share(deployment.worker, weight_key)
        match = next((version for version in versions if _joins(version, deployment)), None)
        if match is None:
            versions.append(
                _Version(deployment.pool_key, [endpoint], share, [*deployment.comments])
            )
            continue
        match.share += share
        match.comments += [text for text in deployment.comments if text not in match.comments]
        _join(match.workers, endpoint)
    return versions


def _joins(version: _Version, deployment: Deployment) -> bool:
    endpoint = deployment.worker
    others = [
        (worker.key, worker.headers) for worker in version.workers if worker.url == endpoint.url
    ]
    is_equal = version.pool_key == deployment.pool_key
    return is_equal and others in ([], [(endpoint.key, endpoint.headers)])


def _join(workers: list[SourceWorker], new: SourceWorker) -> None:
    """Add a worker; if its address is present, add up the weights and the limits."""
    for n, old in enumerate(workers):
        if old.url == new.url:
            all_shares = {**old.shares, **new.shares}
            shares = {key: _share(old, key) + _share(new, key) for key in all_shares}
            limits = [one for one in (old.max_concurrency, new.max_concurrency) if one is not None]
            workers[n] = replace(
                old,
                shares=shares,
                occurrences=old.occurrences + new.occurrences,
                max_concurrency=sum(limits) or None,
            )
            return
    workers.append(new)


def _scaled(shares: Sequence[float], limit: int) -> list[int]:
    """The smallest integers in the same proportion, not all of them 0."""
    if not any(shares):
        return [1] * len(shares)
    thousandths = [round(share * 1000) for share in shares]
    divisor = math.gcd(*thousandths)
    scaled = [share // divisor for share in thousandths]
    if max(scaled) > limit:
        return [max(round(share * limit / max(scaled)), min(share, 1)) for share in scaled]
    return scaled


# --- what is written ------------------------------------------------------------------------------


def _backend_section(version: _Version, weight_key: str | None, pool_defaults: PoolDefaults) -> Any:
    pool_key = version.pool_key
    if pool_key.script is not None:
        return {"kind": MOCK_BACKEND, "script": [pool_key.script]}
    pool: dict[str, Any] = {"protocol": pool_key.protocol}
    if pool_key.profile is not None:
        pool["profile"] = pool_key.profile
    if pool_key.api_version is not None:
        pool["options"] = {"api_version": pool_key.api_version}
    weights = _scaled([_share(worker, weight_key) for worker in version.workers], _MAX_WEIGHT)
    pool["workers"] = [
        _worker_section(worker, weight, pool_defaults)
        for worker, weight in zip(version.workers, weights, strict=True)
    ]
    if len(version.workers) > 1:
        pool["policy"] = pool_defaults.policy
    if timeouts := {
        key: value
        for key, value in (("first_token", pool_key.first_token), ("total", pool_key.total))
        if value is not None
    }:
        pool["timeouts"] = timeouts
    if pool_key.retries is not None:
        pool["retries"] = {"max": pool_key.retries}
    if pool_defaults.breaker:
        pool["breaker"] = pool_defaults.breaker
    return CommentedValue(pool, version.comments)


def _worker_section(worker: SourceWorker, weight: int, pool_defaults: PoolDefaults) -> Any:
    section: dict[str, Any] = {"url": worker.url}
    if weight != 1:
        section["weight"] = weight
    if (max_concurrency := worker.max_concurrency or pool_defaults.max_concurrency) is not None:
        section["max_concurrency"] = max_concurrency
    if worker.key is not None:
        section["auth"] = (
            {"bearer": worker.key}
            if worker.key_header is None
            else {"header": {"name": worker.key_header, "value": worker.key}}
        )
    if worker.headers:
        section["headers"] = worker.headers
    return worker.url if len(section) == 1 else section


def _free_name(name: str, used: Mapping[str, Any]) -> str:
    """A free name for a backend, like that of the model."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:90] or "any"
    number = 1
    while (candidate := base if number == 1 else f"{base}-{number}") in used:
        number += 1
    return candidate


# --- settings -------------------------------------------------------------------------------------

_POLICIES: Final = {
    "simple-shuffle": "round_robin",
    "least-busy": "least_load",
    "latency-based-routing": "two_choices",
    "usage-based-routing": "least_load",
    "usage-based-routing-v2": "least_load",
    "cost-based-routing": "least_load",
}
_DEFAULT_STRATEGY: Final = "simple-shuffle"
_USAGE_BASED: Final = "usage-based-routing"
_RATE_CHECK: Final = "enforce_model_rate_limits"
_EQUAL_STRATEGIES: Final = frozenset({_DEFAULT_STRATEGY, "least-busy"})
_PORT: Final = 4000
"""That of LiteLLM's proxy."""
_ADMIN_PORT: Final = 8081
_LOCAL_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_MASTER_KEY_VARIABLE: Final = "LITELLM_MASTER_KEY_SHA256"

_SETTING_REASONS: Final = {
    "cache": "responses are not cached",
    "max_budget": "prices are not supported",
    "budget_duration": "prices are not supported",
    "cache_params": "responses are not cached",
    "cache_responses": "responses are not cached",
    "context_window_fallbacks": "a fallback with a larger `limits.context` takes these requests",
    "content_policy_fallbacks": "a worker's refusal is returned to the client",
    "retry_policy": "see `retries.on` and `retries.max`",
    "allowed_fails_policy": "see `breaker`",
    "success_callback": "not supported as a callback; see `observe`",
    "failure_callback": "not supported as a callback; see `observe`",
    "callbacks": "not supported as a callback; see `observe`",
    "alerting": "alert by the metrics of the admin listener",
    "database_url": "no database is supported; write its keys and models into the file",
    "store_model_in_db": "models of the database are not in this file",
    "redis_host": "set `state: {redis: …}` to share limits between gateways",
    "redis_port": "set `state: {redis: …}` to share limits between gateways",
    "redis_password": "set `state: {redis: …}` to share limits between gateways",
    "redis_url": "set `state: {redis: …}` to share limits between gateways",
    "enable_tag_filtering": "write a rule under `routes` for these requests",
    "custom_auth": "set `identity` to accept tokens, or use keys",
    "enable_jwt_auth": "set `identity` to accept tokens",
    "litellm_jwtauth": "set `identity` to accept tokens",
}
_NEEDLESS_SETTINGS: Final = {
    "set_verbose": "see `--log-level`",
    "debug_level": "see `--log-level`",
    "json_logs": "each request is logged as a line of JSON",
    "background_health_checks": "workers are probed every 5 seconds",
    "health_check_interval": "workers are probed every 5 seconds",
    "turn_off_message_logging": "no prompt or response is ever logged",
    "redact_user_api_key_info": "no key is ever logged",
    "disable_spend_logs": "usage is recorded only with `observe.usage`",
    "store_prompts_in_spend_logs": "no prompt or response is ever stored",
    "ignore_invalid_deployments": "a file with an error is refused before it is served",
}
_UNKNOWN: Final = "no such setting"


class SettingsReader:
    """Reads the settings of the whole file. ``router`` wins over ``module``, as in LiteLLM."""

    def __init__(
        self,
        router: SourceMapping,
        module: SourceMapping,
        server: SourceMapping,
        notes: NoteCollector,
    ) -> None:
        self._router = router
        self._module = module
        self._server = server
        self._notes = notes

    def _take(self, *keys: str) -> SourceValue | None:
        setting = self._router.pop(*keys)
        overridden = self._module.pop(*keys)
        if setting is not None and overridden is not None:
            self._notes.add(overridden, "needless", f"{format_path(setting.path)} wins over it")
        return setting or overridden

    def strategy(self) -> str:
        """LiteLLM's name of the routing strategy."""
        setting = self._take("routing_strategy")
        if setting is None or setting.text in _EQUAL_STRATEGIES:
            return _DEFAULT_STRATEGY if setting is None else setting.text
        if (policy := _POLICIES.get(setting.text)) is None:
            self._notes.add(setting, "left out", "workers are used in turn; see `policy`")
            return _DEFAULT_STRATEGY
        self._notes.add(setting, "changed", f"the nearest policy is {policy}")
        return setting.text

    def pool_defaults(self, strategy: str) -> PoolDefaults:
        """The settings of every pool."""
        notes = self._notes
        allowed_fails = self._take("allowed_fails")
        open_for = read_duration(self._take("cooldown_time"), notes)
        breaker: dict[str, Any] = {}
        if (
            failures := read_integer(allowed_fails, notes, 0, 99_999)
        ) is not None and allowed_fails is not None:
            breaker["consecutive_failures"] = failures + 1
            notes.add(
                allowed_fails, "changed", f"{failures + 1} failures in a row take a worker out"
            )
        if open_for is not None:
            breaker["open_for"] = open_for
        max_concurrency = self._take("default_max_parallel_requests") or self._server.pop(
            "max_parallel_requests"
        )
        enforces_rates = self._enforces_rates()
        return PoolDefaults(
            _POLICIES[strategy],
            breaker,
            read_integer(max_concurrency, notes, 1, 100_000),
            keeps_rates=strategy.startswith(_USAGE_BASED) or enforces_rates,
            joins_groups=strategy != _DEFAULT_STRATEGY,
        )

    def _enforces_rates(self) -> bool:
        """Whether a setting makes limits of LiteLLM's ``rpm`` and ``tpm``."""
        checks = list_values(self._take("optional_pre_call_checks"))
        for check in checks:
            if check.text == _RATE_CHECK:
                reason = (
                    "a model whose entries all have rpm or tpm has the sum of them as its limit"
                )
                self._notes.add(check, "changed", reason)
            else:
                self._notes.add(check, "left out", _UNKNOWN)
        enabled = self._take("enable_pre_call_checks")
        if enabled is not None:
            reason = "the context is always checked before a request is sent to a worker"
            self._notes.add(enabled, "needless", reason)
        is_enabled = enabled is not None and enabled.value is True
        return is_enabled or any(check.text == _RATE_CHECK for check in checks)

    def defaults(self, model_limits: Mapping[str, Any]) -> Mapping[str, Any]:
        """The defaults of all models, and the limits of the one key or of all clients."""
        notes = self._notes
        timeouts = {
            "first_token": read_duration(self._take("stream_timeout"), notes),
            "total": read_duration(self._take("timeout", "request_timeout"), notes),
        }
        defaults: dict[str, Any] = {}
        if given := {key: value for key, value in timeouts.items() if value is not None}:
            defaults["timeouts"] = given
        if (retries := read_integer(self._take("num_retries"), notes, 0, 10)) is not None:
            defaults["retries"] = {"max": retries}
        if (drop_params := self._take("drop_params")) is not None:
            defaults["on_loss"] = "report" if drop_params.value is True else "reject"
        concurrent = self._server.pop("global_max_parallel_requests")
        limits: dict[str, Any] = {}
        if (number := read_integer(concurrent, notes, 1, 100_000)) is not None:
            limits["concurrent"] = number
        if model_limits:
            limits["models"] = model_limits
        if limits:
            defaults["limits"] = limits
        return defaults

    def listeners(self, local_workers: Mapping[int, SourceValue]) -> Mapping[str, Any]:
        """The listeners, the admin listener, the limits and the keys.

        ``local_workers`` are those of this machine, by their ports, which no listener can have.
        """
        notes, sections = self._notes, dict[str, Any]()
        key = self._server.pop("master_key")
        host = "127.0.0.1" if key is None else "0.0.0.0"
        port = self._find_port(_PORT, local_workers)
        listener: Any = [{"address": f"{host}:{port}", "protocols": [*CLIENT_PROTOCOLS]}]
        if key is None:
            reason = ("no key is required, so it listens on this machine only",)
            listener = CommentedValue(listener, reason)
        sections["listeners"] = listener
        if self._has_metrics():
            port = self._find_port(_ADMIN_PORT, local_workers)
            admin = {"address": f"127.0.0.1:{port}"}
            sections["admin"] = CommentedValue(admin, ("/metrics is here",))
        size = read_integer(self._server.pop("max_request_size_mb"), notes, 1, 1_000_000)
        if size is not None:
            sections["limits"] = {"body": f"{size}MiB"}
        if key is not None:
            sections["keys"] = self._key(key)
        return sections

    def _find_port(self, wanted: int, local_workers: Mapping[int, SourceValue]) -> int:
        """The first port from the wanted one that is not a worker's."""
        port = next(port for port in count(wanted) if port not in local_workers)
        if port != wanted:
            reason = f"it has the port {wanted} of this machine, so the gateway takes {port}"
            self._notes.add(local_workers[wanted], "changed", reason)
        return port

    def _has_metrics(self) -> bool:
        """Whether Prometheus is a callback; all other callbacks are noted."""
        has_prometheus = False
        for name in ("callbacks", "success_callback", "failure_callback"):
            for callback in list_values(self._module.pop(name)):
                if callback.text == "prometheus":
                    has_prometheus = True
                else:
                    self._notes.add(callback, "left out", _SETTING_REASONS[name])
        return has_prometheus

    def _key(self, key: SourceValue) -> Any:
        """The master key, which may use every model."""
        value = key.value
        if not isinstance(value, Env):
            digest = hashlib.sha256(str(value).encode()).hexdigest()
            return [{"name": "master", "sha256": digest}]
        reason = (
            f"set {_MASTER_KEY_VARIABLE}=$(printf %s \"${value.name}\" | sha256sum | cut -d' ' -f1)"
        )
        self._notes.add(key, "changed", f"only its SHA-256 is known here; {reason}")
        return CommentedValue([{"name": "master", "sha256": Env(_MASTER_KEY_VARIABLE)}], (reason,))

    # --- other names, and other models ------------------------------------------------------------

    def aliases(self, parts: ConfigParts) -> None:
        """Add the aliases to the models."""
        for setting in (self._take("model_group_alias"), self._take("model_alias_map")):
            for name, target in () if setting is None else setting.mapping().items():
                self._alias(name, target, parts)

    def _alias(self, name: str, target: SourceValue, parts: ConfigParts) -> None:
        model_name: SourceValue | None = target
        if target.is_mapping:
            properties = target.mapping()
            model_name = properties.pop("model")
            properties.note_unused(
                self._notes, "the alias has no such setting; listings show it", {}, {}
            )
        model = "" if model_name is None else model_name.text
        reason = _no_alias(name, model, parts)
        if reason is not None:
            self._notes.add(target, "left out", reason)
        else:
            parts.names[name] = model
            parts.models[model].setdefault("aliases", []).append(name)

    def fallbacks(self, parts: ConfigParts) -> None:
        """Add the fallbacks to the models. Those of ``*`` are for models without others."""
        defaults: list[SourceValue] = []
        for entry in list_values(self._take("fallbacks")):
            for name, others in entry.mapping().items():
                if name == "*":
                    defaults += list_values(others)
                    continue
                for other in list_values(others):
                    self._fallback(name, other, parts)
        defaults += list_values(self._take("default_fallbacks"))
        without = [
            name
            for name, model in parts.models.items()
            if not any(fallback in parts.names for fallback in model.get("fallback", ()))
        ]
        for other in defaults:
            if other.text not in parts.names:
                self._notes.add(other, "left out", "there is no such model")
                continue
            names = [name for name in without if name != parts.names[other.text]]
            if not names:
                self._notes.add(other, "needless", "every other model has a fallback of its own")
            for name in names:
                self._fallback(name, other, parts)

    def _fallback(self, name: str, other: SourceValue, parts: ConfigParts) -> None:
        reason = _no_fallback(name, other.text, parts)
        if reason is None:
            fallbacks = parts.models[parts.names[name]].setdefault("fallback", [])
            if other.text in fallbacks:
                self._notes.add(other, "needless", f"for {name}: it is a fallback already")
                return
            fallbacks.append(other.text)
            if "versions" in parts.models[parts.names[other.text]]:
                reason = f"for {name}: only one of its versions is tried"
                self._notes.add(other, "changed", reason)
        else:
            self._notes.add(other, "left out", f"for {name}: {reason}")

    def note_unused(self) -> None:
        """Note all settings that were not read."""
        for section in (self._router, self._module, self._server):
            section.note_unused(self._notes, _UNKNOWN, _SETTING_REASONS, _NEEDLESS_SETTINGS)


def _no_alias(name: str, model: str, parts: ConfigParts) -> str | None:
    """Why the name cannot be an alias of the model; None if it can."""
    if model not in parts.models:
        return f"there is no model {model!r}"
    if name in parts.names:
        return "there is a model of this name"
    try:
        units.parse_alias(name)
    except ValueError as error:
        return f"{name!r} {error}"
    return None


def _no_fallback(name: str, other: str, parts: ConfigParts) -> str | None:
    """Why the other model cannot be a fallback; None if it can."""
    if name not in parts.names:
        return "there is no such model"
    if other not in parts.names:
        return f"there is no model {other!r}"
    if other.endswith("*"):
        return "a wildcard model can't be a fallback"
    model, fallback = parts.names[name], parts.names[other]
    if parts.tasks[model] != parts.tasks[fallback]:
        return f"{other!r} has a different task"
    if model in (fallback, *_after(fallback, parts)):
        return f"{other!r} would lead back to it; fallbacks must not form a cycle"
    return None


def _after(model: str, parts: ConfigParts) -> set[str]:
    """All models that the fallbacks of this model reach."""
    reached: set[str] = set()
    pending = [model]
    while pending:
        names = parts.models[pending.pop()].get("fallback", ())
        new = {parts.names[alias] for alias in names if alias in parts.names} - reached
        reached |= new
        pending += new
    return reached


# --- the configuration ----------------------------------------------------------------------------

_PREFACE: Final = (
    "Generated from a LiteLLM config.yaml by `interlingua migrate litellm`, which printed what it",
    "left out and changed. Secrets are read from the environment.",
)
_EMPTY_FILE_MESSAGE: Final = "the file is empty; a config.yaml of LiteLLM has a model_list"
_SECTION_REASONS: Final = {
    "environment_variables": "set them in the gateway's environment",
    "include": "migrate the included files, too",
    "guardrails": "prompts and responses are not inspected",
    "mcp_servers": "only clients call tools",
    "files_settings": "file APIs are not supported",
    "finetune_settings": "fine-tuning is not supported",
    "vector_store_registry": "nothing is added to prompts",
}


_SETTING_SECTIONS: Final = ("router_settings", "litellm_settings", "general_settings")
_ORDER: Final[tuple[str, ...]] = (
    "version",
    "listeners",
    "admin",
    "limits",
    "keys",
    "defaults",
    "backends",
    "models",
)


class Migration(Struct, frozen=True):
    """The new file, or None if it would have no models; and the notes."""

    text: str | None
    notes: tuple[Note, ...]

    @property
    def is_complete(self) -> bool:
        """Whether no note says that something is left out."""
        return self.text is not None and all(note.kind != "left out" for note in self.notes)


def migrate(data: bytes, filename: str, environ: Mapping[str, str]) -> Migration:
    """Rewrite LiteLLM's file. Raises ConfigError if the file can't be read.

    Variables that ``environ`` does not have get a placeholder, so that the new file can be checked.
    """
    issues, notes = IssueCollector(filename), NoteCollector()
    document_node = compose_yaml(
        decode_utf8(data, filename), issues, empty_message=_EMPTY_FILE_MESSAGE
    )
    root = SourceValue(document_node, (), issues).mapping()
    router, module, server = (_section(root, name, issues) for name in _SETTING_SECTIONS)
    settings = SettingsReader(router, module, server, notes)
    strategy = settings.strategy()
    parts, pool_defaults = ConfigParts(), settings.pool_defaults(strategy)
    reader = DeploymentReader(notes, by_rates=strategy == _DEFAULT_STRATEGY)
    groups = _groups(root, reader, issues)
    for group in groups:
        add_model(group, pool_defaults, parts, notes)
    settings.aliases(parts)
    settings.fallbacks(parts)
    document = {"version": 1, **settings.listeners(_list_local_workers(groups))}
    if defaults := settings.defaults(parts.limits):
        document["defaults"] = defaults
    settings.note_unused()
    root.note_unused(notes, "no such setting", _SECTION_REASONS, {})
    if issues.issues:
        raise ConfigError(filename, issues.issues)
    document |= {"backends": parts.backends, "models": parts.models}
    unset: dict[str, None] = {}
    sections = {
        key: _fill_unset(document[key], key, environ, unset) for key in _ORDER if key in document
    }
    if unset and parts.models:
        reason = (
            f"variables are not set here, so placeholders stand in the file; set {', '.join(unset)}"
        )
        notes.add(root.source, "changed", reason)
    text = format_document(sections, _PREFACE) if parts.models else None
    return Migration(text, tuple(sorted(notes.notes)))


def _list_local_workers(groups: Sequence[ModelGroup]) -> Mapping[int, SourceValue]:
    """The entries whose workers are on this machine, by the worker's port."""
    found: dict[int, SourceValue] = {}
    for deployment in (one for group in groups for one in group.deployments):
        url = deployment.worker.url
        if not isinstance(url, str):
            continue
        parts = urlsplit(url)
        if parts.hostname in _LOCAL_HOSTS and parts.port is not None:
            found.setdefault(parts.port, deployment.source)
    return found


_UNSET: Final = {"url": "https://unset.invalid", "sha256": "0" * 64}
"""What stands for a variable that is not set, by its key in the new file."""


def _fill_unset(value: Any, key: str, environ: Mapping[str, str], unset: dict[str, None]) -> Any:
    """The value with a placeholder for each variable that is not set; ``unset`` collects those."""
    match value:
        case Env(name) if name not in environ:
            unset[name] = None
            return Env(name, _UNSET.get(key, "unset"))
        case EnvText(text):
            placeholder = _UNSET["url"] if ENV_REFERENCE.match(text) else "unset.invalid"

            def fill(reference: re.Match[str]) -> str:
                if reference[1] in environ:
                    return reference[0]
                unset[reference[1]] = None
                return f"${{{reference[1]}:-{placeholder}}}"

            return EnvText(ENV_REFERENCE.sub(fill, text))
        case CommentedValue(inner, comments):
            return CommentedValue(_fill_unset(inner, key, environ, unset), comments)
        case Mapping():
            return {name: _fill_unset(one, name, environ, unset) for name, one in value.items()}
        case list():
            inner_key = "url" if key == "workers" else key
            return [_fill_unset(one, inner_key, environ, unset) for one in value]
        case _:
            return value


def _section(parent: SourceMapping, name: str, issues: IssueCollector) -> SourceMapping:
    """A section of the file; an empty mapping if there is none."""
    section = parent.pop(name)
    return SourceMapping(parent.source, {}, issues) if section is None else section.mapping()


def _groups(
    root: SourceMapping, reader: DeploymentReader, issues: IssueCollector
) -> list[ModelGroup]:
    """The deployments of the model list, grouped by name."""
    credentials = _read_credentials(root, reader.notes)
    groups: dict[str, ModelGroup] = {}
    entries = root.pop("model_list")
    for item in entries.items() if entries is not None else ():
        entry = item.mapping()
        name_setting = entry.pop("model_name")
        if name_setting is None:
            reader.notes.add(item, "left out", "no model_name; the whole entry")
        elif (name := read_model_name(name_setting, reader.notes)) is not None:
            params = _section(entry, "litellm_params", issues)
            try:
                _fill_credentials(params, credentials)
                deployment = reader.read(name, entry, params)
            except UnsupportedEntry as error:
                reader.notes.add(error.value, "left out", str(error))
                continue
            entry.note_unused(reader.notes, "no such setting", {}, {})
            groups.setdefault(name, ModelGroup(name, [])).deployments.append(deployment)
    for credential in credentials.values():
        for key, value in credential.values.items():
            if key not in credential.taken:
                reader.notes.add(value, "needless", "no entry takes it from these credentials")
    return [*groups.values()]


class _Credential(Struct):
    """Parameters that entries may take, and the keys of those that some have ``taken``."""

    values: SourceMapping
    taken: set[str] = set()


def _fill_credentials(params: SourceMapping, credentials: Mapping[str, _Credential]) -> None:
    """Add the parameters of the credentials that the entry names. Raises UnsupportedEntry."""
    reference = params.pop("litellm_credential_name")
    if reference is not None:
        if (credential := credentials.get(reference.text)) is None:
            raise UnsupportedEntry(reference, "no such credentials")
        params.fill_from(credential.values, credential.taken)


def _read_credentials(root: SourceMapping, notes: NoteCollector) -> Mapping[str, _Credential]:
    """The parameters of each entry of the list of credentials."""
    credentials = {}
    entries = root.pop("credential_list")
    for item in entries.items() if entries is not None else ():
        entry = item.mapping()
        name, values = entry.pop("credential_name"), entry.pop("credential_values")
        entry.note_unused(notes, "not used", {}, {"credential_info": "not used"})
        if name is not None and values is not None:
            credentials[name.text] = _Credential(values.mapping())
    return credentials
