"""A page of another origin chats with a listener that has ``cors``, in a real browser."""

import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.page.conftest import KEY, Gateway

PAGE = b"<!doctype html><title>chat</title><p id=answer></p>"
SEND_CHAT = """
async ([url, key, headers, model, most]) => {
  try {
    const response = await fetch(url + "/v1/chat/completions", {
      method: "POST",
      headers: {"Authorization": "Bearer " + key, "Content-Type": "application/json", ...headers},
      body: JSON.stringify({model, stream: true,
                            messages: [{role: "user", content: "hi"}]}),
    });
    const [reader, decoder, pieces] = [response.body.getReader(), new TextDecoder(), []];
    for (let step; pieces.length < most && !(step = await reader.read()).done;) {
      pieces.push(decoder.decode(step.value));
    }
    await reader.cancel();
    return {status: response.status, id: response.headers.get("x-request-id"), pieces};
  } catch (error) {
    return {error: String(error)};
  }
}
"""


class _StaticPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def page_port() -> Iterator[int]:
    """The port of a server with a page of another origin."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _StaticPage)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def other_page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


def send_chat(
    page: Page,
    gateway: Gateway,
    *,
    key: str = KEY,
    model: str = "chat@1",
    pieces: int = 1000,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Send a chat request, and read the response until its end or so many pieces."""
    arguments = [gateway.client, key, dict(headers), model, pieces]
    result: dict[str, Any] = page.evaluate(SEND_CHAT, arguments)
    return result


def test_page_of_an_allowed_origin_reads_a_stream_before_it_ends(
    other_page: Page, gateway: Gateway, page_port: int
) -> None:
    """The model sends its 400 words in 40 seconds."""
    other_page.goto(f"http://127.0.0.1:{page_port}/")

    result = send_chat(other_page, gateway, model="endless", pieces=4)

    assert len(result["pieces"]) == 4
    assert 0 < "".join(result["pieces"]).count('"content":"a"') < 400


def test_page_of_an_allowed_origin_reads_a_chat_to_its_end(
    other_page: Page, gateway: Gateway, page_port: int
) -> None:
    other_page.goto(f"http://127.0.0.1:{page_port}/")
    result = send_chat(
        other_page, gateway, headers={"x-stainless-lang": "js", "x-interlingua-strict": "1"}
    )

    assert result["status"] == 200
    assert result["id"]

    text = "".join(result["pieces"])
    assert all(f'"content":"{word}"' in text for word in ("one", " two", " five"))
    assert text.endswith("data: [DONE]\n\n")


def test_page_of_an_allowed_origin_reads_an_error(
    other_page: Page, gateway: Gateway, page_port: int
) -> None:
    other_page.goto(f"http://127.0.0.1:{page_port}/")
    result = send_chat(other_page, gateway, key="sk-wrong")

    assert result["status"] == 401
    assert "invalid_api_key" in "".join(result["pieces"])


def test_page_of_another_origin_or_with_another_header_reads_nothing(
    other_page: Page, gateway: Gateway, page_port: int
) -> None:
    other_page.goto(f"http://localhost:{page_port}/")
    assert "Failed to fetch" in send_chat(other_page, gateway)["error"]

    other_page.goto(f"http://127.0.0.1:{page_port}/")
    assert "Failed to fetch" in send_chat(other_page, gateway, headers={"x-unknown": "1"})["error"]
