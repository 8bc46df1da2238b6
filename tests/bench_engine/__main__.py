"""``python -m tests.bench_engine run|table|perplexity|tools``: see docs/performance-engine.md."""

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from tests.bench_engine.peers import PEERS
from tests.bench_engine.perplexity import command as perplexity
from tests.bench_engine.running import Report
from tests.bench_engine.running import run as run_benchmark
from tests.bench_engine.table import format_tables, replace_tables
from tests.bench_engine.tool_loop import command as tools


@click.group()
def main() -> None:
    """The local engine beside others, by processor time over HTTP with as many threads each."""


@main.command()
@click.option("--peers", default=",".join(PEERS), help="Which, by their names.")
@click.option("--at", default="1,16", show_default=True, help="Requests at the same time.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--tokens", default=32, show_default=True, help="Of each answer.")
@click.option("--threads", default=1, show_default=True, help="Of each engine.")
@click.option("--json", "out", type=Path, default=Path(".bench/engine/run.json"))
def run(peers: str, at: str, rounds: int, tokens: int, *, threads: int, out: Path) -> None:
    """Measure, and save the results for ``table``."""
    names = peers.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise click.BadParameter(f"no such peer: {', '.join(unknown)}")
    report = run_benchmark(names, [int(size) for size in at.split(",")], rounds, tokens, threads)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    click.echo(f"kept in {out}")


@main.command()
@click.argument("figures", type=Path, nargs=-1, required=True)
@click.option("--page", type=Path, help="Renew the tables of this page, too.")
def table(figures: Sequence[Path], page: Path | None) -> None:
    """Show the results of runs."""
    reports = [msgspec.json.decode(one.read_bytes(), type=Report) for one in figures]
    click.echo("\n".join(map(format_tables, reports)))
    if page is not None:
        page.write_text(replace_tables(page.read_text(), reports))


main.add_command(perplexity)
main.add_command(tools)

if __name__ == "__main__":
    main()
