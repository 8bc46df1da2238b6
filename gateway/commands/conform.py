"""``interlingua conform``: hold a gateway against a dialect's cases, or a worker by its probes."""

import asyncio
import re
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click
import msgspec
from msgspec import Struct

from gateway.config.dialects import Dialects, mismatch
from gateway.conformance.setting import Setting
from gateway.core.ports import WorkerDialect
from protocols import DIALECTS

if TYPE_CHECKING:
    from gateway.conformance.cases import Case
    from gateway.conformance.worker.line import Whom
    from gateway.conformance.worker.probing import Found, Probe

Outcome = Literal["passed", "failed", "not applicable"]

_PATIENCE = 10.0
"""Seconds in which something of an answer must come."""
_WIDEST = 60
_ANYTHING = re.compile(r"https?://[^/?#]+[^?#]*")
_WORDS = {"true": True, "false": False}
_SECONDS = click.FloatRange(0.1, 86_400)
_OF_WORKERS = ("model", "embedder", "fields", "ca", "prompts", "write")


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
@click.option(
    "--key",
    envvar="INTERLINGUA_KEY",
    help="The key that is shown; better said in INTERLINGUA_KEY.  [default: sk-test to a gateway]",
)
@click.option(
    "--key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file that holds the key.",
)
@click.option(
    "--only", multiple=True, metavar="ID", help="Only the cases of this number, or this probe."
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.option("--worker", is_flag=True, help="URL is a worker: probe it, whatever it is.")
@click.option("--model", help="With --worker: its model of texts.")
@click.option("--embedder", help="With --worker: its model of embeddings.")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME=OWN",
    help="With --worker: its own name for a field, as in a pool's `fields`.",
)
@click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False),
    help="With --worker: who has signed its certificate, in PEM.",
)
@click.option("--prompts", is_flag=True, help="With --worker: ask by prompts, not conversations.")
@click.option(
    "--timeout", type=_SECONDS, default=30.0, show_default=True, help="Seconds for a probe."
)
@click.option(
    "--total", type=_SECONDS, default=900.0, show_default=True, help="Seconds for all probes."
)
@click.option(
    "--write",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --worker: save what it does not support, as a pool's `unsupported_parameters`.",
)
def conform(url: str, *, dialect: str, worker: bool, **stated: Any) -> None:
    """Play a dialect's conformance cases against the gateway at URL; or probe the worker there.

    The gateway must serve the models that the cases ask for: `interlingua serve conformance` does,
    and its file (gateway/defaults/conformance.yaml) says where it has which setting. A case that
    the gateway's setting can't meet is told as not applicable.

    With --worker, URL is the base of any worker that speaks the dialect, as in a pool's `workers`.
    Name the model that it is to be asked for. What the dialect can't carry is told as not offered.

    Exit codes: 0 everything passed, 1 some failed, 2 wrong usage, unreachable, or nothing to try.
    """
    if not _ANYTHING.fullmatch(url):
        raise click.BadParameter(f"{url} is no URL such as http://127.0.0.1:8000")
    if (file := stated.pop("key_file")) is not None:
        stated["key"] = file.read_text("utf-8").strip()
    if worker:
        _probe(url.rstrip("/"), dialect, stated)
    elif of_workers := [name for name in _OF_WORKERS if stated.pop(name)]:
        raise click.UsageError(f"--{of_workers[0]} goes with --worker")
    else:
        del stated["timeout"], stated["total"]
        _play(url, dialect, **stated)


def _play(
    url: str, dialect: str, *, key: str | None, only: Sequence[str], as_json: bool, **stated: Any
) -> None:
    """The cases of a gateway."""
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
        raise click.UsageError(f"there are no cases of {dialect}; --worker probes one") from None
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


# --- workers --------------------------------------------------------------------------------------


def _probe(url: str, name: str, stated: dict[str, Any]) -> None:
    """Probe the worker, tell of it, and save what is to be saved."""
    from gateway.conformance.worker import found  # noqa: PLC0415 - brings httpx with it
    from gateway.conformance.worker.line import Whom  # noqa: PLC0415 - as above

    if stated["alone"]:
        raise click.UsageError("--alone is for gateways; a worker speaks one dialect")
    if not stated["model"] and not stated["embedder"]:
        raise click.UsageError("name the worker's model: --model NAME, or --embedder NAME")
    profile, options = stated["profile"], stated["options"]
    known = Dialects(DIALECTS)
    setting = _setting(known, name, profile=profile, options=options, alone=False)
    dialect = _spoken(known, name, profile, dict(setting.options), stated["fields"])
    probes = _probes(stated["only"])
    width = max(len(one.name) for one in probes)
    way: Literal["chat", "prompt"] = "prompt" if stated["prompts"] else "chat"
    whom = Whom(url, stated["model"], stated["embedder"], stated["key"], way)
    times = {"seconds": stated["timeout"], "total": stated["total"]}
    seen: list[Found] = []

    async def run() -> None:
        async for one in _found(probes, dialect, whom, times, stated["ca"]):
            seen.append(one)
            if not stated["as_json"]:
                click.echo(found.row(one, width))

    asyncio.run(run())
    worker = found.Worker(url, name, profile or setting.profiles[0], whom.model)
    if stated["write"] is not None:
        stated["write"].write_text(found.unsupported_parameters(worker, seen), "utf-8")
    found.conclude(worker, seen, click.echo, as_json=stated["as_json"])


def _spoken(
    known: Dialects, name: str, profile: str | None, options: dict[str, Any], fields: Sequence[str]
) -> WorkerDialect:
    """The dialect as a pool would have it. Raises BadParameter."""
    if fields:
        if not known.takes(name, "fields"):
            raise click.BadParameter(f"{name} has no use for --field")
        options["fields"] = dict(one.partition("=")[::2] for one in fields)
    try:
        return cast("WorkerDialect", known.make(name, profile, options))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _probes(only: Sequence[str]) -> Sequence["Probe"]:
    """Those to run. Raises UsageError."""
    from gateway.conformance.worker.probes import PROBES  # noqa: PLC0415 - as above

    names = [one.name for one in PROBES]
    if unknown := [one for one in only if one not in names]:
        raise click.UsageError(f"there is no probe {unknown[0]}; there are {_list(names)}")
    return [one for one in PROBES if not only or one.name in only]


async def _found(
    probes: Sequence["Probe"],
    dialect: WorkerDialect,
    whom: "Whom",
    times: dict[str, float],
    ca: str | None,
) -> AsyncIterator["Found"]:
    """What each probe finds. Ends the command where nobody listens."""
    import httpx  # noqa: PLC0415 - no other verb needs it

    from gateway.conformance.worker.line import Line, Unreachable  # noqa: PLC0415 - as above
    from gateway.conformance.worker.probing import probed  # noqa: PLC0415 - as above

    patience = httpx.Timeout(None, connect=_PATIENCE)
    tls = ssl.create_default_context(cafile=ca)
    async with httpx.AsyncClient(timeout=patience, trust_env=False, verify=tls) as http:
        try:
            async for one in probed(probes, Line(http, dialect, whom), **times):
                yield one
        except Unreachable as error:
            click.echo(f"interlingua can't reach {whom.url}: {error}", err=True)
            sys.exit(2)
