"""Check that what a configuration names can be reached: ``interlingua check --connect``.

Workers: DNS, TCP, TLS and the protocol. Listeners: the address and the certificate. The issuer of
tokens, Redis, PostgreSQL and the collectors of traces and metrics. The host: versions, limits of
the system, devices of local models. No check sends a request to a model or changes anything.
"""

import asyncio
import email.utils
import importlib
import importlib.util
import os
import platform
import re
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

import httpx
from msgspec import Struct
from msgspec.structs import replace

from backends.http.interfaces import WorkerCredentials, join_path
from backends.pool.settings import PoolSettings, WorkerSourceSettings
from backends.torch.settings import TorchSettings
from gateway import __version__
from gateway.config.schema import (
    Config,
    JwtConfig,
    SharedStateConfig,
    TlsConfig,
)
from gateway.pipeline.services import GatewayServices as Services
from gateway.runtime.build import build_adapter, build_backend
from gateway.runtime.build import list_backend_models as models_of_backend
from protocols.core.interfaces import UpstreamAdapter, UpstreamRequest
from protocols.core.units import split_address

_WORKER_TIMEOUT: Final = 5.0
"""Seconds for each step: DNS, then the connection and its requests."""
_LISTENER_TIMEOUT: Final = 2.0
_SERVICE_TIMEOUT: Final = 2.0
_CONCURRENCY: Final = 32
"""Workers that are checked at once."""
_MAX_CLOCK_SKEW: Final = 5.0
_AUTH_STATUSES: Final = (401, 403)
_BODY_START: Final = 1024
"""Bytes of a body in which a web page is looked for."""
_DAY: Final = 86_400
_RENEWAL_DAYS: Final = 14
"""Days before its end in which a certificate should be renewed."""
_SET_CA: Final = "set the CA that signed it: `tls: {ca: FILE}`"
_CERTIFICATE_HINTS: Final = {
    "certificate has expired": "renew it",
    "certificate is not yet valid": "wait, or correct the clock of either host",
    "ostname mismatch": "use the name in the certificate, or issue one for this name",
    "IP address mismatch": "use the name in the certificate, or issue one for this address",
    "self-signed": _SET_CA,
    "self signed": _SET_CA,
    "unable to get local issuer": _SET_CA,
}
_MIN_VERSIONS: Final = {
    "aiohttp": (3, 14),
    "httptools": (0, 6, 4),
    "msgspec": (0, 19),
    "httpx": (0, 27),
}
"""Older releases of aiohttp have known vulnerabilities."""
_OTHER_FILES: Final = 64
"""Open files that are neither a client's nor a worker's connection."""
_MIN_BACKLOG: Final = 1024
_MIN_PORTS: Final = 20_000


class Finding(Struct, frozen=True):
    """The result of one check: what was checked, what is so, and how to correct it."""

    state: Literal["ok", "warning", "error"]
    subject: str
    message: str
    hint: str = ""


def check_host() -> Sequence[Finding]:
    """Check what does not depend on the configuration: installed versions and the kernel."""
    return [*check_versions(), *check_kernel()]


async def check_connections(config: Config, services: Services) -> Sequence[Finding]:
    """Check all that the configuration names."""
    results = await asyncio.gather(
        check_listeners(config, services.wall_clock),
        check_workers(config, services),
        check_services(config),
    )
    return [
        *check_open_files(config.limits.connections),
        *check_local_models(config),
        *chain(*results),
    ]


def _ok(subject: str, message: str) -> Finding:
    return Finding("ok", subject, message)


def _warning(subject: str, message: str, hint: str) -> Finding:
    return Finding("warning", subject, message, hint)


def _error(subject: str, message: str, hint: str) -> Finding:
    return Finding("error", subject, message, hint)


