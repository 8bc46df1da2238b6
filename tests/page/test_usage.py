"""The usage view and the enlarged charts in a real browser, with the rows of a month."""

import csv
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from gateway.observability.record import RequestRecord
from gateway.observability.usage import SqliteUsageRecorder
from protocols.core.events import Usage
from tests.page.conftest import CONFIGURATION, Gateway, open_view, run_gateway

ROWS = 600
HOSTILE_KEY = "<b>key</b>"


KEYS = ("shop", "office", HOSTILE_KEY)


def write_month(
    file: Path, count: int = ROWS, model: str = "chat", keys: Sequence[str] = KEYS
) -> None:
    """Requests of the last 25 days, at least one of them in the last hour."""
    rng, now = random.Random(3), time.time()
    recorder = SqliteUsageRecorder(str(file), 1e12, time.time)
    for number in range(count):
        recorder.record_usage(
            RequestRecord(
                f"{model}-{number}",
                now - rng.random() * 25 * 86400 * (number > 0) - 60,
                model=model,
                version=str(1 + number % 2),
                key=rng.choice(keys),
                outcome="ok" if number % 20 else "worker_error",
                usage=Usage(100, 20),
                first_token=0.05 + 0.1 * rng.random(),
            )
        )
    recorder.start()
    recorder.close(60)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("usage")
    write_month(folder / "u.sqlite")
    with run_gateway(folder, f"{CONFIGURATION}observe: {{usage: u.sqlite}}\n") as running:
        yield running


def test_usage_is_listed_by_key_model_and_day_and_saved_as_csv(page: Page, tmp_path: Path) -> None:
    open_view(page, "Usage")
    table = page.get_by_role("table", name="Requests that reached a model")
    expect(table.get_by_role("row")).to_have_count(5)  # the heading, three keys, all
    expect(table.get_by_role("row").last).to_contain_text(f"{100 * ROWS:,}")
    expect(table.get_by_role("cell", name=HOSTILE_KEY, exact=True)).to_be_visible()
    expect(page.get_by_role("img", name="Tokens per day")).to_be_visible()

    page.get_by_label("Group by").select_option("key")
    expect(table.get_by_role("columnheader", name="Model")).to_have_count(0)
    with page.expect_download() as started:
        page.get_by_role("button", name="Download CSV").click()
    file = tmp_path / started.value.suggested_filename
    started.value.save_as(file)

    assert file.name == "usage-key.csv"
    heading, *rows = csv.reader(file.read_text().splitlines())
    assert heading[:2] == ["key", "requests"]
    assert sum(int(row[1]) for row in rows) == ROWS


def test_chart_opens_larger_with_axes_and_ranges(page: Page) -> None:
    """Given requests of the past in the usage store, and none of the last 15 minutes."""
    page.get_by_role("button", name="Requests per second: open larger").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Requests per second")
    figure = dialog.get_by_role("img", name="Requests per second")
    expect(figure).to_be_visible()

    dialog.get_by_label("Range").select_option("7d")
    expect(dialog.get_by_role("status").filter(has_text="from the usage store")).to_be_visible()
    days = figure.locator("text").filter(has_text=" ")
    expect(days.first).to_be_visible()

    figure.focus()
    page.keyboard.press("ArrowLeft")
    readout = dialog.locator(".readout")
    expect(readout).to_have_text(re.compile(r"^\d+ \w+ \d\d:\d\d: [\d.]+$"))
    before = readout.text_content() or ""
    page.keyboard.press("ArrowLeft")
    expect(readout).not_to_have_text(before)

    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_chart_of_one_version_opens_with_its_own_values(page: Page) -> None:
    name = "Time to first token of chat@2: open larger"
    page.get_by_role("button", name=name).click()
    dialog = page.get_by_role("dialog", name="Time to first token: chat@2")
    dialog.get_by_label("Range").select_option("7d")

    label = re.compile(r"^Time to first token: chat@2, .*: latest \d+ ms, highest \d+ ms$")
    expect(dialog.get_by_role("img")).to_have_attribute("aria-label", label)


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_usage_fits_the_screen(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    open_view(page, "Usage")
    expect(page.get_by_role("img", name="Tokens per day")).to_be_visible()

    assert page.evaluate("document.scrollingElement.scrollWidth") == width
