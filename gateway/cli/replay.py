"""``interlingua replay``: send recorded requests to another version, worker or configuration."""

import asyncio
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct

from gateway.cli.built_in import is_url
from gateway.cli.option_types import SENT_KEY, NumberRange
from gateway.config.errors import ConfigError
from gateway.config.loader import load_config
from gateway.terminal import print_text
from protocols import PROTOCOLS
from protocols.core.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gateway.observability.recording import RecordingReader
    from gateway.tools.replay.runner import Pace, Replay, ReplayProgress, ReplaySide
    from gateway.tools.replay.selection import Estimate, Sampling, Selection
    from gateway.tools.replay.target import ReplayTarget

_INTERRUPTED: Final = 130
_PLAIN_REPORTS: Final = 10
"""Progress lines where there is no terminal."""
_PACED_CONCURRENCY: Final = 256


class _Options(Struct, frozen=True):
    """The options of the command."""

    recordings: str
    to: tuple[str, ...]
    control: str | None
    config: str | None
    model: str | None
    protocol: str
    profile: str | None
    worker_key: str | None
    out: str | None
    concurrency: int | None
    pace: "Pace"
    limit: int | None
    sample: "Sampling"
    seed: int
    max_tokens: int | None
    prices: tuple[float, float] | None
    max_cost: float | None
    yes: bool


@click.command()
@click.argument("recordings", type=click.Path(exists=True))
@click.option(
    "--to",
    metavar="TARGET",
    multiple=True,
    help="MODEL or MODEL@VERSION of --config, or a worker's URL; by default --config routes. "
    "Twice: each request goes to both, one right after the other in random order.",
)
@click.option(
    "--control",
    type=click.Choice(["recorded"]),
    help="Also send each request to the version of --config that was recorded, as the first of two "
    "targets.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="The configuration of the gateway that answers.",
)
@click.option(
    "--model", metavar="NAME", help="The worker's name for the model; by default the recorded one."
)
@click.option(
    "--protocol",
    type=click.Choice(tuple(PROTOCOLS)),
    default="openai",
    show_default=True,
    help="The worker's protocol.",
)
@click.option("--profile", help="The worker's profile, such as vllm; by default the first.")
@click.option(
    "--worker-key",
    type=SENT_KEY,
    envvar="INTERLINGUA_WORKER_KEY",
    help="The worker's API key; prefer the environment variable INTERLINGUA_WORKER_KEY.",
)
@click.option(
    "--out",
    metavar="FOLDER",
    help="Where results are written; by default RECORDINGS-replay. A second run with the same "
    "folder sends what is missing there.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 10_000),
    help="Requests at a time; by default 8, or 256 with --pace recorded.",
)
@click.option(
    "--pace",
    type=click.Choice(["fast", "recorded"]),
    default="fast",
    show_default=True,
    help="As fast as --concurrency allows, or at the times at which they were recorded.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Send at most N requests.")
