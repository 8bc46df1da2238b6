"""Makes the documentation's screenshots from a gateway with real traffic.

They are written to the folder SCREENSHOTS, as in ``make page``; without it they are discarded. A
quarter of an hour of statistics is sampled twenty times as often.
"""

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from gateway.observability.record import Feedback, RequestRecord
from gateway.observability.usage import SqliteUsageRecorder
from protocols.core.events import Usage
from tests.page.conftest import Gateway, open_view, read_response, run_gateway
from tests.page.test_usage import write_month

FOLDER: Final = os.environ.get("SCREENSHOTS", "")
SECONDS: Final = 45 if FOLDER else 4
NO_WORKER: Final = "http://127.0.0.1:9"
PROGRAM: Final = """
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
      - {url: "NO_WORKER", max_concurrency: 8}
    health: {interval: 1s}

observe: {usage: usage.sqlite, feedback: {}}

models:
  support-chat:
    aliases: [support]
    versions: {"1": {backend: current}, "2": {backend: candidate}}
    split: {name: rollout, weights: {"1": 90, "2": 10}}
  reports: {backend: long}
  small: {backend: pool}
"""


class Traffic:
    """Clients of a gateway, each of which sends one request after the other."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = threading.Event()
        self._clients = [threading.Thread(target=self._send_requests, args=(n,)) for n in range(4)]
        for client in self._clients:
            client.start()

    def stop(self) -> None:
        """Send no more requests, and wait until the running ones have ended."""
        self._stopped.set()
        for client in self._clients:
            client.join()

    def _send_requests(self, number: int) -> None:
        rounds = 0
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stopped.is_set():
                rounds += 1
                models = ["support-chat", "support-chat", "small", "support"]
                model = models[(rounds + number) % len(models)]
                if rounds % 9 == 0:
                    model = "suport-chat"
                send_chat(client, "reports" if number == 0 else model)
                self._stopped.wait(0.1 + 0.3 * (rounds % 7 == number))


def send_chat(client: httpx.Client, model: str, **headers: str) -> httpx.Response:
    body: dict[str, Any] = {"model": model, "stream": True, "max_tokens": 64}
    body["messages"] = [{"role": "user", "content": "Hello"}]
    body["stream_options"] = {"include_usage": True}
    return client.post("/v1/chat/completions", json=body, headers=headers)


def write_feedback(file: Path) -> None:
    """Feedback on requests of three days, of which a tenth went to a candidate that is better."""
    rng, now = random.Random(5), time.time()
    recorder = SqliteUsageRecorder(str(file), 1e12, time.time, feedback=True)
    for number in range(3000):
        is_new = rng.random() < 0.1
        record = RequestRecord(
            f"judged-{number}",
            now - 86.4 * (3000 - number),
            model="support-chat",
            version="2" if is_new else "1",
            split="rollout",
            key=rng.choice(["web-shop", "back-office"]),
            usage=Usage(60, 20),
            first_token=rng.uniform(0.05, 0.15),
            duration=rng.uniform(0.5, 0.9),
        )
        recorder.record_usage(record)
        liked = float(rng.random() < (0.9 if is_new else 0.84))
        recorder.record_feedback(
            Feedback(
                record.started_at + 5,
                record.key,
                False,
                "id",
                record.id,
                "thumbs_up",
                "boolean",
                liked,
            )
        )
    recorder.start()
    recorder.close(60)


def send_explained_request(url: str) -> str:
    """Send requests to the pool until one succeeds, and return its id."""
    with httpx.Client(base_url=url, timeout=60) as client:
        for number in range(60):
            request_id = f"order-{4711 + number}"
            headers = {"x-interlingua-explain": "1", "x-request-id": request_id}
            if send_chat(client, "small", **headers).is_success:
                return request_id
            time.sleep(0.5)  # until the worker's next health check
    raise AssertionError("the pool answered no request")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway before a pool of two workers, of which one does not exist."""
    words = ", ".join(["Revenue", '" rose"', '" by"', '" a"', '" tenth"'] * 8)
    text = GATEWAY.replace("WORDS", words).replace("NO_WORKER", NO_WORKER)
    program = ("-c", PROGRAM)
    folder = tmp_path_factory.mktemp("screenshots")
    for number, model in enumerate(("support-chat", "reports", "small")):
        write_month(
            folder / "usage.sqlite", 900 // (number + 1), model, ("web-shop", "back-office")
        )
    write_feedback(folder / "usage.sqlite")
    with (
        run_gateway(tmp_path_factory.mktemp("worker"), WORKER, program) as worker,
        run_gateway(
            folder,
            text.replace("WORKER", worker.client),
            program,
        ) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def traffic(gateway: Gateway) -> Iterator[Traffic]:
    """Present requests to the gateway, after past ones."""
    clients = Traffic(gateway.client)
    time.sleep(SECONDS)
    yield clients
    clients.stop()


@pytest.fixture
def tab(browser: Browser, gateway: Gateway, traffic: Traffic) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1200, "height": 760}, color_scheme="light")
    page = context.new_page()
    page.goto(gateway.admin)
    page.get_by_role("cell", name="support-chat").first.wait_for()
    yield page
    context.close()


