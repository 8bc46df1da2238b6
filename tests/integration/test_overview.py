"""The root of a listener: JSON for programs, a page for browsers."""

import pytest

from tests.conftest import Serve
from tests.support.ports import reserve_port

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, anthropic]}}]
{rest}
backends: {{echo: {{kind: echo}}}}
models: {{chat: {{backend: echo}}}}
"""
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
KEYS = f"keys: [{{name: a, sha256: {'0' * 64}}}]"


async def test_browsers_get_a_page_with_the_endpoints_of_each_protocol(serve: Serve) -> None:
    gateway = await serve(CONFIG.format(rest=""))

    response = await gateway.http.get("/", headers={"accept": BROWSER})

    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "<h2>anthropic</h2>" in response.text
    assert "<code>POST /v1/chat/completions</code>" in response.text
    assert "Requests need no API key." in response.text
    assert "web UI" not in response.text


@pytest.mark.parametrize("accept", [None, "*/*", "application/json"])
async def test_programs_get_json(serve: Serve, accept: str | None) -> None:
    gateway = await serve(CONFIG.format(rest=""))

    response = await gateway.http.get("/", headers={"accept": accept} if accept else {})

    assert response.headers["content-type"] == "application/json"
    assert response.headers["vary"] == "Accept"
    assert response.json()["endpoints"]["anthropic"][0] == "POST /v1/messages"


@pytest.mark.parametrize("is_keyed", [False, True])
async def test_page_links_the_web_ui_only_on_a_listener_of_this_machine_without_keys(
    serve: Serve, *, is_keyed: bool
) -> None:
    """To others the admin listener's address is nothing that they need to know."""
    admin = f'admin: {{address: "127.0.0.1:{reserve_port()}"}}'
    gateway = await serve(CONFIG.format(rest=f"{admin}\n{KEYS if is_keyed else ''}"))

    response = await gateway.http.get("/", headers={"accept": BROWSER})

    assert ('/-/ui/#playground">playground</a>' in response.text) is not is_keyed