def _describe_failure(error: BaseException) -> str:
    """The message of the innermost cause."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0).lower()
    return str(getattr(error, "strerror", None) or error) or "timed out"


# --- the host -------------------------------------------------------------------------------------


def check_versions(version: Callable[[str], str] = metadata.version) -> Iterator[Finding]:
    """The versions of the gateway, of Python, and of the libraries that requests go through."""
    yield _ok("interlingua", __version__)
    yield _ok("python", f"{platform.python_version()} on {platform.machine()}")
    for name, oldest in _MIN_VERSIONS.items():
        installed = version(name)
        if _parse_version(installed) < oldest:
            minimum = ".".join(map(str, oldest))
            hint = f"pip install '{name}>={minimum}'"
            yield _warning(name, f"{installed} is older than {minimum}", hint)
        else:
            yield _ok(name, installed)
    try:
        yield _ok("uvloop", version("uvloop"))
    except metadata.PackageNotFoundError:
        message = "not installed; the slower event loop is used"
        yield _warning("uvloop", message, "pip install uvloop")


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def check_open_files(connections: int) -> Iterator[Finding]:
    """Whether a process may open two files for each of ``limits.connections``."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * connections + _OTHER_FILES
    if hard < needed:
        message = f"the limit of {hard:,} is too low for {connections:,} connections"
        hint = f"raise the limit (ulimit -Hn {needed}), or lower limits.connections"
        yield _warning("open files", message, hint)
    else:
        yield _ok("open files", f"the limit is {hard:,}; up to {needed:,} may be needed")


def check_kernel(settings: Path = Path("/proc/sys/net")) -> Iterator[Finding]:
    """The listen backlog and the local ports; nothing on a system without these settings."""
    try:
        backlog = int((settings / "core/somaxconn").read_text("ascii"))
        low, high = map(int, (settings / "ipv4/ip_local_port_range").read_text("ascii").split())
    except OSError:
        return
    if backlog < _MIN_BACKLOG:
        hint = f"sysctl net.core.somaxconn={_MIN_BACKLOG * 4}"
        yield _warning("somaxconn", f"only {backlog} connections can wait in the backlog", hint)
    else:
        yield _ok("somaxconn", str(backlog))
    if (ports := high - low + 1) < _MIN_PORTS:
        hint = 'sysctl net.ipv4.ip_local_port_range="15000 65000"'
        yield _warning("local ports", f"only {ports:,} connections to one worker", hint)
    else:
        yield _ok("local ports", f"{ports:,}")


def check_local_models(config: Config) -> Iterator[Finding]:
    """The device and the memory of each local model. Without one, torch is not imported."""
    for name, backend in config.backends.items():
        if isinstance(backend, TorchSettings):
            yield _check_local_model(f"backend {name}", backend)


def _check_local_model(subject: str, model: TorchSettings) -> Finding:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        message = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        return _error(subject, message, "pip install 'interlingua[torch]'")
    try:
        return _check_device(subject, model, importlib.import_module("torch"))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        message = f"the device {model.device} is not available: {reason}"
        return _error(subject, message, "set another device, or repair the driver")


def _check_device(subject: str, model: TorchSettings, torch: Any) -> Finding:
    """Raises RuntimeError."""
    kind = model.device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind if model.device == "auto" else model.device)
    torch.zeros(1, device=device)
    if kind != "cuda":
        threads = torch.get_num_threads()
        return _ok(subject, f"torch {torch.__version__} on {device}, {threads} threads")
    free, total = torch.cuda.mem_get_info(device)
    message = (
        f"torch {torch.__version__} on {torch.cuda.get_device_name(device)}: "
        f"{free >> 20:,} of {total >> 20:,} MiB free"
    )
    if free < model.kv_cache_memory:
        hint = "stop other processes on the device, or lower `memory`"
        return _warning(subject, f"{message}, less than `memory`", hint)
    return _ok(subject, message)


# --- certificates ---------------------------------------------------------------------------------


async def _check_tls(
    host: str, port: int, context: ssl.SSLContext, subject: str, now: Callable[[], float]
) -> Finding:
    """Connect by TLS and read the certificate. Raises OSError, though not ssl.SSLError."""
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    except ssl.SSLError as error:
        return _describe_tls_failure(error, subject)
    try:
        return _check_validity(writer.get_extra_info("peercert"), subject, now())
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _describe_tls_failure(error: ssl.SSLError, subject: str) -> Finding:
    if not isinstance(error, ssl.SSLCertVerificationError):
        reason = (error.reason or str(error)).replace("_", " ").lower()
        hint = "write http:// if it does not use TLS"
        return _error(subject, f"TLS handshake failed: {reason}", hint)
    reason = error.verify_message
    hint = next(
        (text for pattern, text in _CERTIFICATE_HINTS.items() if pattern in reason), "replace it"
    )
    return _error(subject, f"certificate not accepted: {reason.rstrip('.')}", hint)