@click.option(
    "--sample",
    type=click.Choice(["first", "random", "stratified"]),
    default="first",
    show_default=True,
    help="Which requests --limit chooses. Stratified: of each model, version, protocol, operation "
    "and outcome by its share, and at least one.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Makes a sample repeatable.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Stop before the requests are expected to take more tokens.",
)
@click.option(
    "--prices",
    type=(NumberRange(0), NumberRange(0)),
    metavar="PROMPT COMPLETION",
    help="The prices of a million tokens, to estimate the cost.",
)
@click.option(
    "--max-cost",
    type=NumberRange(0, min_open=True),
    metavar="AMOUNT",
    help="Stop before the requests are expected to cost more; needs --prices.",
)
@click.option("--yes", is_flag=True, help="Do not ask before requests are sent.")
def replay(**arguments: Any) -> None:
    """Send recorded requests again, to another version, worker or configuration.

    \b
      interlingua replay recordings/ --config gateway.yaml --to chat@2
      interlingua replay recordings/ --config gateway.yaml --to chat@1 --to chat@2
      interlingua replay recordings/ --to http://127.0.0.1:8001 --model llama3.1 --limit 200
      interlingua replay recordings/ --config new.yaml --pace recorded

    RECORDINGS is a folder or file that a gateway with `record` wrote. A gateway of this command
    answers the requests on a loopback address: without rate limits and shadow traffic, and with
    --to also without splits, routes and fallbacks. The results are a recording, too; compare both
    with interlingua compare. No tool that a model calls is executed.

    With two targets the results are in the folders a and b of --out, and their times can be
    compared, since both answered at the same time: interlingua compare OUT.

    Ctrl-C stops and keeps the results so far.

    Exit codes: 0 all requests were sent, 1 the gateway could not start, or requests reached no
    worker, 2 wrong usage, 130 stopped.
    """  # noqa: D301 - click reads \b
    from gateway.tools.replay.runner import Replay  # noqa: PLC0415 - only here

    options = _Options(**arguments)
    _check_options(options)
    folder = Path(options.out or f"{options.recordings.rstrip('/')}-replay")
    sides, selection, estimate = _prepare(options, folder)
    names = " and ".join(side.target.name for side in sides) or "no target"
    _print_plan(selection, estimate, names, folder, len(sides))
    if not selection.requests:
        print_text("There is nothing to send.")
        return
    if sys.stdin.isatty() and not options.yes:
        click.confirm("Send them?", abort=True)
    with _show_progress(len(selection.requests) * len(sides)) as report:
        run = Replay(
            sides,
            selection.requests,
            concurrency=options.concurrency
            or (_PACED_CONCURRENCY if options.pace == "recorded" else 8),
            pace=options.pace,
            report=report,
            seed=options.seed,
        )
        try:
            asyncio.run(_run(run))
        except (OSError, WorkerError) as error:
            raise click.ClickException(f"the gateway can't start: {error}") from None
    _print_result(run.progress, folder)
    sys.exit(_INTERRUPTED if run.progress.is_interrupted else int(run.progress.not_sent > 0))


_MAX_TARGETS: Final = 2


def _check_options(options: _Options) -> None:
    workers = [is_url(target) for target in options.to]
    needs_config = options.control is not None or not workers or not all(workers)
    if options.config is None and needs_config:
        raise click.UsageError("--config FILE is needed, or --to with the URL of a worker")
    if options.config is not None and not needs_config:
        raise click.UsageError("--config can't be used with the URL of a worker")
    if options.model is not None and not any(workers):
        raise click.UsageError("--model is only for --to with the URL of a worker")
    if len(workers) + (options.control is not None) > _MAX_TARGETS:
        raise click.UsageError("at most two targets: --to twice, or once with --control")
    if options.control is not None and not workers:
        raise click.UsageError("--control needs --to: the target that it is compared with")
    if options.max_cost is not None and options.prices is None:
        raise click.UsageError("--max-cost needs --prices")


async def _run(run: "Replay") -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, run.interrupt)
    loop.add_signal_handler(signal.SIGTERM, run.interrupt)
    await run.run()


def _prepare(options: _Options, folder: Path) -> "tuple[list[ReplaySide], Selection, Estimate]":
    """What is sent, and to which targets."""
    from gateway.tools.replay.runner import ReplaySide, prepare_folder  # noqa: PLC0415 - only here

    count = len(options.to) + (options.control is not None)
    folders = [folder / side for side in "ab"] if count > 1 else [folder]
    try:
        done = frozenset[str].intersection(*map(prepare_folder, folders))
        selection, estimate, models = _select(options, done)
        targets = _list_targets(options, selection)
        sides = [
            ReplaySide(_build_target(options, target, models, place), place)
            for target, place in zip(targets, folders, strict=bool(targets))
        ]
    except OSError as error:
        raise click.UsageError(f"{error.filename}: {error.strerror}") from None
    return sides, selection, estimate


def _select(
    options: _Options, done: frozenset[str]
) -> "tuple[Selection, Estimate, frozenset[str]]":
    """The requests to send, what they may take, and the names of the recorded models."""
    from gateway.observability.recording import read_recordings  # noqa: PLC0415 - only here
    from gateway.tools.replay.selection import (  # noqa: PLC0415 - as above
        Prices,
        ReplayBudget,
        apply_budget,
        select_requests,
    )

    reader: RecordingReader = read_recordings(options.recordings)
    selection = select_requests(
        reader, limit=options.limit, sampling=options.sample, seed=options.seed, done=done
    )
    if reader.skipped_lines:
        print_text(f"damaged lines that are left out: {reader.skipped_lines}", err=True)
    prices = None if options.prices is None else Prices(*options.prices)
    budget = ReplayBudget(options.max_tokens, options.max_cost, prices)
    estimate = apply_budget(selection, budget)
    models = frozenset(recorded.model for recorded in selection.requests if recorded.model)
    return selection, estimate, models


