"""Two dialects have the same paths; which is meant is configuration, never the body."""

import hashlib

import pytest

from tests.conftest import Running, Serve

KEYS = "\n".join(
    f'  - {{name: {name}, sha256: "{hashlib.sha256(name.encode()).hexdigest()}"{more}}}'
    for name, more in (("plain", ""), ("mindful", ", protocol: mindie"))
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


async def spoken(gateway: Running, model: str, key: str, **headers: str) -> str:
    """The dialect of the answer, by how it tells of a body that can't be read."""
    answer = await gateway.http.post(
        f"/v2/models/{model}/generate",
        content=b"{",
        headers={"authorization": f"Bearer {key}", **headers},
    )
    return {500: "triton", 422: "mindie"}[answer.status_code]


NAMED = {"x-interlingua-protocol": "mindie"}


@pytest.mark.parametrize(
    ("model", "key", "headers", "dialect"),
    [
        ("m", "plain", {}, "triton"),
        ("npu", "plain", {}, "mindie"),
        ("m", "mindful", {}, "mindie"),
        ("m", "plain", NAMED, "mindie"),
        ("npu", "mindful", {"x-interlingua-protocol": "triton"}, "triton"),
        ("m", "plain", {"x-interlingua-protocol": "nonsense"}, "triton"),
    ],
)
async def test_the_dialect_is_the_headers_the_keys_the_models_or_the_first(
    serve: Serve, model: str, key: str, headers: dict[str, str], dialect: str
) -> None:
    gateway = await serve(SHARED)

    assert await spoken(gateway, model, key, **headers) == dialect
    assert gateway.records[0].protocol == dialect


async def test_a_header_names_no_dialect_where_it_is_not_allowed(serve: Serve) -> None:
    gateway = await serve(WITHOUT_HEADER)

    assert await spoken(gateway, "m", "plain", **NAMED) == "triton"


async def test_a_bad_key_chooses_nothing_and_is_told_in_the_first_ones_words(
    serve: Serve,
) -> None:
    gateway = await serve(WITHOUT_HEADER)

    answer = await gateway.http.post("/v2/models/m/generate", headers={"api-key": "wrong"})

    assert answer.status_code in {401, 403}
    assert answer.json().keys() == {"error"}


async def test_a_path_that_only_one_of_them_has_is_its_own(serve: Serve) -> None:
    gateway = await serve(SHARED)
    key = {"api-key": "plain"}

    slots = await gateway.http.get("/v2/models/m/getSlotCount", headers=key)
    index = await gateway.http.post("/v2/repository/index", headers=key)

    assert "total_slots" in slots.json()
    assert isinstance(index.json(), list)
