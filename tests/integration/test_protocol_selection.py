"""Where two protocols share a path, the configuration selects one, never the body."""

import hashlib

import pytest

from tests.conftest import RunningGateway, Serve

KEYS = "\n".join(
    f'  - {{name: {name}, sha256: "{hashlib.sha256(name.encode()).hexdigest()}"{settings}}}'
    for name, settings in (("plain", ""), ("mindful", ", protocol: mindie"))
)
SHARED = f"""
listeners:
  - address: "127.0.0.1:0"
    protocols: [{{name: triton, profile: plain}}, mindie]
    protocol_header: true
backends: {{e: {{kind: echo, script: [Hello]}}}}
models:
  m: {{backend: e}}
  npu: {{backend: e, protocol: mindie}}
keys:
{KEYS}
"""
WITHOUT_HEADER = SHARED.replace("    protocol_header: true\n", "")


async def detect_error_protocol(
    gateway: RunningGateway, model: str, key: str, **headers: str
) -> str:
    """Return the protocol whose error format the response to an unreadable body has."""
    response = await gateway.http.post(
        f"/v2/models/{model}/generate",
        content=b"{",
        headers={"authorization": f"Bearer {key}", **headers},
    )
    return {500: "triton", 422: "mindie"}[response.status_code]


NAMED = {"x-interlingua-protocol": "mindie"}


@pytest.mark.parametrize(
    ("model", "key", "headers", "protocol"),
    [
        ("m", "plain", {}, "triton"),
        ("npu", "plain", {}, "mindie"),
        ("m", "mindful", {}, "mindie"),
        ("m", "plain", NAMED, "mindie"),
        ("npu", "mindful", {"x-interlingua-protocol": "triton"}, "triton"),
        ("m", "plain", {"x-interlingua-protocol": "nonsense"}, "triton"),
    ],
)
async def test_protocol_is_chosen_by_header_key_model_or_listener_order(
    serve: Serve, model: str, key: str, headers: dict[str, str], protocol: str
) -> None:
    gateway = await serve(SHARED)

    assert await detect_error_protocol(gateway, model, key, **headers) == protocol
    assert gateway.records[0].protocol == protocol


async def test_protocol_header_is_ignored_unless_enabled(serve: Serve) -> None:
    gateway = await serve(WITHOUT_HEADER)

    assert await detect_error_protocol(gateway, "m", "plain", **NAMED) == "triton"


async def test_invalid_key_gets_an_error_of_the_first_protocol(
    serve: Serve,
) -> None:
    gateway = await serve(WITHOUT_HEADER)

    response = await gateway.http.post("/v2/models/m/generate", headers={"api-key": "wrong"})

    assert response.status_code in {401, 403}
    assert response.json().keys() == {"error"}


async def test_path_of_only_one_protocol_selects_that_protocol(serve: Serve) -> None:
    gateway = await serve(SHARED)
    key = {"api-key": "plain"}

    slots = await gateway.http.get("/v2/models/m/getSlotCount", headers=key)
    index = await gateway.http.post("/v2/repository/index", headers=key)

    assert "total_slots" in slots.json()
    assert isinstance(index.json(), list)
