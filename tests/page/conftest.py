"""A gateway that is a process, and a real Chromium before its page."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

CHROMIUM: Final = "/usr/bin/chromium"
ADMIN_KEY: Final = "sk-admin-of-the-page"
KEY: Final = "sk-of-the-page"
CANARY: Final = "<img src=x onerror='window.hit = 1'><script>window.hit = 2</script>"
_BY_ITSELF: Final = "Failed to load resource: the server responded with a status of 4"
"""How the browser itself begins what it says of an answer that is a refusal."""
_SERVES = re.compile(r'interlingua serves .* on (http[^\s"]+) and (http[^\s"]+)')


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
    """Where it listens, and its configuration's file."""

    client: str
    admin: str
    file: Path


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with run_gateway(tmp_path_factory.mktemp("page"), CONFIGURATION) as found:
        yield found


@contextmanager
def run_gateway(folder: Path, text: str) -> Iterator[Gateway]:
    """Serve this configuration, from a file in the folder."""
    file, log = folder / "gateway.yaml", folder / "log"
    file.write_text(text)
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "--no-watch", str(file)],
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
    try:
        until = time.monotonic() + 30
        while not (found := _SERVES.search(log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield Gateway(found[1], found[2], file)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if shutil.which(CHROMIUM) is None:
        said = f"there is no {CHROMIUM}: make page installs it, as root"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)
    expect.set_options(timeout=20_000)
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Browser, gateway: Gateway) -> Iterator[Page]:
    """A new tab before the page, past the question for the key. It must have nothing to say."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    made = context.new_page()
    said: list[str] = []

    def hear(one: ConsoleMessage) -> None:
        if not one.text.startswith(_BY_ITSELF):
            said.append(one.text)

    made.on("console", hear)
    made.on("pageerror", lambda error: said.append(str(error)))
    made.add_init_script(f"sessionStorage.setItem('admin-key', '{ADMIN_KEY}')")
    made.goto(gateway.admin)
    made.get_by_role("cell", name="endless").first.wait_for()
    yield made
    context.close()
    assert said == []
