"""``interlingua probe``: what a worker supports of its protocol."""

import asyncio
import re
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click
from msgspec import Struct

from gateway.cli.console import write_file
from gateway.cli.option_types import SENT_KEY, NumberRange
from gateway.config.registry import ProtocolRegistry, describe_type_mismatch
from gateway.terminal import print_text
from protocols import PROTOCOLS
from protocols.core.interfaces import UpstreamAdapter
from protocols.core.units import parse_worker_url

if TYPE_CHECKING:
    from gateway.tools.probe.client import Probe, WorkerTarget
    from gateway.tools.probe.runner import ProbeResult


_CONNECT_TIMEOUT: Final = 10.0
_BOOLEANS: Final = {"true": True, "false": False}
_SECONDS: Final = NumberRange(0.1, 86_400)


class _Limits(Struct, frozen=True):
    """Seconds for one probe and for all of them, and the TLS context with its CA certificates."""

    seconds: float
    total: float
    tls: ssl.SSLContext


@click.command()
@click.argument("url")
@click.option("--protocol", required=True, type=click.Choice(tuple(PROTOCOLS)))
@click.option("--profile", help="The worker's profile; by default, the protocol's first.")
@click.option(
    "--set",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the protocol for this worker; may be repeated.",
)
@click.option("--model", help="The worker's name of the model that generates text.")
@click.option("--embedder", help="The worker's name of the embedding model.")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME=OWN",
    help="The worker's own name for a field, as in a pool's `fields`.",
)
@click.option("--prompts", is_flag=True, help="Send texts as prompts, not as chat messages.")
@click.option(
    "--key",
    type=SENT_KEY,
    envvar="INTERLINGUA_KEY",
    help="The API key; prefer the environment variable INTERLINGUA_KEY.",
)
@click.option(
    "--key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file that holds the API key.",
)
@click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False),
    help="CA certificates for the worker's certificate, in PEM.",
)
@click.option("--only", multiple=True, metavar="NAME", help="Run only this probe; may be repeated.")
@click.option(
    "--timeout", type=_SECONDS, default=30.0, show_default=True, help="Seconds for one probe."
)
@click.option(
    "--total", type=_SECONDS, default=900.0, show_default=True, help="Seconds for all probes."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option(
    "--write",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Save what the worker does not support, as a pool's `unsupported_parameters`.",
)
def probe(url: str, *, protocol: str, timeout: float, total: float, **arguments: Any) -> None:
    """Probe the worker at URL: send about a hundred requests and check the responses.

    URL is the base URL of a worker that speaks the protocol, as in a pool's `workers`. What the
    protocol can't express is reported as not offered.

    Exit codes: 0 everything passed, 1 some probes failed, 2 wrong usage, worker unreachable, or no
    probe could run.
    """
    check_url(url)
    if not arguments["model"] and not arguments["embedder"]:
        raise click.UsageError("name the worker's model: --model NAME, or --embedder NAME")
    if (file := arguments["key_file"]) is not None:
        arguments["key"] = _read_key(file)
    profile = arguments["profile"]
    options = parse_options(protocol, profile, arguments["options"])
    adapter = _make_adapter(protocol, profile, options, arguments["fields"])
    probes = _select(arguments["only"])
    limits = _Limits(timeout, total, _build_tls_context(arguments["ca"]))
    _report(
        _run(probes, adapter, _target(url, arguments), limits),
        protocol,
        probes,
        arguments | {"url": url},
    )


def check_url(url: str) -> None:
    """Raises BadParameter unless it is an HTTP base URL."""
    try:
        parse_worker_url(url)
    except ValueError as error:
        raise click.BadParameter(f"{url} {error}") from None


def _build_tls_context(ca: str | None) -> ssl.SSLContext:
    """Raises BadParameter."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        raise click.BadParameter(f"--ca: {ca} holds no certificates in PEM: {error}") from None


def _read_key(file: Path) -> str:
    """The key in a file. Raises BadParameter."""
    try:
        text = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"--key-file: {file} can't be read: {error}") from None
    return SENT_KEY.convert(text, None, None)


def parse_options(protocol: str, profile: str | None, pairs: Sequence[str]) -> dict[str, Any]:
    """The settings of a protocol from ``NAME=VALUE``. Raises BadParameter, also for the profile."""
    registry = ProtocolRegistry(PROTOCOLS)
    profiles = registry.get_profiles(protocol)
    if profile not in (None, *profiles):
        names = ", ".join(profiles)
        raise click.BadParameter(f"{protocol} has no profile {profile}; it has {names}")
    types = registry.get_options(protocol)
    options: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in types:
            names = f"it has {', '.join(types)}" if types else "it has none"
            raise click.BadParameter(f"{protocol} has no setting {name}; {names}")
        value = _BOOLEANS.get(text, int(text) if re.fullmatch("[0-9]{1,9}", text) else text)
        if mismatch := describe_type_mismatch(value, types[name]):
            raise click.BadParameter(f"{name} {mismatch}, not {text!r}")
        options[name] = value
    return options


def _make_adapter(
    protocol: str, profile: str | None, options: dict[str, Any], fields: Sequence[str]
) -> UpstreamAdapter:
    """The adapter that a pool would use. Raises BadParameter."""
    registry = ProtocolRegistry(PROTOCOLS)
    if not registry.serves_workers(protocol):
        raise click.BadParameter(f"{protocol} is for clients only, and not for workers")
    if fields:
        if not registry.accepts_param(protocol, "fields"):
            raise click.BadParameter(f"{protocol} does not support --field")
        options = options | {"fields": dict(field.partition("=")[::2] for field in fields)}
    try:
        return cast("UpstreamAdapter", registry.create_adapter(protocol, profile, options))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _target(url: str, arguments: dict[str, Any]) -> "WorkerTarget":
    from gateway.tools.probe.client import WorkerTarget  # noqa: PLC0415 - it loads httpx

    mode: Any = "prompt" if arguments["prompts"] else "chat"
    return WorkerTarget(
        url.rstrip("/"), arguments["model"], arguments["embedder"], arguments["key"], mode
    )


def _select(selected: Sequence[str]) -> Sequence["Probe"]:
    """The probes to run. Raises UsageError."""
    from gateway.tools.probe.runner import PROBES  # noqa: PLC0415 - as above

    names = [item.name for item in PROBES]
    if unknown := [name for name in selected if name not in names]:
        raise click.UsageError(f"unknown probe {unknown[0]}; the probes are {', '.join(names)}")
    return [item for item in PROBES if not selected or item.name in selected]


async def _run(
    probes: Sequence["Probe"], adapter: UpstreamAdapter, target: "WorkerTarget", limits: _Limits
) -> AsyncIterator["ProbeResult"]:
    """The result of each probe when it is finished. Exits if the worker can't be reached."""
    import httpx  # noqa: PLC0415 - no other command needs it

    from gateway.tools.probe.client import Unreachable, WorkerClient  # noqa: PLC0415 - as above
    from gateway.tools.probe.runner import run_probes  # noqa: PLC0415 - as above

    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT)
    async with httpx.AsyncClient(timeout=timeout, trust_env=False, verify=limits.tls) as http:
        worker = WorkerClient(http, adapter, target)
        try:
            async for result in run_probes(
                probes, worker, seconds=limits.seconds, total=limits.total
            ):
                yield result
        except Unreachable as error:
            print_text(f"interlingua can't reach {target.url}: {error}", err=True)
            sys.exit(2)


def _report(
    running: AsyncIterator["ProbeResult"],
    protocol: str,
    probes: Sequence["Probe"],
    arguments: dict[str, Any],
) -> None:
    """Run the probes, print and save their results, and exit with the code for them."""
    from gateway.tools.probe import report  # noqa: PLC0415 - it loads httpx

    width = max(len(item.name) for item in probes)
    results: list[ProbeResult] = []

    async def collect() -> None:
        async for result in running:
            results.append(result)
            if not arguments["as_json"]:
                print_text(report.format_row(result, width))

    asyncio.run(collect())
    profile = arguments["profile"] or ProtocolRegistry(PROTOCOLS).get_profiles(protocol)[0]
    worker = report.ProbedWorker(
        arguments["url"].rstrip("/"), protocol, profile, arguments["model"]
    )
    if arguments["as_json"]:
        print_text(report.encode_json(worker, results))
    else:
        print_text(report.format_summary(results))
    if arguments["write"] is not None:
        write_file(arguments["write"], report.encode_unsupported_parameters(worker, results))
    sys.exit(report.exit_code(results))