def take(page: Page, name: str, folder: Path) -> None:
    """Take a screenshot."""
    target = Path(FOLDER or folder) / f"page-{name}.png"
    page.wait_for_timeout(300)
    page.screenshot(path=target)
    assert target.stat().st_size > 10_000


def prepare_views_of_the_store(tab: Page) -> Iterator[str]:
    """Open what the usage store is shown in, and yield its name."""
    tab.get_by_role("button", name="Time to first token of support-chat@1").click()
    dialog = tab.get_by_role("dialog", name="Time to first token: support-chat@1")
    dialog.get_by_label("Range").select_option("7d")
    expect(dialog).to_contain_text("from the usage store")
    yield "chart"
    tab.keyboard.press("Escape")

    open_view(tab, "Usage")
    expect(tab.get_by_role("img", name="Tokens per day")).to_be_visible()
    yield "usage"

    open_view(tab, "Experiments")
    expect(tab.get_by_role("img", name="thumbs_up, difference")).to_be_visible()
    expect(tab.locator(".decision")).to_contain_text("Go on")
    yield "experiments"


def prepare_views(tab: Page, gateway: Gateway, traffic: Traffic) -> Iterator[str]:
    """Open every view with content, and yield its name."""
    missing = tab.get_by_role("cell", name=NO_WORKER, exact=True)
    expect(tab.get_by_role("row").filter(has=missing)).to_contain_text("health checks fail")
    expect(tab.get_by_role("cell", name="ModelNotFound", exact=True)).to_be_visible()
    yield "status"

    yield from prepare_views_of_the_store(tab)

    open_view(tab, "Requests")
    expect(tab.get_by_role("row").filter(has_text="streaming").first).to_be_visible()
    yield "requests"

    traffic.stop()  # so that the request is still listed and explained when it is opened
    request_id = send_explained_request(gateway.client)
    tab.get_by_role("link", name=f"details of request {request_id}").click()
    details = tab.get_by_role("dialog", name=f"Request {request_id}")
    expect(details).to_contain_text("upstream")
    expect(details).not_to_contain_text("sk-of-the-worker")
    yield "request"
    tab.keyboard.press("Escape")
    expect(details).to_be_hidden()

    open_view(tab, "Playground")
    tab.get_by_label("System").fill("You answer politely.")
    tab.get_by_label("Prompt").fill("My order has not arrived.")
    tab.get_by_label("Compare two models").check()
    tab.get_by_role("combobox", name="Model", exact=True).fill("support-chat@1")
    tab.get_by_role("combobox", name="Second model").fill("support-chat@2")
    tab.get_by_role("button", name="Send").click()
    assert read_response(tab) == "Thank you for your patience."
    assert read_response(tab, "Second model") == "Thanks for waiting!"
    yield "playground"

    open_view(tab, "Configuration")
    configuration = tab.get_by_label("The configuration, secrets masked")
    expect(configuration).to_contain_text("support-chat")
    expect(configuration).not_to_contain_text("sk-of-the-worker")
    yield "configuration"

    open_view(tab, "API")
    tab.get_by_label("Search").fill("/v1/chat/completions")
    tab.locator("summary:visible", has_text="/v1/chat/completions").first.click()
    form = tab.get_by_role("region", name="Try POST /v1/chat/completions", exact=True)
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_role("status")).to_contain_text("status 200")
    yield "api"


def test_screenshots_show_the_views_with_real_traffic(
    tab: Page, gateway: Gateway, traffic: Traffic, tmp_path: Path
) -> None:
    names = []
    for name in prepare_views(tab, gateway, traffic):
        take(tab, name, tmp_path)
        names.append(name)

    assert names[:4] == ["status", "chart", "usage", "experiments"]
    assert names[4:] == ["requests", "request", "playground", "configuration", "api"]
