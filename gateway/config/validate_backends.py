"""Checks that need more than the file itself: other files, certificates, packages and protocols.

This is the only module of the configuration's checks that reads files, builds TLS contexts and
looks for installed packages. ``gateway.config.registry`` answers its questions about protocols and
chat templates.
"""

import importlib.util
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, get_args
from urllib.parse import SplitResult, urlsplit

import msgspec.inspect

from backends.http.interfaces import parse_version_segment
from backends.pool.settings import ClientTlsSettings, PoolSettings
from backends.torch.model_files import ENGINE_TASKS, UnsupportedModelError, check_files
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
    EndpointIndex,
    describe_type_mismatch,
    find_template_error,
)
from gateway.config.schema import (
    Config,
    ListenerConfig,
    ListenerProtocolConfig,
    ModelConfig,
    ResponseStoreConfig,
    SharedStateConfig,
    TlsConfig,
)
from gateway.config.validation_context import ValidationContext, is_set
from gateway.config.yaml_reader import compose_yaml, decode_utf8
from protocols.core.catalog import ModelTask
from protocols.core.restricted import PARAMETERS
from protocols.core.units import ConfigSection, NonEmptyStr, parse_ip

_REDIS_URLS: Final = "write redis://HOST:6379/0, rediss://HOST:6379/0 for TLS, or unix:///PATH"
_POSTGRES_URL: Final = "write it as postgresql://USER@HOST:5432/DATABASE"
_OTLP: Final = (
    "needs OpenTelemetry's client of OTLP; install it with: pip install 'interlingua[otel]'"
)


def check(config: Config, context: ValidationContext) -> None:
    """Report everything that can't be used on this machine, or by the protocols it names."""
    if is_set(config.listeners):
        preferred = _list_preferred_protocols(config)
        for number, listener in enumerate(config.listeners):
            if is_set(listener):
                _check_listener(listener, ("listeners", number), context, preferred)
    if is_set(config.backends):
        pools = {}
        for name, backend in config.backends.items():
            path = ("backends", name)
            if is_set(backend) and isinstance(backend, PoolSettings):
                if _check_pool(backend, path, context):
                    pools[name] = backend
            elif is_set(backend) and isinstance(backend, TorchSettings):
                _check_template(backend.chat_template, (*path, "chat_template"), context)
                _check_model_files(backend, path, context)
        if is_set(config.models):
            _check_tasks(config.models, pools, context)
    _check_identity(config, context)
    _check_state(config, context)
    _check_stored_responses(config, context)
    _check_telemetry(config, context)
    _check_usage(config, context)


# --- files and packages --------------------------------------------------------------------------


