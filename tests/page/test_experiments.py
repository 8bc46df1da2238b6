"""The experiments view in a real browser, with the feedback of many users."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.page.conftest import (
    ADMIN_KEY,
    CONFIGURATION,
    Gateway,
    list_violations,
    open_view,
    run_gateway,
)
from tests.support.feedback_traffic import write_traffic

SPLIT_CONFIGURATION: Final = CONFIGURATION.replace(
    'split: {weights: {"1": 90, "2": 10}}', 'split: {name: rollout, weights: {"1": 1, "2": 1}}'
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("experiments")
    file = folder / "u.sqlite"
    write_traffic(file, 8000, {"1": 0.9, "2": 0.8})
    with run_gateway(
        folder, f"{SPLIT_CONFIGURATION}observe: {{usage: {file}, feedback: {{}}}}\n"
    ) as running:
        yield running


def test_page_shows_versions_outcomes_and_verdicts(page: Page) -> None:
    open_view(page, "Experiments")
    expect(page.get_by_role("heading", name="chat, split rollout")).to_be_visible()
    versions = page.get_by_role("table", name="chat: versions")
    expect(versions.get_by_role("row")).to_have_count(3)

    assert versions.get_by_role("cell").all_text_contents()[1] == "50.0 %"

    expect(versions.get_by_role("cell").nth(4)).to_contain_text(re.compile(r"^90 % \(8\d % to 9"))
    liked = page.get_by_role("row").filter(has=page.get_by_role("img", name="thumbs_up: -1"))
    expect(liked.locator("strong", has_text="version 2 is")).to_be_visible()
    expect(page.locator(".decision strong")).to_have_text("Choose")
    expect(page.get_by_text("sample ratio mismatch")).to_have_count(0)


def test_heading_of_a_column_stands_on_the_side_of_its_values(page: Page) -> None:
    open_view(page, "Experiments")
    verdict = page.get_by_role("columnheader", name="Verdict")
    measures = page.get_by_role("table").filter(has=verdict)
    expect(measures).to_have_count(1)
    alignments = measures.evaluate(
        """table => {
          const side = (cell) => getComputedStyle(cell).textAlign;
          const first = table.querySelector("tbody tr").cells;
          return [...table.querySelectorAll("th")].map((head, n) => [side(head), side(first[n])]);
        }"""
    )

    assert {head for head, _ in alignments} == {"left", "right"}
    assert [head for head, _ in alignments] == [cell for _, cell in alignments]


def test_course_of_each_measure_is_drawn_with_the_interval_over_time(page: Page) -> None:
    open_view(page, "Experiments")
    course = page.get_by_role("img", name="thumbs_up, difference")
    expect(course).to_have_attribute("aria-label", re.compile(r"latest -1\d \(-1\d to -\d"))

    course.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".readout")).to_contain_text("8,000 values")

    page.get_by_label("Course of").select_option("failed, or answered by a fallback")
    failures = page.get_by_role("img", name="failed, or answered by a fallback, difference")
    expect(failures).to_have_attribute("aria-label", re.compile(r"latest 0 "))


def test_segments_are_read_when_they_are_chosen(page: Page) -> None:
    open_view(page, "Experiments")
    page.get_by_label("Segments of the feedback").select_option("key")
    segments = page.get_by_role("table", name="By API key")
    expect(segments.get_by_role("row")).to_have_count(7)  # the heading, two keys, three outcomes


@pytest.mark.parametrize("width", [1440, 1024, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_of_experiments_has_no_serious_accessibility_violations(
    browser: Browser, gateway: Gateway, axe: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    with browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
    ) as context:
        page = context.new_page()
        page.add_init_script(f"sessionStorage.setItem('admin-key', '{ADMIN_KEY}')")
        page.goto(gateway.admin)
        open_view(page, "Experiments")
        expect(page.get_by_role("img", name="thumbs_up, difference")).to_be_visible()

        assert list_violations(page, axe) == []


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_few_requests_say_how_many_more_are_needed(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    """Given ten requests, of which each version got some."""
    write_traffic(tmp_path / "u.sqlite", 10, {"1": 0.9, "2": 0.8})
    text = f"{SPLIT_CONFIGURATION}observe: {{usage: u.sqlite, feedback: {{}}}}\n"
    with run_gateway(tmp_path, text) as running:
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.add_init_script(f"sessionStorage.setItem('admin-key', '{ADMIN_KEY}')")
        page.goto(running.admin)
        open_view(page, "Experiments")

        decision = page.locator(".decision")
        expect(decision).to_contain_text(re.compile(r"^Go on: about [\d,]+ more requests"))
        assert page.evaluate("document.scrollingElement.scrollWidth") == width
        page.close()


def test_rollout_is_shown_with_its_steps_and_guardrails(browser: Browser, tmp_path: Path) -> None:
    """Given a rollout in its first step, without a request in it."""
    write_traffic(tmp_path / "u.sqlite", 50, {"1": 0.9, "2": 0.8})
    text = SPLIT_CONFIGURATION.replace(
        "split: {name: rollout,",
        'rollout: {to: "2", steps: [1, 25, 100], guardrails: {feedback: {thumbs_up: '
        "{max_decrease: 5%}}}}\n    split: {name: rollout,",
    )
    with run_gateway(tmp_path, f"{text}observe: {{usage: u.sqlite, feedback: {{}}}}\n") as running:
        page = browser.new_page()
        page.add_init_script(f"sessionStorage.setItem('admin-key', '{ADMIN_KEY}')")
        page.goto(running.admin)
        open_view(page, "Experiments")

        expect(
            page.get_by_role("heading", name="chat: rollout of version 2 running")
        ).to_be_visible()
        steps = page.get_by_role("list", name="Steps").get_by_role("listitem")
        expect(steps).to_have_text(["1 %", "25 %", "100 %"])
        expect(steps.first).to_have_attribute("aria-current", "step")
        guardrails = page.get_by_role("table", name="chat: guardrails of the step")
        expect(guardrails.get_by_role("row").last).to_contain_text("feedback thumbs_up")
        page.close()


def test_page_of_experiments_fits_a_phone_screen(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    open_view(page, "Experiments")

    expect(page.get_by_role("img", name="thumbs_up, difference")).to_be_visible()

    assert page.evaluate("document.scrollingElement.scrollWidth") == 360
