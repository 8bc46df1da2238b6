"""Checks the services a gateway uses: token issuers, Redis, PostgreSQL and telemetry collectors."""

from typing import Final
from urllib.parse import SplitResult, urlsplit

from gateway.config.errors import ConfigPath
from gateway.config.schema import Config, ResponseStoreConfig, SharedStateConfig
from gateway.config.validate_files import check_ca, check_installed, is_installed
from gateway.config.validation_context import ValidationContext, is_set
from protocols.core.units import parse_ip

_REDIS_URLS: Final = "write redis://HOST:6379/0, rediss://HOST:6379/0 for TLS, or unix:///PATH"
_POSTGRES_URL: Final = "write it as postgresql://USER@HOST:5432/DATABASE"
_OTLP: Final = (
    "needs OpenTelemetry's client of OTLP; install it with: pip install 'interlingua[otel]'"
)


def check_services(config: Config, context: ValidationContext) -> None:
    """Report settings of services that can't work, and client libraries that are missing."""
    _check_identity(config, context)
    _check_state(config, context)
    _check_stored_responses(config, context)
    _check_telemetry(config, context)
    _check_usage(config, context)


def _check_identity(config: Config, context: ValidationContext) -> None:
    """Report missing libraries, and an issuer whose keys can't be fetched securely."""
    identity, path = config.identity, ("identity",)
    if not is_set(identity) or identity is None:
        return
    message = "tokens need a library; install it with: pip install 'interlingua[jwt]'"
    check_installed(("jwt", "cryptography"), message, path, context)
    name = "issuer" if identity.jwks is None else "jwks"  # the field that leads to the keys
    url = getattr(identity, name)
    if is_set(url):
        _check_issuer_url(url, (*path, name), context)
    if is_set(identity.tls) and identity.tls is not None:
        check_ca(identity.tls, (*path, "tls"), context)


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
    if not is_installed("redis"):
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
    if not is_installed("redis"):
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
    check_ca(state.tls, path, context)


def _check_telemetry(config: Config, context: ValidationContext) -> None:
    """Report missing libraries, and vLLM's metrics without an admin listener."""
    observe = config.observe
    if not is_set(observe):
        return
    modules = ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk")
    if is_set(observe.traces) and observe.traces is not None:
        check_installed(modules, _OTLP, ("observe", "traces"), context)
    metrics = observe.metrics
    if not is_set(metrics):
        return
    if is_set(metrics.push) and metrics.push is not None:
        check_installed(modules, _OTLP, ("observe", "metrics", "push"), context)
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
        if not is_installed("asyncpg"):
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
