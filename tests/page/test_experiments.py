"""The page of experiments in a real browser, before a gateway with the feedback of many users."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import CONFIGURATION, Gateway, run_gateway
from tests.page.test_page import open_view
from tests.support.feedback_traffic import write_traffic


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("experiments")
    file = folder / "u.sqlite"
    write_traffic(file, 8000, {"1": 0.9, "2": 0.8})
    text = CONFIGURATION.replace(
        'split: {weights: {"1": 90, "2": 10}}', 'split: {name: rollout, weights: {"1": 1, "2": 1}}'
    )
    assert text != CONFIGURATION
    with run_gateway(folder, f"{text}observe: {{usage: {file}, feedback: {{}}}}\n") as running:
        yield running


def test_page_shows_versions_outcomes_and_verdicts(page: Page) -> None:
    open_view(page, "Experiments")
    expect(page.get_by_role("heading", name="chat, split rollout")).to_be_visible()
    versions = page.get_by_role("table", name="chat: versions")
    expect(versions.get_by_role("row")).to_have_count(3)
    assert versions.get_by_role("cell").all_text_contents()[1] == "50.0 %"
    outcome = page.get_by_role("table", name="thumbs_up", exact=True)
    expect(outcome.get_by_role("row")).to_have_count(3)
    plots = page.get_by_role("img", name="thumbs_up")
    expect(plots).to_have_count(2)
    label = plots.first.get_attribute("aria-label") or ""
    assert "version 1: 90" in label
    expect(page.locator("strong", has_text="thumbs_up: version 2 is")).to_be_visible()
    expect(page.get_by_text("sample ratio mismatch")).to_have_count(0)


def test_page_of_experiments_fits_a_phone_screen(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    open_view(page, "Experiments")
    expect(page.get_by_role("img", name="thumbs_up, difference")).to_be_visible()
    assert page.evaluate("document.scrollingElement.scrollWidth") == 360
