"""``python -m tests.conformance URL --protocol P`` sends a protocol's cases to a server."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Final, Literal

import click
import httpx
import msgspec
from msgspec import Struct

from gateway.cli.probe import check_url, parse_options
from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS
from tests.conformance.cases import KEY, Case, Mismatch, ProtocolSetup, cases_of, run_case

Outcome = Literal["passed", "failed", "not applicable"]

_TIMEOUT: Final = 10.0
"""Seconds in which the next bytes of a response must arrive."""
_WIDTH: Final = 60


class CaseResult(Struct, frozen=True):
    """The result of one case. ``why``: the gateway intentionally differs from the original."""

    id: str
    request: str
    outcome: Outcome
    reason: str = ""
    why: str = ""

    @property
    def summary(self) -> str:
        """Return the outcome and its reason."""
        difference = self.why if self.outcome == "passed" else ""
        notes = [self.reason, difference and f"on purpose unlike the original: {difference}"]
        return ": ".join((self.outcome, *filter(None, notes)))


@click.command()
@click.argument("url")
@click.option("--protocol", required=True, type=click.Choice(tuple(PROTOCOLS)))
@click.option("--profile", help="The protocol's profile on that gateway; otherwise the default.")
@click.option(
    "--set",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the protocol on that gateway; otherwise the defaults.",
)
@click.option("--alone", is_flag=True, help="No other protocol shares the listener.")
@click.option(
    "--key", envvar="INTERLINGUA_KEY", default=KEY, show_default=True, help="The API key to send."
)
@click.option("--only", multiple=True, metavar="ID", help="Only the cases of this number.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def main(
    url: str,
    protocol: str,
    *,
    profile: str | None,
    options: Sequence[str],
    key: str,
    only: Sequence[str],
    alone: bool,
    as_json: bool,
) -> None:
    """Play a protocol's conformance cases against the server at URL.

    The server must serve the models that the cases request: `interlingua serve conformance` does.
    Its file (gateway/defaults/conformance.yaml) lists the options for each of its listeners. A case
    that needs other settings is reported as not applicable.

    Exit codes: 0 everything passed, 1 some cases failed, 2 wrong usage, server unreachable, or no
    case applies.
    """
    check_url(url)
    setup = ProtocolSetup(
        profiles=ProtocolRegistry(PROTOCOLS).get_profiles(protocol),
        profile=profile,
        options=parse_options(protocol, profile, options),
        alone=alone,
    )
    cases = _select_cases(protocol, only)
    widths = [
        max(len(text) for text in column) for column in zip(*map(_format_case, cases), strict=True)
    ]
    results: list[CaseResult] = []

    async def run() -> None:
        async for result in _run_cases(url, cases, setup, key):
            results.append(result)
            if not as_json:
                id_, request = result.id.ljust(widths[0]), result.request.ljust(widths[1])
                click.echo(f"{id_}  {request}  {result.summary}")

    asyncio.run(run())
    count = Counter(one.outcome for one in results)
    passed, failed, rest = count["passed"], count["failed"], count["not applicable"]
    if as_json:
        document = {"url": url, "protocol": protocol, "cases": results}
        sums = {"passed": passed, "failed": failed, "not_applicable": rest}
        click.echo(msgspec.json.encode(document | sums))
    else:
        click.echo(f"{passed} passed, {failed} failed, {rest} not applicable")
    sys.exit(1 if failed else 0 if passed else 2)


def _select_cases(protocol: str, only: Sequence[str]) -> Sequence[Case]:
    """Return the cases to run. Raises UsageError if there are none."""
    try:
        every = cases_of(protocol)
    except ModuleNotFoundError:
        message = f"there are no cases of {protocol}; `interlingua probe` probes a worker of it"
        raise click.UsageError(message) from None
    cases = [one for one in every if not only or not {one.id, one.number}.isdisjoint(only)]
    if not cases:
        names = ", ".join(only)
        raise click.UsageError(f"{protocol} has no case {names}; it has {every[0].number} …")
    return cases


def _format_case(case: Case) -> tuple[str, str]:
    request = f"{case.method} {case.path}"
    return case.id, request if len(request) <= _WIDTH else request[: _WIDTH - 1] + "…"


async def _run_cases(
    url: str, cases: Sequence[Case], setup: ProtocolSetup, key: str
) -> AsyncIterator[CaseResult]:
    """Yield a result for each case. Exits if the server is unreachable."""
    async with httpx.AsyncClient(base_url=url.rstrip("/"), timeout=_TIMEOUT) as http:
        for case in cases:
            outcome: Outcome = "passed"
            reason = ""
            if missing := setup.missing(case):
                outcome, reason = "not applicable", f"needs {missing}"
            else:
                try:
                    await run_case(http, case, key=key)
                except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                    click.echo(f"can't reach {url}: {error}", err=True)
                    sys.exit(2)
                except Mismatch as error:
                    outcome, reason = "failed", " ".join(str(error).split())
                except Exception as error:  # noqa: BLE001 - a check may fail on any response
                    outcome, reason = "failed", f"{type(error).__name__} {error}".rstrip()
            yield CaseResult(*_format_case(case), outcome, reason, case.why)


if __name__ == "__main__":
    main(prog_name="python -m tests.conformance")