def _list_targets(options: _Options, selection: "Selection") -> list[str | None]:
    """The targets; None routes as --config says. None at all if no recorded one is known."""
    if options.control is None:
        return [*options.to] or [None]
    if not selection.requests:
        return []
    recorded = {(one.model, one.version) for one in selection.requests if one.version}
    if len(recorded) > 1:
        listed = ", ".join(sorted(f"{model}@{version}" for model, version in recorded))
        raise click.UsageError(f"--control recorded: several versions were recorded ({listed})")
    return [*(f"{model}@{version}" for model, version in recorded or {("", "")}), *options.to]


def _build_target(
    options: _Options, target: str | None, models: frozenset[str], folder: Path
) -> "ReplayTarget":
    """Raises OSError."""
    from gateway.tools.replay.runner import INCOMING  # noqa: PLC0415 - only here
    from gateway.tools.replay.target import (  # noqa: PLC0415 - as above
        TargetError,
        WorkerOptions,
        build_config_target,
        build_worker_target,
    )

    incoming = str(folder / INCOMING)
    try:
        if target is not None and is_url(target):
            worker = WorkerOptions(
                target,
                options.protocol,
                options.model,
                options.worker_key,
                options.profile,
            )
            return build_worker_target(worker, models, incoming)
        assert options.config is not None  # noqa: S101 - checked before
        config = load_config(options.config, env=os.environ, insecure=True)
        return build_config_target(config, options.config, target, models, incoming)
    except (ConfigError, TargetError) as error:
        raise click.UsageError(str(error)) from None


def _print_plan(
    selection: "Selection", estimate: "Estimate", target: str, folder: Path, targets: int
) -> None:
    print_text(
        f"{len(selection.requests):,} of {selection.total:,} recorded requests go to {target}; "
        f"results are written to {folder}"
    )
    for count, text in (
        (selection.already_done, "have a result there already"),
        (selection.without_body, "have no recorded body"),
        (selection.with_same_id, "have the id of another one"),
        (selection.over_budget, "are beyond the limit of tokens or cost"),
        (selection.with_redacted_text, "of those to send are redacted"),
    ):
        if count:
            print_text(f"  {count:,} {text}")
    cost = "" if estimate.cost is None else f", at a cost of {estimate.cost:,.2f}"
    each = " for each target" if targets > 1 else ""
    print_text(
        f"  about {estimate.prompt_tokens:,} prompt tokens and {estimate.completion_tokens:,} "
        f"completion tokens{each}, as they were recorded{cost}"
    )


def _print_result(progress: "ReplayProgress", folder: Path) -> None:
    stopped = "stopped: " if progress.is_interrupted else ""
    print_text(
        f"{stopped}{progress.sent:,} of {progress.total:,} requests were sent, "
        f"{progress.failed:,} of them failed; the results are in {folder}"
    )
    if progress.not_sent:
        print_text(
            f"  {progress.not_sent:,} could not be sent, since no worker was free or could be "
            "reached; the same command sends them again"
        )
    if progress.repeated:
        print_text(
            f"  {progress.repeated:,} were sent once more, one at a time, since the worker "
            "answered 429; only that result counts"
        )
    if progress.unsupported:
        print_text(
            f"  {progress.unsupported:,} were not sent: no listener of the configuration has "
            "their protocol"
        )


@contextmanager
def _show_progress(total: int) -> "Iterator[Callable[[ReplayProgress], None]]":
    """A bar on a terminal, and some lines elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console  # noqa: PLC0415 - only for a terminal
        from rich.progress import Progress  # noqa: PLC0415 - as above

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("replay", total=total)
            yield lambda progress: bar.update(task, completed=progress.sent)
    else:
        step = max(total // _PLAIN_REPORTS, 1)

        def report(progress: "ReplayProgress") -> None:
            if progress.sent % step == 0:
                print_text(f"{progress.sent:,} of {total:,}", err=True)

        yield report
