"""Whether workers are where the file says they are, and are what it says."""

import asyncio
import email.utils
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
from msgspec import Struct
from msgspec.structs import replace

from gateway.config import Config, Pool, Worker
from gateway.core.ports import WireRequest
from gateway.making import asked_of, make_backend, make_dialect
from gateway.server import Surroundings
from gateway.tools.doctor import tls
from gateway.tools.doctor.finding import Finding, bad, ok, warn, why

_PATIENCE: Final = 5.0
"""Seconds for each thing that a worker is to do."""
_AT_ONCE: Final = 32
_SKEW: Final = 5.0
_KEYS: Final = (401, 403)
_LOOK: Final = 1024


class _Asked(Struct, frozen=True):
    """A worker of a pool, and how it is spoken to."""

    what: str
    url: str
    bearer: str | None
    pool: Pool
    context: ssl.SSLContext


async def examine(config: Config, outside: Surroundings) -> Sequence[Finding]:
    """Each worker of each pool."""
    findings: list[Finding] = []
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(asked: _Asked) -> None:
        async with places:
            found = [finding async for finding in _look(asked, outside.now)]
        findings.extend(found)

    async with asyncio.TaskGroup() as tasks:
        for name, pool in config.backends.items():
            if not isinstance(pool, Pool):
                continue
            context = ssl.create_default_context(cafile=pool.tls.ca if pool.tls else None)
            for worker in pool.workers:
                try:
                    urls = await _urls(name, pool, worker, config, outside)
                except LookupError as error:
                    mend = "mend the name, or what tells of them"
                    findings.append(bad(name, str(error), mend))
                    continue
                bearer = worker.auth.bearer.reveal() if worker.auth else None
                for url in urls:
                    tasks.create_task(one(_Asked(f"{name} {url}", url, bearer, pool, context)))
    return sorted(findings, key=lambda finding: finding.what)


async def _urls(
    name: str, pool: Pool, worker: Worker, config: Config, outside: Surroundings
) -> Sequence[str]:
    """A worker's, or those that are told of where they are looked for. Raises LookupError."""
    if worker.url is not None:
        return [worker.url]
    backend: Any = make_backend(
        replace(pool, workers=(worker,)), outside, name, asked_of(name, config)
    )
    await backend.start()
    try:
        urls = [report.url for report in backend.snapshot()]
    finally:
        await backend.aclose()
    if not urls:
        raise LookupError(f"nobody is named by {worker.dns or worker.srv or worker.file}")
    return urls


async def _look(asked: _Asked, now: Callable[[], float]) -> AsyncIterator[Finding]:
    """The name, the way there, the certificate, and what it answers; no further than it goes."""
    parts = urlsplit(asked.url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_PATIENCE):
            await asyncio.get_running_loop().getaddrinfo(host, port)
    except OSError as error:
        yield bad(asked.what, f"its name has no address: {why(error)}", "mend the name, or DNS")
        return
    try:
        async with asyncio.timeout(_PATIENCE):
            if parts.scheme == "https":
                met = await tls.meet(host, port, asked.context, asked.what, now)
                yield met
                if met.state == "bad":
                    return
            async for finding in _answers(asked, now):
                yield finding
    except httpx.RemoteProtocolError:
        mend = "write https:// if it speaks TLS, and look what listens there"
        yield bad(asked.what, "what answers there speaks no HTTP", mend)
    except (OSError, httpx.HTTPError) as error:
        yield bad(asked.what, f"nobody answers there: {why(error)}", "start it, or mend its url")


async def _answers(asked: _Asked, now: Callable[[], float]) -> AsyncIterator[Finding]:
    """Whether it speaks its dialect. Raises httpx.HTTPError."""
    pool = asked.pool
    dialect: Any = make_dialect(pool.dialect, pool.profile, pool.options)
    wires = [dialect.probe]
    if (path := pool.health.path) is not None:
        wires.insert(0, WireRequest(path, b"", method="GET"))
    limits = httpx.Timeout(_PATIENCE)
    async with httpx.AsyncClient(verify=asked.context, timeout=limits) as client:
        for wire in wires:
            headers = dict(wire.headers)
            if asked.bearer is not None:
                headers["authorization"] = f"Bearer {asked.bearer}"
            content = wire.body or None
            answer = await client.request(
                wire.method, asked.url + wire.path, headers=headers, content=content
            )
            yield _judged(asked, wire, answer)
            apart = _apart(answer.headers.get("date"), now())
            if wire is dialect.probe and abs(apart) > _SKEW:
                said = f"its clock is {abs(apart):.0f} s {'ahead' if apart > 0 else 'behind'}"
                yield warn(asked.what, said, "have both clocks set by NTP")


def _judged(asked: _Asked, wire: WireRequest, answer: httpx.Response) -> Finding:
    """What an answer says of who gave it."""
    status, spoken = answer.status_code, asked.pool.dialect
    place = f"{wire.method} {wire.path}"
    if status in _KEYS:
        said = "its key is no good there" if asked.bearer else "it wants a key"
        return bad(asked.what, f"{place} is {status}: {said}", "say `auth: {bearer: …}` of it")
    if not answer.is_success:
        mend = f"is it {spoken}? interlingua conform {asked.url} --worker --dialect {spoken}"
        return bad(asked.what, f"{place} is {status}", mend)
    if answer.content[:_LOOK].lstrip().startswith(b"<"):
        mend = f"is it {spoken}? look what listens there"
        return bad(asked.what, f"{place} is answered by a page for people", mend)
    return ok(asked.what, f"{place} is {status}, as {spoken} has it")


def _apart(date: str | None, now: float) -> float:
    """How many seconds its clock is ahead of this one's."""
    try:
        return email.utils.parsedate_to_datetime(date or "").timestamp() - now
    except ValueError:
        return 0.0
