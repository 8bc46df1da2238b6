"""A worker or its proxy rejects a request for its size: the client gets a 413."""

from typing import Any, Final

import pytest

from tests.conftest import Serve
from tests.protocols import find_rows, list_mounts
from tests.support.fakes import CLOSE, ScriptedWorker, make_reply

CONFIGURATION: Final = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, databricks, ovms, ollama, anthropic, OTHERS, {name: tgi, prefix: /tgi},
      {name: mindie, prefix: /mindie}]
backends:
  pool: {protocol: openai, workers: ["%s"], retries: {max: 0}, health: {interval: 1h}}
models: {m: {backend: pool, model: m}}
""".replace("OTHERS", list_mounts())
CHAT: Final[dict[str, Any]] = {
    "model": "m",
    "messages": [{"role": "user", "content": "x" * (6 << 20)}],
}
CLIENTS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": CHAT,
    "/serving-endpoints/chat/completions": CHAT,
    "/v3/chat/completions": CHAT,
    "/api/chat": CHAT,
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/tgi/v1/chat/completions": CHAT,
    **{path: CHAT for path, _ in find_rows("CONVERSATION").values()},
}


@pytest.mark.parametrize("path", CLIENTS)
async def test_early_413_of_a_front_proxy_tells_the_size(serve: Serve, path: str) -> None:
    """A front proxy answers 413 with an HTML page of its own and closes the connection."""
    page = b"<html><title>413 Request Entity Too Large</title></html>"
    refusal = make_reply(page, "413 Content Too Large", content_type="text/html")

    async with ScriptedWorker([refusal, CLOSE]) as worker:
        gateway = await serve(CONFIGURATION % worker.url)
        response = await gateway.http.post(path, json=CLIENTS[path])

    assert response.status_code == 413, response.text
    assert "larger than" in response.text or "maximum size" in response.text