def _check_installed(
    modules: Sequence[str], message: str, path: ConfigPath, context: ValidationContext
) -> None:
    """Report ``message`` on the key at ``path`` unless all of these modules can be imported."""
    try:
        installed = all(importlib.util.find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # its parent package is missing
        installed = False
    if not installed:
        context.add_issue(path, message, key=True)


def _check_model_files(
    settings: TorchSettings, path: ConfigPath, context: ValidationContext
) -> None:
    """Report files that are there and that the local engine can't serve.

    A package that is not installed is not reported: the gateway may run on another machine.
    """
    if not is_set(settings.path) or not settings.path:
        return
    try:
        dtype = settings.dtype if is_set(settings.dtype) else "auto"
        task = ENGINE_TASKS.get(settings.task) if is_set(settings.task) else None
        check_files(settings.path, dtype, task)
    except UnsupportedModelError as error:
        context.add_issue((*path, "path"), str(error))


def _check_key_pair(tls: TlsConfig, path: ConfigPath, context: ValidationContext) -> None:
    """Report a certificate and key that can't be used, or that don't belong together."""
    try:
        tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls_context.load_cert_chain(
            tls.cert, tls.key, password=str
        )  # otherwise OpenSSL asks on the terminal
    except OSError as error:
        hint = "give a certificate chain in PEM and its key, without a password"
        context.add_issue(path, f"can't be used: {_tls_error(error)}; {hint}")


def _check_ca(trust: ClientTlsSettings, path: ConfigPath, context: ValidationContext) -> None:
    """Report CA certificates of the ``tls`` section at ``path`` that can't be used."""
    if not is_set(trust.ca):
        return
    try:
        ssl.create_default_context(cafile=trust.ca)
    except OSError as error:
        message = f"can't be used: {_tls_error(error)}; give certificates in PEM"
        context.add_issue((*path, "ca"), message)


def _tls_error(error: OSError) -> str:
    """The system's error message, or OpenSSL's reason in lower case."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    return error.reason.replace("_", " ").lower() if error.reason else "it is not in PEM"


def _check_template(template: str | None, path: ConfigPath, context: ValidationContext) -> None:
    """Report a chat template that can't be compiled."""
    if not is_set(template) or template is None:
        return
    if error := find_template_error(template):
        context.add_issue(path, error)


# --- listeners -----------------------------------------------------------------------------------


def _list_preferred_protocols(config: Config) -> frozenset[str]:
    """The protocols that a key or a model names, for paths that several protocols share."""
    keys = config.keys if is_set(config.keys) else ()
    models = config.models.values() if is_set(config.models) else ()
    sections = [section for section in (*keys, *models) if is_set(section)]
    return frozenset(h.protocol for h in sections if is_set(h.protocol) and h.protocol is not None)


def _check_listener(
    listener: ListenerConfig,
    path: ConfigPath,
    context: ValidationContext,
    preferred: frozenset[str],
) -> None:
    """``preferred`` protocols may share their paths with others."""
    tls = is_set(listener.tls) and listener.tls
    if tls and is_set(tls.cert) and is_set(tls.key):
        _check_key_pair(tls, (*path, "tls"), context)
    if not is_set(listener.protocols):
        return
    claims = {True: EndpointIndex(), False: EndpointIndex()}
    """Protocols whose clients send a version header may share paths with those whose do not."""
    for n, protocol in enumerate(listener.protocols):
        if not is_set(protocol) or not is_set(protocol.name):
            continue
        at = (*path, "protocols", n)
        endpoints = _check_listener_protocol(protocol, at, context)
        if endpoints is None or not is_set(protocol.prefix):
            continue
        keys = [(method, protocol.prefix + endpoint_path) for method, endpoint_path in endpoints]
        index = claims[context.protocols.has_version_header(protocol.name)]
        if not (listener.protocol_header is True or protocol.name in preferred):
            shared = min(filter(None, map(index.find_shared, keys)), default=None)
            if shared:
                (method, shared_path), owner = shared
                context.add_issue(
                    at,
                    f"{method} {shared_path} belongs to {owner} on this listener already; "
                    f"give this one a prefix: {{name: {protocol.name}, "
                    f"prefix: /{protocol.name}}}, or set it as the protocol of a key or a model",
                )
        for key in keys:
            index.add(key, protocol.name)


def _check_listener_protocol(
    protocol: ListenerProtocolConfig, path: ConfigPath, context: ValidationContext
) -> frozenset[tuple[str, str]] | None:
    """The endpoints of a protocol on a listener; None if it has an issue, which is reported."""
    if not context.check_client_protocol(
        protocol.name, protocol.profile, (*path, "name"), (*path, "profile")
    ):
        return None
    option_types = context.protocols.get_options(protocol.name)
    is_valid = True
    for key, value in protocol.options.items():
        at = (*path, key)
        if key not in option_types:
            fields = ["name", "profile", "prefix", "keep_alive", *option_types]
            context.add_issue(
                at, f"there is no {quote(key)} here; {suggest_name(key, fields)}", key=True
            )
            is_valid = False
        elif not is_set(value):
            is_valid = False
        elif mismatch := describe_type_mismatch(value, option_types[key]):
            context.add_issue(at, mismatch)
            is_valid = False
    if not is_valid:
        return None
    try:
        return context.protocols.endpoints(protocol.name, protocol.profile, protocol.options)
    except ValueError as error:
        context.add_issue(path, str(error))
        return None


# --- pools ---------------------------------------------------------------------------------------


def _check_pool(pool: PoolSettings, path: ConfigPath, context: ValidationContext) -> bool:
    """Report what is wrong with a pool; returns whether its protocol and its profile are known."""
    is_known = is_set(pool.protocol) and _check_pool_protocol(pool, path, context)
    _check_unsupported_parameters(pool, path, context)
    if is_set(pool.tls) and pool.tls is not None:
        _check_ca(pool.tls, (*path, "tls"), context)
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
            _check_template(pool.chat_template, (*path, key), context)
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


# --- what a pool's workers do not support --------------------------------------------------------


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


# --- identity, state, telemetry, usage -----------------------------------------------------------


def _check_identity(config: Config, context: ValidationContext) -> None:
    """Report missing libraries, and an issuer whose keys can't be fetched securely."""
    identity, path = config.identity, ("identity",)
    if not is_set(identity) or identity is None:
        return
    message = "tokens need a library; install it with: pip install 'interlingua[jwt]'"
    _check_installed(("jwt", "cryptography"), message, path, context)
    name = "issuer" if identity.jwks is None else "jwks"  # the field that leads to the keys
    url = getattr(identity, name)
    if is_set(url):
        _check_issuer_url(url, (*path, name), context)
    if is_set(identity.tls) and identity.tls is not None:
        _check_ca(identity.tls, (*path, "tls"), context)


def _check_issuer_url(url: str, path: ConfigPath, context: ValidationContext) -> None:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    host = parts.hostname or ""
    if not host or parts.scheme not in ("http", "https") or parts.username is not None:
        context.add_issue(
            path, "is not the URL of an issuer; write it as https://login.example.com/realm"
        )
        return
    address = parse_ip(host)
    is_local = host == "localhost" if address is None else address.is_loopback
    if parts.scheme == "http" and not is_local:
        message = "the keys could be replaced on the way; write https://"
        context.add_issue(path, message)


def _check_state(config: Config, context: ValidationContext) -> None:
    """Report an unusable Redis URL, without showing it: it may contain a password."""
    state, path = config.state, ("state", "redis")
    if not is_set(state) or state is None:
        return
    if importlib.util.find_spec("redis") is None:
        message = "needs the client of Redis; install it with: pip install 'interlingua[redis]'"
        context.add_issue(path, message)
    if is_set(state.redis) and (problem := _redis_url_error(state.redis.reveal())):
        context.add_issue(path, f"this {problem}")
    _check_redis_tls(state, ("state", "tls"), context)


def _check_stored_responses(config: Config, context: ValidationContext) -> None:
    """Report two stores of responses, or an unusable Redis URL, without showing it."""
    store, path = config.stored_responses, ("stored_responses",)
    if not is_set(store) or not is_set(store.sqlite) or not is_set(store.redis):
        return
    if store.sqlite is not None and store.redis is not None:
        context.add_issue(path, "give either sqlite or redis, or neither to use memory")
    if store.redis is None:
        if is_set(store.tls) and store.tls is not None:
            message = "applies only to redis; add its URL, or remove this"
            context.add_issue((*path, "tls"), message, key=True)
        return
    if importlib.util.find_spec("redis") is None:
        message = "needs the client of Redis; install it with: pip install 'interlingua[redis]'"
        context.add_issue((*path, "redis"), message)
    if problem := _redis_url_error(store.redis.reveal()):
        context.add_issue((*path, "redis"), f"this {problem}")
    _check_redis_tls(store, (*path, "tls"), context)


def _redis_url_error(url: str) -> str:
    """Why the URL can't be used; "" if it can."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return f"is no URL; {_REDIS_URLS}; signs in a password are written as %40"
    if parts.query or parts.fragment:
        return "has options, which are not taken from a URL; remove what follows ? or #"
    if parts.scheme == "unix":
        is_wrong = bool(parts.hostname) or len(parts.path) <= 1
    else:
        is_wrong = parts.scheme not in ("redis", "rediss") or port == 0 or not _has_database(parts)
    return f"is not the URL of a Redis; {_REDIS_URLS}" if is_wrong else ""


def _has_database(parts: SplitResult) -> bool:
    """Whether it names a host, and either no database or one by its number."""
    database = parts.path.removeprefix("/")
    return bool(parts.hostname) and (not database or database.isdigit())


def _check_redis_tls(
    state: SharedStateConfig | ResponseStoreConfig, path: ConfigPath, context: ValidationContext
) -> None:
    if not is_set(state.tls) or state.tls is None:
        return
    url = state.redis if is_set(state.redis) else None
    if url is not None and not url.reveal().startswith("rediss://"):
        message = "applies only with TLS; write rediss:// in the URL, or remove this"
        context.add_issue(path, message, key=True)
    _check_ca(state.tls, path, context)


def _check_telemetry(config: Config, context: ValidationContext) -> None:
    """Report missing libraries, and vLLM's metrics without an admin listener."""
    observe = config.observe
    if not is_set(observe):
        return
    modules = ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk")
    if is_set(observe.traces) and observe.traces is not None:
        _check_installed(modules, _OTLP, ("observe", "traces"), context)
    metrics = observe.metrics
    if not is_set(metrics):
        return
    if is_set(metrics.push) and metrics.push is not None:
        _check_installed(modules, _OTLP, ("observe", "metrics", "push"), context)
    if is_set(metrics.vllm_compat) and metrics.vllm_compat and config.admin is None:
        message = "there is no admin listener to serve it; add one: admin: {address: ...}"
        context.add_issue(("observe", "metrics", "vllm_compat"), message)


def _check_rollout_store(config: Config, context: ValidationContext) -> None:
    """Report rollouts whose state and requests have no shared place."""
    usage = config.observe.usage
    if not is_set(usage) or not is_set(config.models):
        return
    for name, model in config.models.items():
        if not is_set(model) or not is_set(model.rollout) or model.rollout is None:
            continue
        webhook = model.rollout.webhook
        if is_set(webhook) and webhook is not None and not _is_http_url(webhook.reveal()):
            path = ("models", name, "rollout", "webhook")
            context.add_issue(path, "must be an http:// or https:// URL with a host")
        if usage is None:
            message = (
                "a rollout needs observe.usage: {sqlite: FILE}, or {postgres: URL} for gateways "
                "on several machines"
            )
            context.add_issue(("models", name, "rollout"), message, key=True)
        guardrails = model.rollout.guardrails
        if not is_set(guardrails) or not is_set(guardrails.feedback) or not guardrails.feedback:
            continue
        if config.observe.feedback is None:
            message = "no feedback is taken without observe.feedback; add it: observe.feedback: {}"
            context.add_issue(
                ("models", name, "rollout", "guardrails", "feedback"), message, key=True
            )


def _check_usage(config: Config, context: ValidationContext) -> None:
    """Report zero or two usage stores, or an unusable one. The URL is not shown."""
    if not is_set(config.observe):
        return
    usage, feedback = config.observe.usage, config.observe.feedback
    _check_rollout_store(config, context)
    if usage is None and is_set(feedback) and feedback is not None:
        message = "needs a database of usage rows; add observe.usage: {sqlite: FILE}"
        context.add_issue(("observe", "feedback"), message, key=True)
    if not is_set(usage) or usage is None:
        return
    if not is_set(usage.sqlite) or not is_set(usage.postgres):
        return
    path = ("observe", "usage")
    if (usage.sqlite is None) == (usage.postgres is None):
        context.add_issue(path, "give either sqlite or postgres, and not both")
    elif usage.postgres is not None:
        at = (*path, "postgres")
        if importlib.util.find_spec("asyncpg") is None:
            message = "needs the client of PostgreSQL"
            context.add_issue(
                at, f"{message}; install it with: pip install 'interlingua[postgres]'"
            )
        if not _is_postgres_url(usage.postgres.reveal()):
            context.add_issue(at, f"this is not the URL of a database; {_POSTGRES_URL}")


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _is_postgres_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    host = parts.netloc.rpartition("@")[2]
    return parts.scheme in ("postgresql", "postgres") and bool(host or "host=" in parts.query)