def _check_validity(certificate: Any, subject: str, now: float) -> Finding:
    until = ssl.cert_time_to_seconds(certificate["notAfter"])
    days = int((until - now) // _DAY)
    if days < _RENEWAL_DAYS:
        return _warning(subject, f"certificate expires in {days} days", "renew it")
    return _ok(subject, f"certificate is valid for {days} days")


def _check_own_certificate(tls: TlsConfig, subject: str, now: float) -> Finding:
    """Check the certificate of a listener by a handshake in memory."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tls.cert, tls.key, password=str)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it may be signed by anyone
    client.load_verify_locations(tls.cert)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    peers = (
        client.wrap_bio(outgoing, incoming),
        server.wrap_bio(incoming, outgoing, server_side=True),
    )
    try:
        for peer in (*peers, *peers):
            with suppress(ssl.SSLWantReadError):
                peer.do_handshake()
    except ssl.SSLError as error:
        return _describe_tls_failure(error, subject)
    return _check_validity(peers[0].getpeercert(), subject, now)


# --- listeners ------------------------------------------------------------------------------------


async def check_listeners(config: Config, now: Callable[[], float]) -> Sequence[Finding]:
    """The address of each listener, also of the admin listener, and its certificate."""
    results = []
    for listener in config.listeners:
        subject = f"listener {listener.address}"
        results.append(await _check_address(subject, listener.address, listener.tls, "/health"))
        if (tls := listener.tls) is not None:
            results.append(await asyncio.to_thread(_check_own_certificate, tls, subject, now()))
    if (admin := config.admin) is not None:
        subject = f"admin listener {admin.address}"
        results.append(await _check_address(subject, admin.address, None, "/-/live"))
    return results


async def _check_address(subject: str, address: str, tls: TlsConfig | None, path: str) -> Finding:
    """Whether the address is free, or a gateway's already."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            pass
    except OSError as error:
        if await _is_gateway(host, port, tls, path):
            return _ok(subject, "a gateway is listening there")
        hint = "stop the process that listens there, or set another address"
        return _error(subject, f"cannot listen: {_describe_failure(error)}", hint)
    return _ok(subject, "the address is free")


async def _is_gateway(host: str, port: int, tls: TlsConfig | None, path: str) -> bool:
    """Whether a gateway answers at this address."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url_host = f"[{target}]" if ":" in target else target
    url = f"{'http' if tls is None else 'https'}://{url_host}:{port}{path}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is this host
    try:
        async with httpx.AsyncClient(verify=context, timeout=_LISTENER_TIMEOUT) as client:
            return (await client.get(url)).is_success
    except httpx.HTTPError:
        return False


# --- workers --------------------------------------------------------------------------------------


class _WorkerCheck(Struct, frozen=True):
    """A worker of a pool, and what is needed to send it requests."""

    subject: str
    url: str
    credentials: WorkerCredentials | None
    pool: PoolSettings
    context: ssl.SSLContext


async def check_workers(config: Config, services: Services) -> Sequence[Finding]:
    """Each worker of each pool, also those that DNS or a file names."""
    results: list[Finding] = []
    slots = asyncio.Semaphore(_CONCURRENCY)

    async def run(check: _WorkerCheck) -> None:
        async with slots:
            steps = [result async for result in _check_worker(check, services.wall_clock)]
        results.extend(steps)

    async with asyncio.TaskGroup() as tasks:
        for name, pool in config.backends.items():
            if not isinstance(pool, PoolSettings):
                continue
            context = ssl.create_default_context(cafile=pool.tls.ca if pool.tls else None)
            for worker in pool.workers:
                try:
                    urls = await _worker_urls(name, pool, worker, config, services)
                except LookupError as error:
                    hint = "correct the name, or its source"
                    results.append(_error(f"backend {name}", str(error), hint))
                    continue
                credentials = worker.auth.make_credentials() if worker.auth else None
                for url in urls:
                    subject = f"worker {url} (backend {name})"
                    tasks.create_task(run(_WorkerCheck(subject, url, credentials, pool, context)))
    return sorted(results, key=lambda result: result.subject)


async def _worker_urls(
    name: str, pool: PoolSettings, worker: WorkerSourceSettings, config: Config, services: Services
) -> Sequence[str]:
    """The worker's URL, or the URLs that DNS or a file names. Raises LookupError."""
    if worker.url is not None:
        return [worker.url]
    backend: Any = build_backend(
        replace(pool, workers=(worker,)), services, name, models_of_backend(config)[name]
    )
    await backend.start()
    try:
        urls = [report.url for report in backend.report_workers()]
    finally:
        await backend.aclose()
    if not urls:
        raise LookupError(f"no worker is named by {worker.dns or worker.srv or worker.file}")
    return urls


async def _check_worker(check: _WorkerCheck, now: Callable[[], float]) -> AsyncIterator[Finding]:
    """DNS, TCP, TLS, then the protocol, up to the first step that fails."""
    parts = urlsplit(check.url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_WORKER_TIMEOUT):
            await asyncio.get_running_loop().getaddrinfo(host, port)
    except OSError as error:
        message = f"the name {host} does not resolve: {_describe_failure(error)}"
        yield _error(check.subject, message, "correct the name, or DNS")
        return
    try:
        async with asyncio.timeout(_WORKER_TIMEOUT):
            if parts.scheme == "https":
                result = await _check_tls(host, port, check.context, check.subject, now)
                yield result
                if result.state == "error":
                    return
            async for result in _check_protocol(check, now):
                yield result
    except httpx.RemoteProtocolError:
        hint = "write https:// if it uses TLS, and check what listens there"
        yield _error(check.subject, "the response is not HTTP", hint)
    except (OSError, httpx.HTTPError) as error:
        hint = "start the worker, or correct its url"
        yield _error(check.subject, _describe_failure(error), hint)


async def _check_protocol(check: _WorkerCheck, now: Callable[[], float]) -> AsyncIterator[Finding]:
    """Send the health check and the protocol's probe. Raises httpx.HTTPError."""
    pool = check.pool
    adapter = cast("UpstreamAdapter", build_adapter(pool.protocol, pool.profile, pool.options))
    probes = [adapter.health_request]
    if (path := pool.health.path) is not None:
        probes.insert(0, UpstreamRequest(path, b"", method="GET"))
    timeout = httpx.Timeout(_WORKER_TIMEOUT)
    base_path = urlsplit(check.url).path.rstrip("/")
    origin = check.url.rstrip("/").removesuffix(base_path)
    async with httpx.AsyncClient(verify=check.context, timeout=timeout) as client:
        for probe in probes:
            request, headers = probe, probe.headers
            if check.credentials is not None:
                request, headers = check.credentials.authorize(probe, probe.headers)
            response = await client.request(
                probe.method,
                origin + join_path(base_path, request.path),
                headers=headers,
                content=probe.body or None,
            )
            sent = f"{probe.method} {join_path(base_path, probe.path)}"
            yield _check_response(check, sent, response)
            skew = _clock_skew(response.headers.get("date"), now())
            if probe is adapter.health_request and abs(skew) > _MAX_CLOCK_SKEW:
                message = f"the clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
                yield _warning(check.subject, message, "synchronize both clocks by NTP")


def _check_response(check: _WorkerCheck, request: str, response: httpx.Response) -> Finding:
    """``request`` is its method and path, without credentials."""
    status, protocol = response.status_code, check.pool.protocol
    if status in _AUTH_STATUSES:
        reason = "the key is not accepted" if check.credentials else "a key is required"
        hint = "set `auth` of the worker: {bearer: …}, or header, query or basic"
        return _error(check.subject, f"{request} answered {status}: {reason}", hint)
    hint = f"check that the worker speaks the protocol {protocol}"
    if status == HTTPStatus.NOT_FOUND:
        hint = f"check the path of the worker's url, and {hint.removeprefix('check ')}"
    if not response.is_success:
        return _error(check.subject, f"{request} answered {status}", hint)
    if response.content[:_BODY_START].lstrip().startswith(b"<"):
        return _error(check.subject, f"{request} answered with a web page", hint)
    return _ok(check.subject, f"{request} answered {status}, as the protocol {protocol} requires")


def _clock_skew(date: str | None, now: float) -> float:
    """Seconds by which the worker's clock is ahead of this host's; 0 if it does not say."""
    try:
        return email.utils.parsedate_to_datetime(date or "").timestamp() - now
    except ValueError:
        return 0.0


# --- services -------------------------------------------------------------------------------------


async def check_services(config: Config) -> Sequence[Finding]:
    """Collectors of traces and metrics, recordings, the issuer of tokens, PostgreSQL and Redis."""
    results = [await _check_collector(kind, url) for kind, url in _collectors(config)]
    results += [_check_recording_folder(path) for path in _list_recording_folders(config)]
    if config.identity is not None:
        results.append(await _check_issuer(config.identity))
    if (usage := config.observe.usage) is not None and usage.postgres is not None:
        results.append(await _check_postgres(usage.postgres.reveal()))
    if config.state is not None:
        results.append(await _check_redis(config.state))
    return results


def _list_recording_folders(config: Config) -> Iterator[str]:
    """Each folder for recordings, once."""
    records = [config.defaults.record]
    records += (model.record for model in config.models.values())
    records += (route.record for route in config.routes)
    yield from dict.fromkeys(record.to for record in records if record is not None)


def _check_recording_folder(path: str) -> Finding:
    """Whether files can be created there, or the folder itself."""
    subject, folder = f"recordings {path}", Path(path)
    existing = folder if folder.exists() else folder.parent
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return _ok(subject, "it can be written to")
    hint = "until it is writable, requests are not recorded"
    return _error(subject, f"the gateway may not write to {existing}", hint)


def _collectors(config: Config) -> Iterator[tuple[str, str]]:
    if (traces := config.observe.traces) is not None:
        yield "traces", traces.otlp
    if (push := config.observe.metrics.push) is not None:
        yield "metrics", push.otlp


async def _check_collector(kind: str, url: str) -> Finding:
    """Any response will do: a check sends no spans."""
    subject = f"collector of {kind} {url}"
    try:
        async with httpx.AsyncClient(timeout=_SERVICE_TIMEOUT) as client:
            await client.get(url)
    except httpx.HTTPError as error:
        hint = "start the collector, or correct its url"
        return _error(subject, _describe_failure(error), hint)
    return _ok(subject, "it answers")


async def _check_issuer(identity: JwtConfig) -> Finding:
    """Fetch the keys by which tokens are verified."""
    from gateway.auth.jwks import (  # noqa: PLC0415 - its libraries need not be installed
        JwksFetcher,
        parse_key_set,
    )

    subject = f"issuer {identity.issuer}"
    try:
        keys = parse_key_set(await JwksFetcher(identity).fetch_keys(), identity.algorithms)
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        hint = "correct the issuer's url, or its `jwks`; until then, tokens are refused"
        return _error(subject, f"cannot fetch its keys: {_describe_failure(error)}", hint)
    names = {name for name, _ in keys.by_name}
    return _ok(subject, f"has {len(names)} keys for {', '.join(identity.algorithms)}")


async def _check_postgres(url: str) -> Finding:
    """Connect to the database of usage. The subject has no password."""
    from gateway.observability.usage_postgres import (  # noqa: PLC0415 - as above
        DATABASE_ERRORS,
        connect_database,
        redact_url,
    )

    subject = f"usage database {redact_url(url)}"
    try:
        connection = await connect_database(url)
        try:
            version = connection.get_server_version()
        finally:
            await connection.close()
    except DATABASE_ERRORS as error:
        hint = "start it, or correct its url; until then, rows wait, and are dropped in the end"
        return _error(subject, f"cannot connect: {_describe_failure(error)}", hint)
    return _ok(subject, f"version {version.major}.{version.minor} answers")


async def _check_redis(state: SharedStateConfig) -> Finding:
    """Ask Redis for its version. The URL may hold a password, and is not shown."""
    from redis.asyncio import Redis  # noqa: PLC0415 - it need not be installed
    from redis.asyncio.retry import Retry  # noqa: PLC0415 - as above
    from redis.backoff import NoBackoff  # noqa: PLC0415 - as above
    from redis.exceptions import RedisError  # noqa: PLC0415 - as above

    tls: dict[str, Any] = {} if state.tls is None else {"ssl_ca_certs": state.tls.ca}
    client: Any = Redis.from_url(
        state.redis.reveal(),
        socket_timeout=_SERVICE_TIMEOUT,
        socket_connect_timeout=_SERVICE_TIMEOUT,
        retry=Retry(NoBackoff(), 0),
        **tls,
    )
    try:
        version = (await client.info("server"))["redis_version"]
    except (RedisError, OSError) as error:
        hint = "start it, or correct `state.redis`; until then, `state.on_failure` applies"
        return _error("redis", f"cannot connect: {_describe_failure(error)}", hint)
    finally:
        await client.aclose()
    return _ok("redis", f"version {version} answers")
