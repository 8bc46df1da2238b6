"""Pools whose workers change while the gateway runs, and what the admin listener shows of them."""

from pathlib import Path
from typing import Any

import httpx

from tests.conftest import RunningGateway, Serve
from tests.support.waiting import wait_until

REQUEST = {"model": "mock", "messages": [{"role": "user", "content": "say hi"}], "top_k": 3}


def build_config(workers: str, settings: str = "") -> str:
    return f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
admin: {{address: "127.0.0.1:0"}}
limits: {{drain_timeout: 1s}}
backends:
  pool: {{protocol: openai, workers: [{workers}]{settings}}}
models:
  mock: {{backend: pool}}
"""


async def open_admin_client(gateway: RunningGateway) -> httpx.AsyncClient:
    """Open an HTTP client of the gateway's admin listener."""
    return httpx.AsyncClient(base_url=gateway.admin, timeout=30)


async def test_file_discovery_follows_changes_of_the_file(
    serve: Serve, mock: RunningGateway, tmp_path: Path
) -> None:
    listed = tmp_path / "workers.yaml"
    listed.write_text("- http://127.0.0.1:1\n")
    gateway = await serve(build_config(f'{{file: "{listed}"}}'))

    assert (await gateway.http.post("/v1/chat/completions", json=REQUEST)).status_code == 503

    fresh = tmp_path / "fresh"
    fresh.write_text(f'- {{url: "{mock.url}", weight: 2}}\n')
    fresh.rename(listed)

    pool: Any = gateway.app.backends["pool"]
    await wait_until(lambda: [one.url for one in pool.report_workers()] == [mock.url])
    assert (await gateway.http.post("/v1/chat/completions", json=REQUEST)).status_code == 200


async def test_admin_adds_and_removes_workers(serve: Serve, mock: RunningGateway) -> None:
    gateway = await serve(build_config('"http://127.0.0.1:1"'))
    async with await open_admin_client(gateway) as admin:
        added = await admin.post("/-/workers", json={"backend": "pool", "url": mock.url})
        assert added.status_code == 201
        assert (await gateway.http.post("/v1/chat/completions", json=REQUEST)).status_code == 200

        gone = {"backend": "pool", "url": "http://127.0.0.1:1"}
        assert (await admin.delete("/-/workers", params=gone)).status_code == 204

        workers = (await admin.get("/-/workers")).json()
        assert [one["url"] for one in workers["backends"]["pool"]] == [mock.url]


async def test_unsupported_parameters_and_outcomes_are_counted_in_metrics(
    serve: Serve, mock: RunningGateway
) -> None:
    gateway = await serve(build_config(f'"{mock.url}"'))
    response = await gateway.http.post("/v1/chat/completions", json=REQUEST)
    assert response.headers["x-interlingua-loss"] == "top_k=dropped"

    async with await open_admin_client(gateway) as admin:
        page = (await admin.get("/metrics")).text
    assert (
        'interlingua_unsupported_parameters_total{field="sampling.top_k",model="mock",reason="dropped",split="",version="1"}'
        " 1.0" in page
    )
    assert 'outcome="ok"' in page


async def test_chat_template_renders_messages_for_a_triton_worker(
    serve: Serve, mock: RunningGateway, tmp_path: Path
) -> None:
    template = tmp_path / "chatml.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>")
    text = build_config(
        f'"{mock.url}"', f', chat_template: "{template}", options: {{max_tokens: 9}}'
    )
    gateway = await serve(text.replace("protocol: openai", "protocol: triton, profile: vllm"))

    response = await gateway.http.post("/v1/chat/completions", json=REQUEST)

    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "Hello world!"
