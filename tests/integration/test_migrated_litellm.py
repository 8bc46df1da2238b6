"""A migrated LiteLLM configuration serves requests."""

import asyncio
from pathlib import Path

from gateway.tools.migrate.litellm import migrate
from tests.fault.gateway_process import GatewayProcess, build_config


def test_migrated_litellm_config_serves_alias_split_fallback_and_key(tmp_path: Path) -> None:
    """The alias, the split, the fallback from a dead worker and the key work with real workers."""
    asyncio.run(_check_migrated_gateway(tmp_path))


async def _check_migrated_gateway(folder: Path) -> None:
    places = [folder / name for name in ("worker", "gateway")]
    for place in places:
        place.mkdir()
    async with GatewayProcess(places[0], build_config()) as worker:
        there = f"http://127.0.0.1:{worker.port}/v1"
        config = f"""
model_list:
  - {{model_name: chat, litellm_params: {{model: hosted_vllm/m, api_base: "http://127.0.0.1:9/v1"}}}}
  - {{model_name: chat, litellm_params: {{model: openai/m, api_base: "{there}", api_key: none}}}}
  - {{model_name: spare, litellm_params: {{model: openai/m, api_base: "{there}"}}}}
  - {{model_name: dead, litellm_params: {{model: hosted_vllm/m, api_base: "http://127.0.0.1:9/v1"}}}}
router_settings: {{fallbacks: [{{dead: [spare]}}], model_group_alias: {{gpt-4: chat}}}}
general_settings: {{master_key: sk-of-the-house}}
"""
        text = migrate(config.encode(), "config.yaml", {}).text
        assert text is not None
        text = text.replace("0.0.0.0:4000", "127.0.0.1:0")
        async with GatewayProcess(places[1], text) as gateway:
            for model in ("gpt-4", "dead", "chat", "chat@2"):
                response = await gateway.http.post(
                    f"{gateway.urls[0]}/v1/chat/completions",
                    json={"model": model, "messages": [{"role": "user", "content": "hi"}]},
                    headers={"authorization": "Bearer sk-of-the-house"},
                )
                assert response.status_code == 200, (model, response.text)
                assert response.json()["choices"][0]["message"]["content"] == "Hello world"
            refused = await gateway.http.get(f"{gateway.urls[0]}/v1/models")
            assert refused.status_code == 401
