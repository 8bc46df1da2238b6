"""axe-core finds no accessibility issue in any view: light and dark, wide, medium and narrow."""

import re
from collections.abc import Iterator
from typing import Any, Final, Literal

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.page.conftest import ADMIN_KEY, CANARY, KEY, Gateway, list_violations, open_view

WIDTHS: Final = (1440, 1024, 390)
BROKEN_WORDS: Final = """
() => [...document.querySelectorAll("td span, td a, td, nav a, button, h1, h2, .value")]
  .filter(it => it.checkVisibility() && !it.children.length && it.textContent.trim())
  .filter(it => {
    const range = document.createRange();
    range.selectNodeContents(it);
    const tops = new Set([...range.getClientRects()].map(one => Math.round(one.top)));
    return tops.size > 1 && !it.textContent.trim().includes(" ");
  })
  .map(it => it.textContent)
"""
"""Finds texts without a space that are broken over lines."""


@pytest.fixture(scope="module")
def used_gateway(gateway: Gateway) -> Gateway:
    """A gateway with successful and failed requests, also with hostile names."""
    url, headers = f"{gateway.client}/v1/chat/completions", {"Authorization": f"Bearer {KEY}"}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    for model in ("plain", "chat", "distant", CANARY, f"chat@{CANARY}"):
        httpx.post(url, json=body | {"model": model}, headers=headers, timeout=30)
    httpx.post(
        url, json=body | {"model": "plain"}, headers={"Authorization": "Bearer no"}, timeout=30
    )
    return gateway


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> Literal["light", "dark"]:
    return "dark" if request.param == "dark" else "light"


@pytest.fixture(params=WIDTHS)
def view(
    browser: Browser,
    used_gateway: Gateway,
    scheme: Literal["light", "dark"],
    request: pytest.FixtureRequest,
) -> Iterator[Page]:
    """A tab without the page's content security policy, which would block axe-core."""
    context = browser.new_context(
        viewport={"width": request.param, "height": 900}, color_scheme=scheme, bypass_csp=True
    )
    page = context.new_page()
    page.add_init_script(f"sessionStorage.setItem('admin-key', '{ADMIN_KEY}')")
    page.goto(used_gateway.admin)
    page.get_by_role("cell", name="endless").first.wait_for()
    yield page
    context.close()


def prepare_views(page: Page) -> Iterator[str]:
    """Open every view with content, and yield its name."""
    expect(page.get_by_role("cell", name="VersionNotFound").first).to_be_attached()
    yield "Status"
    page.get_by_role("button", name="Requests per second: open larger").click()
    expect(page.get_by_role("dialog").get_by_role("img")).to_have_attribute(
        "aria-label", re.compile("Requests per second, .* to ")
    )
    yield "a larger chart"
    page.keyboard.press("Escape")
    open_view(page, "Usage")
    expect(page.get_by_text("observe.usage must name")).to_be_visible()
    yield "Usage"
    open_view(page, "Requests")
    expect(page.get_by_text("client error").last).to_be_attached()
    yield "Requests"
    page.locator("tbody a").last.click()
    expect(page.get_by_role("dialog")).to_contain_text("No explanation was recorded")
    yield "details of a request"
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    open_view(page, "Playground")
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("Compare two models").check()
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Continue from this response").first.click()
    expect(page.get_by_role("heading", name="Conversation")).to_be_visible()
    yield "Playground"
    open_view(page, "Configuration")
    expect(page.locator("pre", has_text="listeners").first).to_be_visible()
    yield "Configuration"
    page.get_by_role("button", name="Drain", exact=True).click()
    yield "question"
    page.get_by_role("button", name="Cancel").last.click()
    open_view(page, "API")
    page.locator("summary", has_text="/v1/chat/completions").first.click()
    expect(page.get_by_role("heading", name="Try it")).to_be_visible()
    yield "API"


def test_no_view_has_serious_accessibility_violations_or_broken_words(view: Page, axe: str) -> None:
    width = view.viewport_size["width"] if view.viewport_size else 0
    for name in prepare_views(view):
        violations = list_violations(view, axe)
        assert (name, violations) == (name, [])
        assert (name, view.evaluate(BROKEN_WORDS)) == (name, [])
        assert view.evaluate("document.scrollingElement.scrollWidth") <= width, name
