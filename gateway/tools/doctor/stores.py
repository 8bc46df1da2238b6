"""Whether what is shared, counted or kept elsewhere can be reached."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import httpx

from gateway.config import Config
from gateway.config.identity import Identity
from gateway.config.state import State
from gateway.tools.doctor.finding import Finding, bad, ok, why

_PATIENCE: Final = 2.0


async def examine(config: Config) -> Sequence[Finding]:
    """Who signs tokens, the Redis of the limits, and the collectors of traces and figures."""
    found = [await _collector(what, url) for what, url in _collectors(config)]
    if config.identity is not None:
        found.append(await _issuer(config.identity))
    if (usage := config.observe.usage) is not None and usage.postgres is not None:
        found.append(await _postgres(usage.postgres.reveal()))
    if config.state is not None:
        found.append(await _redis(config.state))
    return found


def _collectors(config: Config) -> Iterator[tuple[str, str]]:
    if (traces := config.observe.traces) is not None:
        yield "traces", traces.otlp
    if (push := config.observe.metrics.push) is not None:
        yield "figures", push.otlp


async def _collector(what: str, url: str) -> Finding:
    """Any answer will do: what is sent there is not sent by a look."""
    try:
        async with httpx.AsyncClient(timeout=_PATIENCE) as client:
            await client.get(url)
    except httpx.HTTPError as error:
        said = f"nobody answers: {why(error)}"
        return bad(f"{what} {url}", said, "start the collector, or mend its url")
    return ok(f"{what} {url}", "somebody answers")


async def _issuer(told: Identity) -> Finding:
    """Whether tokens could be verified."""
    from gateway.identity.issuer import Fetching  # noqa: PLC0415 - its library need not be there
    from gateway.identity.keys import read  # noqa: PLC0415 - as above

    what = f"identity {told.issuer}"
    try:
        keys = read(await Fetching(told).fetch(), told.algorithms)
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        mend = "mend the issuer's url, or its `jwks`; meanwhile tokens are refused"
        return bad(what, f"its keys can't be had: {why(error)}", mend)
    names = sorted({name for name, _ in keys.of})
    return ok(what, f"has {len(names)} keys for {', '.join(told.algorithms)}")


async def _postgres(url: str) -> Finding:
    """Its URL may hold a password, and is not shown whole."""
    from gateway.recording.postgres import FAILURES, connected, shown  # noqa: PLC0415 - as above

    what = f"usage {shown(url)}"
    try:
        connection = await connected(url)
        try:
            version = connection.get_server_version()
        finally:
            await connection.close()
    except FAILURES as error:
        mend = "start it, or mend its url; meanwhile rows wait, and are lost at last"
        return bad(what, f"can't be reached: {why(error)}", mend)
    return ok(what, f"version {version.major}.{version.minor} answers")


async def _redis(state: State) -> Finding:
    """Its URL may hold a password, and is not shown."""
    from redis.asyncio import Redis  # noqa: PLC0415 - it need not be installed
    from redis.asyncio.retry import Retry  # noqa: PLC0415 - as above
    from redis.backoff import NoBackoff  # noqa: PLC0415 - as above
    from redis.exceptions import RedisError  # noqa: PLC0415 - as above

    url = state.redis.reveal()
    trust: dict[str, Any] = {}
    if state.tls is not None:
        trust["ssl_ca_certs"] = state.tls.ca
    client: Any = Redis.from_url(
        url,
        socket_timeout=_PATIENCE,
        socket_connect_timeout=_PATIENCE,
        retry=Retry(NoBackoff(), 0),
        **trust,
    )
    try:
        version = (await client.info("server"))["redis_version"]
    except (RedisError, OSError) as error:
        mend = "start it, or mend `state.redis`; meanwhile `state.on_failure` holds"
        return bad("redis", f"can't be asked: {why(error)}", mend)
    finally:
        await client.aclose()
    return ok("redis", f"version {version} answers")
