"""The attacks run, and their results can be read."""

from pathlib import Path

import pytest

from tests.attack.__main__ import _HEADER, ATTACKS, WITH_REDIS, format_row, main, run_attack
from tests.attack.measurement import Measurement


async def test_attack_is_measured_beside_another_client() -> None:
    result = await run_attack("references", "")

    assert (result.outcome, result.failed) == ("413", 0)
    assert result.requests > 0
    assert result.memory_peak - result.memory_before < 100 << 20, "it would be 200 MiB at once"


async def test_server_of_an_image_sees_no_connection() -> None:
    result = await run_attack("image-urls", "")

    assert (result.outcome, result.failed) == ("0 connections to its server", 0)


@pytest.mark.slow
async def test_response_of_many_objects_is_an_error_and_others_are_served() -> None:
    result = await run_attack("many-calls", "")

    assert (result.outcome, result.failed) == ("502, 502, 502, 502", 0)
    assert result.memory_peak - result.memory_before < 100 << 20, "decoded it would be 400 MiB"


@pytest.mark.slow
async def test_responses_beyond_the_memory_budget_stay_near_it() -> None:
    """Those that are refused, and what decoding takes, leave nothing behind."""
    result = await run_attack("exhausted-memory", "")

    statuses, _, later = result.outcome.partition("; then ")
    assert {pair.split(": ")[0] for pair in statuses.split(", ")} <= {"200", "503", "closed"}
    assert "200: " in statuses
    assert (later, result.failed) == ("200", 0)
    assert result.memory_peak - result.memory_before < (512 + 100) << 20, "limits.memory and some"


@pytest.mark.slow
async def test_large_heads_are_refused_and_others_are_served() -> None:
    result = await run_attack("large-heads", "")

    assert {pair.split(": ")[0] for pair in result.outcome.split(", ")} <= {"431", "closed"}
    assert result.failed == 0


@pytest.mark.slow
async def test_handovers_in_a_row_lose_no_request() -> None:
    result = await run_attack("handovers", "")

    statuses = dict(pair.split(": ") for pair in result.outcome.split(", "))
    assert (set(statuses), result.failed) == ({"200"}, 0)
    assert int(statuses["200"]) > 0


def test_row_has_memory_and_delay() -> None:
    result = Measurement(46 << 20, 89 << 20, 0.02, 0.1234, 0.0456, 10, 0, "413")

    row = format_row("many-values", result)

    assert row == (
        "| A body of 8 MiB with four million token ids | 413 for its size: the limit was 8 MiB "
        "| 46 → 89 MiB | 20 → 123 ms; 46 ms | 413 |"
    )
    assert " (Redis) |  | 46 → 89 MiB" in format_row("histories", result, uses_redis=True)


def test_command_measures_with_a_redis_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """All attacks run without it, and those on what it holds with it, too."""
    runs = list[tuple[str, bool]]()

    async def note_attack(name: str, redis_url: str) -> Measurement:
        runs.append((name, redis_url.startswith("unix://")))
        return Measurement(1, 2, 0.1, 0.2, 0.1, 3, 0, "200")

    monkeypatch.setattr("tests.attack.__main__.run_attack", note_attack)
    page = tmp_path / "threats.md"
    page.write_text(f"before\n\n{_HEADER}\n|---|\n| old |\n\nafter\n")
    monkeypatch.setattr("sys.argv", ["attack", "--into", str(page)])

    assert main() == 0
    assert runs == [*((name, False) for name in ATTACKS), *((name, True) for name in WITH_REDIS)]
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 + len(runs)
    assert page.read_text() == f"before\n\n{printed}\nafter\n"


def test_documentation_has_the_table() -> None:
    assert _HEADER in Path("docs/threats.md").read_text("utf-8")
