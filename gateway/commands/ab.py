"""``interlingua ab``: do two arms of a split differ, and how sure is that?"""

import os
import re
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.commands.times import since
from gateway.config import ConfigError, read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.tools.ab import Asked, Comparison, Evidence

_URL = re.compile(r"https?://[^/?#]+([^?#]*)")
_PATIENCE: Final = 10.0
"""Seconds in which a page of metrics must come."""


class _Options(Struct, frozen=True):
    """The command's."""

    model: str
    a: str | None
    b: str | None
    split: str | None
    since: str | None
    confidence: float
    everything: bool
    config: str | None
    key: str | None
    as_json: bool


@click.command()
@click.argument("source")
@click.option("--model", required=True, help="The model, by its public name.")
@click.option("--a", metavar="VERSION", help="What is compared with; else the first of the two.")
@click.option("--b", metavar="VERSION", help="What is compared; else the other one.")
@click.option("--split", metavar="NAME", help="The split, where the model had several.")
@click.option(
    "--since", metavar="AGO|TIME", help="Of a log: since 30m, 24h or 7d ago, or since a time."
)
@click.option(
    "--confidence",
    type=click.FloatRange(50, 100, min_open=True, max_open=True),
    default=95.0,
    show_default=True,
    help="How often an interval holds the truth, in percent.",
)
@click.option("--all", "everything", is_flag=True, help="Also what no split sent to an arm.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="A configuration: check that the split sent as much to each arm as its weights say.",
)
@click.option(
    "--key",
    envvar="INTERLINGUA_ADMIN_KEY",
    help="The admin listener's key; better said in INTERLINGUA_ADMIN_KEY.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def ab(source: str, **stated: Any) -> None:
    """Compare two arms of a model's split.

    SOURCE is an access log (a file, or - for what is piped in), a page of metrics, or the URL of
    one, such as http://127.0.0.1:8081/metrics. A log tells every value, a page only its bucket.

    What a split sent to its arms is compared: who pins a version, or is sent by a rule, is no
    random sample. What another target answered in an arm's stead counts for the arm that it left,
    and for nothing else.

    Exit codes: 0 compared, 1 compared, but the arms' shares do not fit the weights of --config,
    2 wrong usage, a source that can't be read, or nothing to compare.
    """
    from gateway.tools.ab import Asked, Mismatch, apart, report  # noqa: PLC0415 - only here

    options = _Options(**stated)
    if options.everything and (options.split is not None or options.config is not None):
        raise click.UsageError("--all is not of one split; leave --split and --config out")
    asked = Asked(options.model, options.everything, since(options.since))
    seen = _seen(source, asked, options.key)
    try:
        found = _compared(seen, options)
    except Mismatch as mismatch:
        lines = (f"{options.model}: {mismatch}", *apart(seen, asked))
        raise click.UsageError("\n".join(lines)) from None
    told = report(source, asked, seen, found)
    click.echo(msgspec.json.encode(told) if options.as_json else told.text())
    sys.exit(1 if found.ratio is not None and not found.ratio.fits else 0)


def _compared(seen: "Evidence", options: _Options) -> "Comparison":
    """Raises Mismatch."""
    from gateway.tools.ab import Mismatch, choose, compare, ratio  # noqa: PLC0415 - as above

    if options.model not in seen.models:
        raise Mismatch(
            f"there is no such model; there is {', '.join(sorted(seen.models)) or 'none'}"
        )
    split, a, b = choose(seen, options.split, options.a, options.b)
    found = compare(seen, split, (a, b), options.confidence / 100)
    if options.config is None:
        return found
    name, weights = _weights(options.config, options.model)
    if name != split:
        raise Mismatch(f"{options.config} shares it out by the split {name!r}, not {split!r}")
    return replace(found, ratio=ratio(seen, split, weights))


def _seen(source: str, asked: "Asked", key: str | None) -> "Evidence":
    """What the source shows. Raises UsageError where it can't be read."""
    if _URL.fullmatch(source):
        return _read([_fetched(source, key)], asked)
    try:
        if source == "-":
            return _read(sys.stdin.buffer, asked)
        with Path(source).open("rb") as file:
            return _read(file, asked)
    except OSError as error:
        raise click.UsageError(f"{source} can't be read: {error.strerror}") from None


def _read(lines: Iterable[bytes], asked: "Asked") -> "Evidence":
    from gateway.tools.ab import Unreadable, is_page, read_log, read_page  # noqa: PLC0415

    rest = iter(lines)
    first = next(rest, b"")
    if not is_page(first):
        return read_log(chain([first], rest), asked)
    if asked.since:
        raise click.UsageError("--since goes with a log: a page counts from the gateway's start")
    try:
        return read_page(b"".join((first, *rest)).decode("utf-8", "replace"), asked)
    except Unreadable as error:
        raise click.UsageError(str(error)) from None


def _fetched(url: str, key: str | None) -> bytes:
    """The page at a URL. Raises UsageError."""
    import httpx  # noqa: PLC0415 - a file needs none

    match = _URL.fullmatch(url)
    page = url if match is not None and match[1].strip("/") else url.rstrip("/") + "/metrics"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(page, headers=headers, timeout=_PATIENCE)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise click.UsageError(f"{page} can't be read: {error}") from None
    if answer.status_code != httpx.codes.OK:
        raise click.UsageError(f"{page} answers {answer.status_code}, and no metrics")
    return answer.content


def _weights(file: str, model: str) -> tuple[str, "Mapping[str, int]"]:
    """The name of a model's split, and its weights. Raises UsageError."""
    try:
        config = read(file, env=os.environ, insecure=True)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    found = config.models.get(model)
    if found is None or found.split is None:
        raise click.UsageError(f"{file} has no split of the model {model!r}")
    return found.split.name or model, found.split.weights
