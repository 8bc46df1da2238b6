"""``interlingua conform``: hold a running gateway against the cases of a dialect."""

import asyncio
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec
from msgspec import Struct

from gateway.config.dialects import Dialects, mismatch
from gateway.conformance.setting import Setting
from protocols import DIALECTS

if TYPE_CHECKING:
    from gateway.conformance.cases import Case

Outcome = Literal["passed", "failed", "not applicable"]

_PATIENCE = 10.0
"""Seconds in which something of an answer must come."""
_WIDEST = 60
_ANYTHING = re.compile(r"https?://[^/?#]+[^?#]*")
_WORDS = {"true": True, "false": False}


class Verdict(Struct, frozen=True):
    """How one case went. ``why``: the gateway differs here on purpose from the original."""

    id: str
    request: str
    outcome: Outcome
    reason: str = ""
    why: str = ""

    @property
    def told(self) -> str:
        """The outcome, with its reason."""
        unlike = self.why if self.outcome == "passed" else ""
        notes = [self.reason, unlike and f"on purpose unlike the original: {unlike}"]
        return ": ".join((self.outcome, *filter(None, notes)))


@click.command()
@click.argument("url")
@click.option("--dialect", required=True, type=click.Choice(tuple(DIALECTS)))
@click.option("--profile", help="The profile that the gateway has there; otherwise the default.")
@click.option(
    "--set",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the dialect that the gateway has there; otherwise the defaults.",
)
@click.option("--alone", is_flag=True, help="The dialect has the listener to itself.")
@click.option("--key", help="The key that the gateway knows.  [default: sk-test]")
@click.option("--only", multiple=True, metavar="ID", help="Play only the cases of this number.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def conform(
    url: str, *, dialect: str, key: str | None, only: Sequence[str], as_json: bool, **stated: Any
) -> None:
    """Play a dialect's conformance cases against the gateway at URL.

    The gateway must serve the models that the cases ask for: `interlingua serve conformance` does,
    and its file (gateway/defaults/conformance.yaml) says where it has which setting. A case that
    the gateway's setting can't meet is told as not applicable.

    Exit codes: 0 every case passed, 1 some failed, 2 wrong usage, unreachable, or nothing to play.
    """
    if not _ANYTHING.fullmatch(url):
        raise click.BadParameter(f"{url} is no URL such as http://127.0.0.1:8000")
    setting = _setting(Dialects(DIALECTS), dialect, **stated)
    cases = _chosen(dialect, only)
    widths = [max(len(text) for text in column) for column in zip(*map(_shown, cases), strict=True)]
    found: list[Verdict] = []

    async def run() -> None:
        async for verdict in _verdicts(url, cases, setting, key):
            found.append(verdict)
            if not as_json:
                id_, request = verdict.id.ljust(widths[0]), verdict.request.ljust(widths[1])
                click.echo(f"{id_}  {request}  {verdict.told}")

    asyncio.run(run())
    _conclude(url, dialect, found, as_json=as_json)


def _setting(
    dialects: Dialects, dialect: str, *, profile: str | None, options: Sequence[str], alone: bool
) -> Setting:
    """What the options say. Raises BadParameter."""
    profiles = dialects.profiles(dialect)
    if profile not in (None, *profiles):
        raise click.BadParameter(f"{dialect} has no profile {profile}; it has {_list(profiles)}")
    known = dialects.options(dialect)
    given: dict[str, object] = {}
    for one in options:
        name, _, text = one.partition("=")
        if name not in known:
            said = f"it has {_list(known)}" if known else "it has none"
            raise click.BadParameter(f"{dialect} has no setting {name}; {said}")
        value = _WORDS.get(text, int(text) if re.fullmatch("[0-9]{1,9}", text) else text)
        if wrong := mismatch(value, known[name]):
            raise click.BadParameter(f"{name} {wrong}, not {text!r}")
        given[name] = value
    return Setting(profiles=profiles, profile=profile, options=given, alone=alone)


def _chosen(dialect: str, only: Sequence[str]) -> Sequence["Case"]:
    """The cases to play. Raises UsageError where there are none."""
    from gateway.conformance.cases import cases_of  # noqa: PLC0415 - brings httpx with it

    try:
        every = cases_of(dialect)
    except ModuleNotFoundError:
        raise click.UsageError(f"there are no cases of {dialect}") from None
    cases = [one for one in every if not only or not {one.id, one.number}.isdisjoint(only)]
    if not cases:
        raise click.UsageError(f"{dialect} has no case {_list(only)}; it has {every[0].number} …")
    return cases


def _list(words: Any) -> str:
    return ", ".join(words)


def _shown(case: "Case") -> tuple[str, str]:
    request = f"{case.method} {case.path}"
    return case.id, request if len(request) <= _WIDEST else request[: _WIDEST - 1] + "…"


async def _verdicts(
    url: str, cases: Sequence["Case"], setting: Setting, key: str | None
) -> AsyncIterator[Verdict]:
    """One for each case, as they come. Ends the command where nobody listens."""
    import httpx  # noqa: PLC0415 - no other verb needs it

    from gateway.conformance.cases import KEY, Mismatch, play  # noqa: PLC0415 - as above

    async with httpx.AsyncClient(base_url=url.rstrip("/"), timeout=_PATIENCE) as http:
        for case in cases:
            outcome: Outcome = "passed"
            reason = ""
            if lacking := setting.lacks(case):
                outcome, reason = "not applicable", f"needs {lacking}"
            else:
                try:
                    await play(http, case, key=KEY if key is None else key)
                except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                    click.echo(f"interlingua can't reach {url}: {error}", err=True)
                    sys.exit(2)
                except Mismatch as error:
                    outcome, reason = "failed", " ".join(str(error).split())
                except Exception as error:  # noqa: BLE001 - a check may trip over a foreign answer
                    outcome, reason = "failed", f"{type(error).__name__} {error}".rstrip()
            yield Verdict(*_shown(case), outcome, reason, case.why)


def _conclude(url: str, dialect: str, found: Sequence[Verdict], *, as_json: bool) -> None:
    """Tell the sum, and end with its exit code."""
    count = Counter(one.outcome for one in found)
    passed, failed, rest = count["passed"], count["failed"], count["not applicable"]
    if as_json:
        told = {"url": url, "dialect": dialect, "cases": found}
        sums = {"passed": passed, "failed": failed, "not_applicable": rest}
        click.echo(msgspec.json.encode(told | sums))
    else:
        click.echo(f"{passed} passed, {failed} failed, {rest} not applicable")
    sys.exit(1 if failed else 0 if passed else 2)
