"""A gateway process, and a real Chromium with its web UI."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

ROOT: Final = Path(__file__).parents[2]
CHROMIUM: Final = "/usr/bin/chromium"
ADMIN_KEY: Final = "sk-admin-of-the-page"
KEY: Final = "sk-of-the-page"
CANARY: Final = "<img src=x onerror='window.hit = 1'><script>window.hit = 2</script>"
AXE: Final = Path(".venv-page/node_modules/axe-core/axe.min.js")
_RUN_AXE: Final = "async () => (await axe.run(document)).violations"
_BY_ITSELF: Final = "Failed to load resource: the server responded with a status of 4"
"""The beginning of the browser's own message about an error response."""
_SERVES = re.compile(r'interlingua serves .* on (http[^\s"]+) and (http[^\s"]+)')
_MODULE: Final = ("-m", "gateway")


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


CONFIGURATION: Final = f"""
listeners:
  - address: "127.0.0.1:0"
    protocols:
      - openai
      - databricks
      - triton
      - ovms
      - ollama
      - anthropic
      - {{name: mindie, prefix: /mindie}}
      - {{name: tgi, prefix: /tgi}}
      - {{name: cohere, prefix: /cohere}}
    cors: {{origins: ["http://127.0.0.1:*"]}}
limits: {{shutdown_delay: 0s}}
admin: {{address: "127.0.0.1:0", sha256: {digest(ADMIN_KEY)}}}
backends:
  slow: {{kind: echo, script: [one, " two", " three", " four", " five"], delay: 120ms}}
  other: {{kind: echo, script: [uno, " dos", " tres"]}}
  endless: {{kind: echo, script: [{", ".join(["a"] * 400)}], delay: 100ms}}
  hostile: {{kind: echo, script: ["{CANARY}"]}}
  far: {{protocol: openai, workers: ["http://127.0.0.1:9/x"], health: {{interval: 1s}}}}
models:
  chat:
    versions: {{"1": {{backend: slow}}, "2": {{backend: other}}}}
    split: {{weights: {{"1": 90, "2": 10}}}}
  plain: {{backend: other}}
  endless: {{backend: endless}}
  distant: {{backend: far, model: m}}
  "*": {{backend: hostile}}
keys: [{{name: tester, sha256: {digest(KEY)}, explain: true}}]
"""


class Gateway(Struct):
    """A gateway's URLs, and its configuration file."""

    client: str
    admin: str
    file: Path


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with run_gateway(tmp_path_factory.mktemp("page"), CONFIGURATION) as running:
        yield running


@contextmanager
def run_gateway(folder: Path, text: str, program: Sequence[str] = _MODULE) -> Iterator[Gateway]:
    """Run a gateway with this configuration from a file in the folder, by Python's arguments."""
    file, log = folder / "gateway.yaml", folder / "log"
    file.write_text(text)
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [sys.executable, *program, "serve", "--no-watch", file.name],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=log_file,
        )
    try:
        until = time.monotonic() + 90
        while not (match := _SERVES.search(log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield Gateway(match[1], match[2], file)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if shutil.which(CHROMIUM) is None:
        reason = f"there is no {CHROMIUM}: make page installs it, as root"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser, gateway: Gateway) -> Iterator[Page]:
    """A new tab with the web UI, after the key was entered. It must log no message."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    new_page = context.new_page()
    console_messages: list[str] = []

    def hear(one: ConsoleMessage) -> None:
        if not one.text.startswith(_BY_ITSELF):
            console_messages.append(one.text)

    new_page.on("console", hear)
    new_page.on("pageerror", lambda error: console_messages.append(str(error)))
    new_page.add_init_script(f"sessionStorage.setItem('admin-key', '{ADMIN_KEY}')")
    new_page.goto(gateway.admin)
    new_page.get_by_role("cell", name="endless").first.wait_for()
    yield new_page
    context.close()
    assert console_messages == []


def open_view(page: Page, name: str) -> None:
    """Select a view, and wait until it is shown in the place of the last one."""
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.locator(f'nav a[aria-current="page"]:text-is("{name}")')).to_be_visible()


def read_response(page: Page, label: str = "Model") -> str:
    """Return the playground's response once it is complete."""
    region = page.get_by_role("region", name=f"{label} and its response", exact=True)
    expect(region.get_by_text("in total")).to_be_visible()
    return region.get_by_role("log").text_content() or ""


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.is_file():
        message = f"there is no {AXE}: make page installs it"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return AXE.read_text("utf-8")


def list_violations(page: Page, axe: str) -> list[tuple[str, str, list[str]]]:
    """The serious accessibility violations of a page without a content security policy."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe)
    return [
        (one["id"], one["impact"], [node["html"] for node in one["nodes"]][:3])
        for one in page.evaluate(_RUN_AXE)
        if one["impact"] in ("serious", "critical")
    ]
