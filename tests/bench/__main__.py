"""``python -m tests.bench``: what a gateway costs, beside others, on this machine."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import msgspec

from tests.bench import micro, profiles, report, results, runner
from tests.bench.gateways import OPENAI
from tests.bench.interlingua import (
    AIOHTTP_SERVER,
    BARE_SERVER,
    DIRECT,
    INTERLINGUA,
    TWO_PROCESSES,
    at_revision,
)
from tests.bench.load_generator import FULL, QUICK, WHOLE
from tests.bench.peers import ENVIRONMENTS, NGINX, PEERS

_HERE = {peer.name: peer for peer in PEERS}


@click.group()
def main() -> None:
    """Measure, compare, and show what was found."""


@main.command()
@click.option("--quick", is_flag=True, help="The loads that matter, in a few minutes.")
@click.option("--peers", help="Names with commas between; left out: all, and with --quick nginx.")
@click.option("--against", metavar="REV", help="Compare the CPU with that of this git revision.")
@click.option("--rounds", type=click.IntRange(1, 9), help="3; with --quick 2, --against 4.")
@click.option("--streams/--no-streams", default=None, help="A thousand of them; not with --quick.")
@click.option("--minutes", type=click.IntRange(1, 60), default=45, show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Where to keep the results.")
def run(
    peers: str | None,
    against: str | None,
    rounds: int | None,
    minutes: int,
    out: Path | None,
    *,
    quick: bool,
    streams: bool | None,
) -> None:
    """Measure the gateway and its peers."""
    names = peers.split(",") if peers else [NGINX.name] if quick else list(_HERE)
    if unknown := [name for name in names if name not in _HERE]:
        raise click.UsageError(f"--peers: there is no {unknown[0]}; there are {', '.join(_HERE)}")
    usual = 4 if against else 2 if quick else 3
    others = [_HERE[name] for name in names if name != NGINX.name]
    baseline = [NGINX] if NGINX.name in names else []
    more = [] if quick else [TWO_PROCESSES]
    with _report_failure(), ExitStack() as stack:
        older = [stack.enter_context(at_revision(against))] if against else []
        first = [*baseline, BARE_SERVER, *([] if quick else [DIRECT])]
        plan = runner.Plan(
            gateways=[*first, INTERLINGUA, *older, AIOHTTP_SERVER, *more, *others],
            loads=QUICK if quick else FULL,
            rounds=rounds or usual,
            seconds=minutes * 60,
            group=9 if quick else 3,
            tries=1 if quick else 2,
            streams=not quick if streams is None else streams,
            against=older[0].name if older else "",
        )
        found = runner.run(plan, click.echo)
    found = msgspec.structs.replace(found, steps=micro.measure_steps(0.01 if quick else 0.1))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    click.echo(report.render_report(found))
    sys.exit(report.count_errors(found))


@main.command()
@click.argument("old", type=click.Path(exists=True, path_type=Path))
@click.argument("new", type=click.Path(exists=True, path_type=Path))
def compare(old: Path, new: Path) -> None:
    """Tell what became of the ratios to the baseline; exits with 1 where one is clearly worse."""
    lines, worse = report.compare_results(_read(old), _read(new))
    click.echo("\n".join(lines))
    sys.exit(int(worse))


@main.command()
@click.argument("out", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--into", type=click.Path(exists=True, path_type=Path), help="A page to chosen_load it into."
)
def table(out: Path, into: Path | None) -> None:
    """Show results; with --into in the place of those that a page has."""
    text = report.render_report(_read(out))
    if into is None:
        click.echo(text)
    else:
        into.write_text(report.replace_results(into.read_text("utf-8"), text), "utf-8")


@main.command()
@click.argument("load", type=click.Choice([one.name for one in FULL]), default=WHOLE.name)
@click.option(
    "--pair", type=click.Choice([one.name for one in INTERLINGUA.pairs]), default=OPENAI.name
)
@click.option("--seconds", type=click.IntRange(1, 60), default=5, show_default=True)
def profile(load: str, pair: str, seconds: int) -> None:
    """Tell in which functions the gateway is under a load."""
    [chosen_load] = [one for one in FULL if one.name == load]
    [chosen_pair] = [one for one in INTERLINGUA.pairs if one.name == pair]
    longer = msgspec.structs.replace(
        chosen_load, seconds=float(seconds), count=chosen_load.count * 60
    )  # at most
    with _report_failure():
        lines = profiles.format_profile(profiles.record_profile(longer, chosen_pair))
    click.echo("\n".join(lines))


@main.command()
@click.argument("names", nargs=-1)
def install(names: tuple[str, ...]) -> None:
    """Install peers, each in a folder of its own; without NAMES all that are no system packages."""
    for environment in ENVIRONMENTS:
        if not names or environment.name in names:
            click.echo(f"{environment.name}: {', '.join(environment.packages)}")
            environment.install()


@contextmanager
def _report_failure() -> Iterator[None]:
    """What goes wrong with a run is told in a line."""
    try:
        yield
    except BlockingIOError:
        raise click.ClickException("another run goes on; they would measure each other") from None
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None


def _read(file: Path) -> results.Results:
    try:
        return results.read(file)
    except msgspec.MsgspecError as error:
        raise click.ClickException(f"{file} holds no results: {error}") from None


if __name__ == "__main__":
    main()
