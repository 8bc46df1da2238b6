"""The screenshots of the documentation, of a gateway with real traffic.

With SCREENSHOTS they are written to that folder, as ``make page`` does; without, they are only
made. The traffic of a quarter of an hour would take that long, so the samples of the statistics
are taken twenty times as often.
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

FOLDER: Final = os.environ.get("SCREENSHOTS", "")
SECONDS: Final = 45 if FOLDER else 4
ADMIN_PORT = re.compile(r'interlingua serves .* on ([^\s"]+) and ([^\s"]+)')
SERVE: Final = """
import sys
from gateway.admin import history, status
history.SAMPLE_INTERVAL = status.SAMPLE_INTERVAL = 0.5
from gateway.__main__ import main
sys.argv[0] = "interlingua"
main()
"""
WORKER: Final = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
limits: {shutdown_delay: 0s}
admin: {address: "127.0.0.1:0"}
backends: {small: {kind: echo, script: [It, " works", ", and", " quickly", "."], delay: 15ms}}
models: {small: {backend: small}}
"""
GATEWAY: Final = """# The gateway in front of the support team's models
listeners:
  - {address: "127.0.0.1:0", protocols: [openai, anthropic, ollama, triton]}
limits: {shutdown_delay: 0s}
admin: {address: "127.0.0.1:0"}

backends:
  current: {kind: echo, script: [Thank, " you", " for", " your", " patience", "."], delay: 60ms}
  candidate: {kind: echo, script: [Thanks, " for", " waiting", "!"], delay: 30ms}
  long: {kind: echo, script: [WORDS], delay: 120ms}
  pool:
    protocol: openai
    workers:
      - {url: "WORKER", max_concurrency: 8, auth: {bearer: sk-of-the-worker}}
      - {url: "http://127.0.0.1:9", max_concurrency: 8}
    health: {interval: 1s}

models:
  support-chat:
    aliases: [support]
    versions: {"1": {backend: current}, "2": {backend: candidate}}
    split: {name: rollout, weights: {"1": 90, "2": 10}}
  reports: {backend: long}
  small: {backend: pool}
"""


@contextmanager
def serve(folder: Path, name: str, text: str) -> Iterator[tuple[str, str]]:
    """A gateway process; gives the URLs of its listener and of its admin listener."""
    file, log = folder / f"{name}.yaml", folder / f"{name}.log"
    file.write_text(text)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "serve", "--no-watch", file.name],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=output,
        )
    try:
        until = time.monotonic() + 30
        while not (match := ADMIN_PORT.search(log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield match[1], match[2]
    finally:
        process.kill()
        process.wait()


def send_requests(url: str, stop: threading.Event, number: int) -> None:
    """One client after the other, until ``stop``."""
    rounds = 0
    with httpx.Client(base_url=url, timeout=30) as client:
        while not stop.is_set():
            rounds += 1
            models = ["support-chat", "support-chat", "small", "support"]
            model = "suport-chat" if rounds % 9 == 0 else models[(rounds + number) % len(models)]
            if number == 0:
                model = "reports"
            body: dict[str, Any] = {"model": model, "stream": True, "max_tokens": 64}
            body["messages"] = [{"role": "user", "content": "Hello"}]
            body["stream_options"] = {"include_usage": True}
            client.post("/v1/chat/completions", json=body, headers={"x-interlingua-explain": "1"})
            stop.wait(0.1 + 0.3 * (rounds % 7 == number))


@pytest.fixture(scope="module")
def admin_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The admin listener of a gateway that has served clients and still does."""
    folder, stop = tmp_path_factory.mktemp("screenshots"), threading.Event()
    words = ", ".join(["Revenue", '" rose"', '" by"', '" a"', '" tenth"'] * 8)
    with ExitStack() as stack:
        worker, _ = stack.enter_context(serve(folder, "worker", WORKER))
        text = GATEWAY.replace("WORKER", worker).replace("WORDS", words)
        url, admin = stack.enter_context(serve(folder, "gateway", text))
        clients = [threading.Thread(target=send_requests, args=(url, stop, n)) for n in range(4)]
        for client in clients:
            client.start()
        time.sleep(SECONDS)
        yield admin
        stop.set()
        for client in clients:
            client.join()


@pytest.fixture
def tab(browser: Browser, admin_url: str) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1200, "height": 760}, color_scheme="light")
    page = context.new_page()
    page.goto(admin_url)
    page.get_by_role("cell", name="support-chat").first.wait_for()
    yield page
    context.close()


def take(page: Page, name: str, folder: Path) -> None:
    """Take a screenshot."""
    target = Path(FOLDER or folder) / f"page-{name}.png"
    page.wait_for_timeout(300)
    page.screenshot(path=target)
    assert target.stat().st_size > 10_000


def test_screenshots_show_the_views_with_real_traffic(tab: Page, tmp_path: Path) -> None:
    expect(tab.get_by_text("health checks fail")).to_be_visible()
    expect(tab.get_by_role("cell", name="ModelNotFound")).to_be_visible()
    take(tab, "status", tmp_path)

    tab.get_by_role("link", name="Requests", exact=True).click()
    expect(tab.get_by_role("row").filter(has_text="streaming").first).to_be_visible()
    take(tab, "requests", tmp_path)
    finished = tab.get_by_role("row").filter(has=tab.get_by_text("ok", exact=True))
    finished.filter(has_text="small@1").get_by_role("link").first.click()
    expect(tab.get_by_role("dialog")).to_contain_text("upstream")
    expect(tab.get_by_role("dialog")).not_to_contain_text("sk-of-the-worker")
    take(tab, "request", tmp_path)
    tab.keyboard.press("Escape")

    tab.get_by_role("link", name="Playground", exact=True).click()
    tab.get_by_label("System").fill("You answer politely.")
    tab.get_by_label("Prompt").fill("My order has not arrived.")
    tab.get_by_label("Compare two models").check()
    tab.get_by_role("combobox", name="Model", exact=True).fill("support-chat@1")
    tab.get_by_role("combobox", name="Second model").fill("support-chat@2")
    tab.get_by_role("button", name="Send").click()
    expect(tab.get_by_text("in total")).to_have_count(2)
    take(tab, "playground", tmp_path)

    tab.get_by_role("link", name="Configuration", exact=True).click()
    expect(tab.locator("pre")).to_contain_text("support-chat")
    expect(tab.locator("pre")).not_to_contain_text("sk-of-the-worker")
    take(tab, "configuration", tmp_path)

    tab.get_by_role("link", name="API", exact=True).click()
    tab.get_by_label("Search").fill("/v1/chat/completions")
    tab.locator("summary:visible", has_text="/v1/chat/completions").first.click()
    tab.get_by_role("region", name="Try").get_by_role("button", name="Send").click()
    expect(tab.get_by_text("status 200")).to_be_visible()
    take(tab, "api", tmp_path)
