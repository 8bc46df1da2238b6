"""``python -m tests.bench`` measures CPU time and memory of gateways on this machine."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import msgspec

from tests.bench import micro, plots, profiles, report, results, runner
from tests.bench.gateways import OPENAI
from tests.bench.interlingua import (
    ALL_FEATURES,
    BARE_SERVER,
    DIRECT,
    INTERLINGUA,
    MANY_MODELS_AND_KEYS,
    at_revision,
)
from tests.bench.loads import FULL, QUICK, UNARY, Load
from tests.bench.peers import ENVIRONMENTS, NGINX, PEERS

_PEERS = {peer.name: peer for peer in PEERS}


@click.group()
def main() -> None:
    """Measure, compare, and show results."""


@main.command()
@click.option("--quick", is_flag=True, help="Only the loads of the goals, in a few minutes.")
@click.option("--only", "names", multiple=True, help="Only loads whose name contains this text.")
@click.option("--peers", help="Names separated by commas; default: all, and with --quick nginx.")
@click.option("--against", metavar="REV", help="Compare the CPU time with that of a git revision.")
@click.option("--rounds", type=click.IntRange(1, 9), help="3; with --quick 2, with --against 4.")
@click.option("--memory/--no-memory", default=None, help="5,000 open streams; not with --quick.")
@click.option("--scaling/--no-scaling", default=None, help="Two processes; not with --quick.")
@click.option("--minutes", type=click.IntRange(1, 60), default=45, show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Where to write the results.")
def run(
    *,
    names: tuple[str, ...],
    peers: str | None,
    against: str | None,
    rounds: int | None,
    minutes: int,
    out: Path | None,
    quick: bool,
    memory: bool | None,
    scaling: bool | None,
) -> None:
    """Measure the gateway and its peers."""
    chosen = peers.split(",") if peers else [NGINX.name] if quick or names else list(_PEERS)
    if unknown := [name for name in chosen if name not in _PEERS]:
        raise click.UsageError(f"--peers: there is no {unknown[0]}; there are {', '.join(_PEERS)}")
    loads = _choose_loads(QUICK if quick else FULL, names)
    short = quick or bool(names)
    others = [_PEERS[name] for name in chosen if name != NGINX.name]
    baseline = [NGINX] if NGINX.name in chosen else []
    extra_scenarios = [] if quick else [MANY_MODELS_AND_KEYS]
    with _report_failure(), ExitStack() as stack:
        older = [stack.enter_context(at_revision(against))] if against else []
        own = [INTERLINGUA, *older, ALL_FEATURES, *extra_scenarios]
        plan = runner.Plan(
            gateways=[*baseline, BARE_SERVER, DIRECT, *own, *others],
            loads=loads,
            rounds=rounds or (4 if against else 2 if quick else 3),
            seconds=minutes * 60,
            group_size=9 if quick else 4,
            attempts=1 if quick else 2,
            open_streams=[*baseline, INTERLINGUA] if _is_on(memory, default=not short) else [],
            scaling=_is_on(scaling, default=not short),
            against=older[0].name if older else "",
        )
        results = runner.run(plan, click.echo)
    if not names:
        steps = micro.measure_steps(0.01 if quick else 0.1)
        results = msgspec.structs.replace(results, steps=steps)
    if out is not None:
        out.parent.mkdir(exist_ok=True)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    click.echo(report.render_report(results))
    sys.exit(report.count_errors(results))


def _is_on(choice: bool | None, *, default: bool) -> bool:
    return default if choice is None else choice


def _choose_loads(loads: Sequence[Load], names: Sequence[str]) -> Sequence[Load]:
    """Return the loads whose names contain one of the texts, of the full list."""
    if not names:
        return loads
    chosen = [load for load in FULL if any(name.lower() in load.name.lower() for name in names)]
    if not chosen:
        load_names = "\n  ".join(load.name for load in FULL)
        raise click.UsageError(f"--only: no load has this in its name; there are:\n  {load_names}")
    return chosen


@main.command()
@click.argument("old", type=click.Path(exists=True, path_type=Path))
@click.argument("new", type=click.Path(exists=True, path_type=Path))
def compare(old: Path, new: Path) -> None:
    """Show how the ratios to the baseline changed; exits with 1 if one is clearly worse."""
    lines, worse = report.compare_results(_read(old), _read(new))
    click.echo("\n".join(lines))
    sys.exit(int(worse))


@main.command()
@click.argument("out", type=click.Path(exists=True, path_type=Path))
@click.option("--into", type=click.Path(exists=True, path_type=Path), help="A page to write to.")
def table(out: Path, into: Path | None) -> None:
    """Show results; with --into, replace those of a page and the plots beside it."""
    results = _read(out)
    text = report.render_report(results)
    if into is None:
        click.echo(text)
        return
    into.write_text(report.replace_results(into.read_text("utf-8"), text), "utf-8")
    for name, svg in plots.render_plots(results).items():
        folder = into.parent / plots.FOLDER
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(svg, "utf-8")


@main.command()
@click.argument("load", type=click.Choice([one.name for one in FULL]), default=UNARY.name)
@click.option(
    "--pair", type=click.Choice([one.name for one in INTERLINGUA.pairs]), default=OPENAI.name
)
@click.option("--seconds", type=click.IntRange(1, 60), default=5, show_default=True)
def profile(load: str, pair: str, seconds: int) -> None:
    """Show in which functions the gateway spends its time under a load."""
    [chosen_load] = [one for one in FULL if one.name == load]
    [chosen_pair] = [one for one in INTERLINGUA.pairs if one.name == pair]
    longer = msgspec.structs.replace(
        chosen_load, seconds=float(seconds), count=chosen_load.count * 60
    )  # the maximum
    with _report_failure():
        lines = profiles.format_profile(profiles.record_profile(longer, chosen_pair))
    click.echo("\n".join(lines))


@main.command()
@click.argument("names", nargs=-1)
def install(names: tuple[str, ...]) -> None:
    """Install peers that are not installed, each in a folder of its own; without NAMES all."""
    for environment in ENVIRONMENTS:
        if environment.is_installed or (names and environment.name not in names):
            continue
        click.echo(f"{environment.name}: {', '.join(environment.packages)}")
        try:
            environment.install()
        except FileNotFoundError as error:
            click.echo(f"  left out: {error}")
        except subprocess.CalledProcessError as error:
            lines = str(error.output or "").strip().splitlines() or [str(error)]
            click.echo(f"  left out: {lines[-1]}")


@contextmanager
def _report_failure() -> Iterator[None]:
    """Print an error of a run in one line."""
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
