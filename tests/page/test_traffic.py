"""The status view shows what a target got, whether or not it answered a client."""

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import ADMIN_KEY, Gateway, digest, run_gateway

CONFIGURATION = f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
limits: {{shutdown_delay: 0s}}
admin: {{address: "127.0.0.1:0", sha256: {digest(ADMIN_KEY)}}}
backends:
  far: {{protocol: openai, workers: ["http://127.0.0.1:9/x"], health: {{interval: 1h}}}}
  near: {{kind: echo}}
models:
  endless: {{backend: far, fallback: [spare]}}
  spare: {{backend: near, shadow: {{to: candidate, share: 100%}}}}
  candidate: {{backend: near}}
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with run_gateway(tmp_path_factory.mktemp("traffic"), CONFIGURATION) as running:
        yield running


def test_fallbacks_and_shadow_traffic_are_shown_with_the_requests(
    page: Page, gateway: Gateway
) -> None:
    with httpx.Client(base_url=gateway.client, timeout=30) as client:
        for model in ("endless", "endless", "spare"):
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
            assert client.post("/v1/chat/completions", json=body).is_success
        assert client.get("/v1/models").is_success

    models = page.get_by_role("region", name="Rates of the last minute")
    fallback = models.get_by_role("row").filter(has_text="endless")
    shadow = models.get_by_role("row").filter(has_text="candidate")
    others = models.get_by_role("row").filter(has_text="no model")

    expect(fallback).to_contain_text("+ 2 answered by fallback")
    expect(shadow).to_contain_text("+ 1 shadow")
    expect(others).to_contain_text("listings, feedback, unknown models and keys")
