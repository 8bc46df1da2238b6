"""The report has medians and spreads, and only ratios if the machine was noisy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.bench import micro, plots, report, runner
from tests.bench.__main__ import main
from tests.bench.gateways import Gateway
from tests.bench.interlingua import BARE_SERVER
from tests.bench.load_generator import Outcome
from tests.bench.load_generator import Spread as Times
from tests.bench.loads import (
    BODY_SIZES,
    FULL,
    LARGEST,
    QUICK,
    RATE,
    REPEATED_UNARY,
    STYLE_BURSTS,
    TLS,
    UNARY,
)
from tests.bench.peers import PEERS
from tests.bench.results import (
    OpenStreams,
    Results,
    Sample,
    ScalingSample,
    StartMeasurement,
    Step,
    format_number,
    read,
)

TIMES = Times(100.0, 150.0, 200.0, 250.0)
OWN = ["interlingua", "interlingua, all features"]
LARGE = ["interlingua, 1,000 models and keys"]
GOOD = Outcome(1000, 0, "", 1000, 32, 2.0, TIMES, None, None, TIMES)


def make_sample(gateway: str, cpu: float, *, round_: int = 1, load: str = "unary") -> Sample:
    unit = "token" if load == "paced" else "request"
    return Sample(gateway, "OpenAI to OpenAI", load, unit, round_, cpu, 20.0, True, GOOD)


def make_results(*cpus: float, other_load: float = 0.01) -> Results:
    """Make results of a gateway with these CPU times, one per round."""
    samples = [make_sample("nginx", 20.0)]
    samples += [make_sample("interlingua", cpu, round_=n) for n, cpu in enumerate(cpus, 1)]
    return Results(
        when="2026-01-02 03:04 UTC",
        machine="2 cores of something",
        revision="abc",
        other_load=other_load,
        baseline="nginx",
        versions={"nginx": "1.22", "interlingua": "0.1"},
        missing={"other": "not installed: ask | for it"},
        samples=samples,
        starts=[
            StartMeasurement("nginx", 1, 0.05, 6.0, 7.0),
            StartMeasurement("interlingua", 1, 0.4, 40.0, 44.0),
        ],
        open_streams=[OpenStreams("nginx", 5_000, 16.0), OpenStreams("interlingua", 4_990, 28.4)],
        steps=[Step("peek", 0.5, 0.4, 0.6), Step("more", 5.0, 4.0, 6.0)],
    )


def test_report_of_an_idle_machine_contains_absolute_numbers() -> None:
    text = report.render_report(make_results(40.0, 60.0, 50.0))
    assert (
        "| unary | default | OpenAI to OpenAI | 2.50 (2.00-3.00) | 50.0 (40.0-60.0) | 500"
        " | 100 / 200 | 0 |" in text
    )
    assert "Other load" not in text
    assert "Other processes used up to 1% of the machine" in text
    assert "| interlingua | 40.0 (40.0-40.0) | 44.0 (44.0-44.0) | 28.4 (4,990) | 0.40" in text
    assert "| nginx | 6.00 (6.00-6.00) | 7.00 (7.00-7.00) | 16.0 (5,000) |" in text
    assert "| peek | 0.50 (0.40-0.60) |" in text
    assert "| other | not installed: ask \\| for it |" in text


def test_report_of_a_noisy_machine_contains_only_ratios() -> None:
    text = report.render_report(make_results(40.0, 60.0, other_load=0.5))
    assert "**Other load on the machine.** Other processes used up to 50% of the machine" in text
    assert "| unary | default | OpenAI to OpenAI | 2.50 (2.00-3.00) | 0 |" in text
    assert "| interlingua | 40.0 (40.0-40.0) | 44.0 (44.0-44.0) | 28.4 (4,990) |\n" in text
    assert "| more | 10.0 |" in text

    moved = make_results(40.0)
    moved = replace(moved, samples=[replace(moved.samples[0], stable=False)])
    assert moved.noisy
    assert "around 1 of 1" in report.render_report(moved)


def test_report_compares_gateways_side_by_side() -> None:
    bad = replace(GOOD, errors=1)
    peer = replace(make_sample("envoy", 60.0), outcome=bad)
    results = make_results(40.0)

    text = report.render_report(replace(results, samples=[*results.samples, peer]))

    assert "| load | nginx | interlingua | envoy |" in text
    assert "| unary | 1.00 | 2.00 | 3.00\\* |" in text


def test_report_compares_varied_and_repeated_traffic() -> None:
    samples = [
        make_sample("interlingua", 80.0, load=UNARY.name),
        make_sample("interlingua", 40.0, load=REPEATED_UNARY.name),
    ]
    text = report.render_report(replace(make_results(), samples=samples))
    row = f"| {UNARY.name} | OpenAI to OpenAI | 4.00 (4.00-4.00) | 2.00 (2.00-2.00) | 2.00 |"

    assert row in text


def test_report_has_the_capacity_of_a_core() -> None:
    sample = make_sample("interlingua", 80.0, load=UNARY.name)
    results = replace(make_results(), samples=[sample])
    text = report.render_report(results)

    assert "| 80.0 µs | 12,000 requests/s | 8,800 requests/s |" in text
    assert "--processes 2" not in text

    shared = [
        ScalingSample(1, 100.0, 5_000.0, apart=False),
        ScalingSample(2, 104.0, 6_000.0, False),
    ]
    text = report.render_report(replace(results, scaling=shared))
    assert "two cores carry 1.92 times as much as one (computed from the CPU time" in text

    apart = [replace(one, apart=True) for one in shared]
    text = report.render_report(replace(results, scaling=apart))
    assert "two cores carry 1.20 times as much as one (measured with the clients" in text


def make_goal_results(*samples: Sample) -> Results:
    return replace(make_results(), samples=[*samples])


@pytest.mark.parametrize(
    ("cpu", "row"), [(60.0, "3.00 | goal"), (75.0, "3.75 | floor"), (90.0, "4.50 | missed")]
)
def test_goal_is_judged_by_its_limits(cpu: float, row: str) -> None:
    text = report.render_report(make_goal_results(make_sample("interlingua", cpu, load=UNARY.name)))
    name = "non-streaming, passed through, 32 clients"

    assert f"| {name} | 5.8 | 4.00 | 3.00 | {row} |" in text
    assert "tools and tool turns, passed through" not in text


def test_goal_with_several_measurements_is_judged_by_the_worst() -> None:
    cpus = (20.0, 50.0, 30.0)
    samples = [
        make_sample("interlingua", cpu, load=load.name)
        for cpu, load in zip(cpus, STYLE_BURSTS, strict=False)
    ]

    text = report.render_report(make_goal_results(*samples))

    assert "| 2.3 to 11.8 | 3.00 | 2.00 | 1.00 to 2.50 | floor |" in text


def test_added_latency_is_relative_to_no_gateway() -> None:
    def time(gateway: str, p99: float) -> Sample:
        sample = make_sample(gateway, 40.0, load=RATE.name)
        return replace(sample, outcome=replace(GOOD, latency=replace(TIMES, p99=p99)))

    results = make_goal_results(
        time("no gateway", 1_000), time("nginx", 1_340), time("interlingua", 1_700)
    )
    text = report.render_report(results)

    assert (
        "| p99 added at 200 requests/s, ms (nginx 0.34) | 0.9 | 0.80 | 0.60 | 0.70 | floor |"
        in text
    )


def test_memory_and_processes_are_judged() -> None:
    scaling = [ScalingSample(1, 100.0, 1.0, apart=False), ScalingSample(2, 101.0, 1.0, apart=False)]
    text = report.render_report(replace(make_results(40.0), scaling=scaling))

    assert "kB (nginx 16.0) | 28 to 36 |  | 20.0 | 28.4 | missed |" in text
    assert (
        "| two processes, requests per second of one = 1 | 1.93 | 1.93 |  | 1.98 | goal |" in text
    )


def test_plots_show_each_gateway_on_the_page(tmp_path: Path) -> None:
    samples = [
        make_sample(gateway, cpu * (1 + place), load=load.name)
        for gateway, cpu in (("nginx", 20.0), ("interlingua", 80.0), ("litellm", 9_000.0))
        for place, load in enumerate(BODY_SIZES)
    ]
    results = make_goal_results(*samples)
    assert [*plots.render_plots(results)] == ["performance-body-size.svg"]

    file, page = tmp_path / "results.json", tmp_path / "page.md"
    file.write_bytes(msgspec.json.encode(results))
    page.write_text("Text.\n")

    assert CliRunner().invoke(main, ["table", str(file), "--into", str(page)]).exit_code == 0
    assert "](images/performance-body-size.svg)" in page.read_text()

    svg = (tmp_path / "images" / "performance-body-size.svg").read_text()
    root = ET.fromstring(svg)  # noqa: S314 - our own
    space = "{http://www.w3.org/2000/svg}"

    assert len(root.findall(f"{space}polyline")) == 2
    assert len(root.findall(f"{space}circle")) == 2 * len(BODY_SIZES)

    words = {one.text for one in root.iter(f"{space}text")}
    assert {"nginx", "interlingua", "1k", "10M", "µs"} <= words
    assert "prefers-color-scheme: dark" in svg


def test_plot_labels_do_not_overlap() -> None:
    lines = [plots.Line(name, [(1, 10.0), (10, 10.0)]) for name in ("a", "b", "c")]
    root = ET.fromstring(plots.render_plot(plots.PLOTS[0], lines))  # noqa: S314 - our own
    labels = [one for one in root.iter() if one.text in {"a", "b", "c"}]

    places = [float(one.attrib["y"]) for one in labels]

    assert len({*places}) == 3
    assert places[-1] - places[0] >= 30


def test_revisions_are_compared_round_by_round() -> None:
    older = [
        make_sample("revision 1", cpu, round_=n) for n, cpu in enumerate((40.0, 40.0, 50.0), 1)
    ]
    results = make_results(44.0, 60.0, 50.0)
    results = replace(results, samples=[*results.samples, *older], against="revision 1")

    text = report.render_report(results)

    assert "### Compared with revision 1" in text
    assert "| unary | OpenAI to OpenAI | 3 | 1.10 (1.00-1.50) |" in text
    assert "### Compared" not in report.render_report(make_results(40.0))
    assert results.ratio_to("revision 2", make_sample("interlingua", 1.0).key) is None


def test_errors_of_the_compared_revision_do_not_fail_the_run() -> None:
    wrong = replace(GOOD, errors=1)
    for gateway, code in (("interlingua", 1), ("revision 1", 0)):
        samples = [replace(make_sample(gateway, 40.0), outcome=wrong)]
        assert report.count_errors(replace(make_results(), samples=samples)) == code


def test_report_omits_sections_without_measurements() -> None:
    text = report.render_report(replace(make_results(40.0), steps=[], missing={}))
    assert "Single steps" not in text
    assert "Not measured" not in text

    alone = replace(make_sample("interlingua", 3.0, load="paced"), baseline_cpu=None)
    assert (
        "| paced | default | OpenAI to OpenAI | - | 3.00 (3.00-3.00) | 500 | 100 / 200 | 0 |"
        in (report.render_report(replace(make_results(), samples=[alone])))
    )


def test_only_errors_of_this_gateway_fail_a_run() -> None:
    bad = replace(GOOD, errors=1, last_error="time is up")
    run = make_results(40.0)
    assert report.count_errors(run) == 0

    peers = [replace(one, outcome=bad) for one in run.samples if one.gateway == "nginx"]
    assert report.count_errors(replace(run, samples=peers)) == 0
    assert report.count_errors(replace(run, samples=[replace(run.samples[-1], outcome=bad)])) == 1


@pytest.mark.parametrize(
    ("old", "new", "worse", "expected_line"),
    [
        ((40.0, 42.0), (50.0, 52.0), True, "+24%  WORSE"),
        ((40.0, 60.0), (50.0, 62.0), False, "+12%"),
        ((40.0, 42.0), (42.5, 43.0), False, "+4%"),
        ((50.0, 52.0), (40.0, 42.0), False, "-20%  better"),
    ],
)
def test_result_is_worse_only_beyond_the_spread(
    old: tuple[float, ...], new: tuple[float, ...], *, worse: bool, expected_line: str
) -> None:
    lines, regressions = report.compare_results(make_results(*old), make_results(*new))
    assert regressions == worse
    assert lines[1].endswith(expected_line)
    assert len(lines) == 2


def test_change_within_the_baseline_noise_is_not_worse() -> None:
    old, new = make_results(40.0, 42.0), make_results(50.0, 52.0)
    shaky = replace(new, samples=[make_sample("nginx", 26.0, round_=2), *new.samples])

    assert report.compare_results(old, new)[1]

    for pair in ((old, shaky), (replace(old, samples=[*shaky.samples[:2], *old.samples]), new)):
        lines, worse = report.compare_results(*pair)
        assert not worse
        assert not any(line.endswith("WORSE") for line in lines)


def test_results_with_different_baselines_are_not_comparable() -> None:
    lines, worse = report.compare_results(
        make_results(40.0), replace(make_results(40.0), baseline="echo")
    )
    assert worse
    assert lines == ["not comparable: measured by nginx and by echo"]
    assert report.compare_results(replace(make_results(), samples=[]), make_results(40.0)) == (
        [],
        False,
    )

    peer = replace(make_results(40.0), samples=[make_sample("haproxy", 20.0)])
    slower = replace(peer, samples=[make_sample("haproxy", 90.0)])
    lines, worse = report.compare_results(peer, slower)

    assert lines[0].endswith("WORSE")
    assert not worse


def test_results_are_read_and_compared_from_files(tmp_path: Path) -> None:
    old, new, page = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "page.md"
    old.write_bytes(msgspec.json.encode(make_results(40.0)))
    new.write_bytes(msgspec.json.encode(make_results(80.0)))

    assert read(new) == make_results(80.0)

    invoke = CliRunner().invoke
    assert (
        invoke(main, ["table", str(old)]).output.strip()
        == report.render_report(make_results(40.0)).strip()
    )
    assert invoke(main, ["compare", str(old), str(new)]).exit_code == 1
    assert invoke(main, ["compare", str(old), str(old)]).exit_code == 0

    page.write_text("How it is done.\n")
    for file in (old, new):
        assert invoke(main, ["table", str(file), "--into", str(page)]).exit_code == 0
    assert (
        page.read_text()
        == f"How it is done.\n{report.MARK}\n\n{report.render_report(make_results(80.0))}"
    )


def test_unknown_peer_is_rejected() -> None:
    result = CliRunner().invoke(main, ["run", "--peers", "nginx,caddy"])
    assert result.exit_code == 2
    assert "there is no caddy; there are nginx, haproxy" in result.output


@pytest.mark.parametrize(
    ("words", "gateways", "rounds", "all_loads"),
    [
        (["--quick"], ["nginx", "bare server", "no gateway", *OWN], 2, False),
        (["--quick", "--peers", "envoy"], ["bare server", "no gateway", *OWN, "envoy"], 2, False),
        (
            ["--quick", "--against", "1"],
            ["nginx", "bare server", "no gateway", OWN[0], "revision 1", OWN[1]],
            4,
            False,
        ),
        (
            ["--peers", "haproxy,nginx", "--rounds", "5"],
            ["nginx", "bare server", "no gateway", *OWN, *LARGE, "haproxy"],
            5,
            True,
        ),
    ],
)
def test_command_line_options_set_the_benchmark_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    gateways: list[str],
    rounds: int,
    *,
    all_loads: bool,
) -> None:
    plans: list[runner.Plan] = []

    def run(plan: runner.Plan, log: runner.Log) -> Results:
        plans.append(plan)
        log("round 1")
        return make_results(40.0)

    @contextmanager
    def at_revision(revision: str) -> Iterator[Gateway]:
        yield replace(BARE_SERVER, name=f"revision {revision}")

    monkeypatch.setattr("tests.bench.__main__.at_revision", at_revision)
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(micro, "measure_steps", lambda seconds: [Step("peek", seconds, 0.1, 0.2)])
    out = tmp_path / "out.json"
    result = CliRunner().invoke(main, ["run", "--json", str(out), *words])

    assert result.exit_code == 0
    assert result.output.startswith("round 1\n2026-01-02")

    [plan] = plans
    assert [one.name for one in plan.gateways] == gateways
    assert plan.against == ("revision 1" if "--against" in words else "")
    assert plan.rounds == rounds
    assert plan.loads == (FULL if all_loads else QUICK)
    assert [one.name for one in plan.open_streams] == ["nginx", "interlingua"] * all_loads
    assert plan.scaling == all_loads
    assert [step.name for step in read(out).steps] == ["peek"]


def test_single_loads_are_chosen_by_a_part_of_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[runner.Plan] = []

    def run(plan: runner.Plan, log: runner.Log) -> Results:
        del log
        plans.append(plan)
        return make_results(40.0)

    monkeypatch.setattr(runner, "run", run)
    result = CliRunner().invoke(main, ["run", "--only", "tls", "--only", "10 MB", "--memory"])
    assert result.exit_code == 0

    [plan] = plans
    assert [load.name for load in plan.loads] == [LARGEST.name, TLS.name]
    assert [one.name for one in plan.gateways if one in PEERS] == ["nginx"]
    assert len(plan.open_streams) == 2
    assert not plan.scaling

    result = CliRunner().invoke(main, ["run", "--only", "nothing"])
    assert result.exit_code == 2
    assert "--only: no load has this in its name" in result.output
    assert UNARY.name in result.output


@pytest.mark.parametrize(
    ("error", "message"),
    [(BlockingIOError(), "another run goes on"), (RuntimeError("no cc"), "no cc")],
)
def test_failed_run_reports_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def run(plan: runner.Plan, log: runner.Log) -> Results:
        raise error

    monkeypatch.setattr(runner, "run", run)
    result = CliRunner().invoke(main, ["run", "--quick"])

    assert result.exit_code == 1
    assert message in result.output


def test_file_without_results_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_text("{}")

    result = CliRunner().invoke(main, ["table", str(file)])

    assert result.exit_code == 1
    assert "holds no results" in result.output


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (100.0, "100"), (12.34, "12.3"), (1.234, "1.23")]
)
def test_numbers_are_rounded_to_significant_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_every_micro_benchmark_step_returns_its_result() -> None:
    done = {name: act() for name, act in micro.list_steps()}
    assert len(done) > 15
    assert b"brown" in str(done["encode an event, OpenAI"]).encode()
    assert b'"text_output":" brown"' in done["encode an event, Triton"]  # type: ignore[operator]
    assert done["authenticate a key"] is not None
    assert done["prepare a body for pass-through, 40 kB"] is not None


def test_micro_benchmark_steps_are_timed() -> None:
    steps = micro.measure_steps(0.001)
    assert all(0 < step.least <= step.cpu <= step.most for step in steps)
