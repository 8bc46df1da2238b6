"""The gateway's Triton protocol answers the same requests like a real Triton server."""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.conformance.cases import Case, run_case
from tests.conformance.triton import CASES
from tests.conftest import Serve
from tests.oracle.request_rows import (
    DIFFERENCES,
    Row,
    iterate_batch_rows,
    iterate_body_rows,
    iterate_path_rows,
)
from tests.oracle.request_rows_infer import iterate_infer_rows

pytestmark = pytest.mark.oracle

MODELS = (Path(__file__).parent / "gateway.yaml").read_text("utf-8")
ROWS = [*iterate_path_rows(), *iterate_body_rows(), *iterate_batch_rows(), *iterate_infer_rows()]
TRUE = [case for case in CASES if not case.why]

Seen = tuple[int, str | None, bytes]


@pytest.fixture
async def triton_client(triton: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the real server."""
    async with httpx.AsyncClient(base_url=triton, timeout=30) as http:
        yield http


@pytest.fixture
async def gateway_client(serve: Serve) -> httpx.AsyncClient:
    """A client of the gateway."""
    return (await serve(MODELS)).http


async def send_row(http: httpx.AsyncClient, row: Row, prefix: str = "") -> Seen:
    """Send a request; return status, content type and body."""
    response = await http.request(
        row.method, prefix + row.path, content=row.body, headers=dict(row.headers)
    )
    return response.status_code, response.headers.get("content-type"), response.content


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_gateway_response_equals_the_triton_response(
    triton_client: httpx.AsyncClient, gateway_client: httpx.AsyncClient, row: Row
) -> None:
    real = await send_row(triton_client, row)
    own = await send_row(gateway_client, row, "/trtllm" if "trt_like" in row.path else "")

    if row.differs:
        assert own != real, f"no longer different: {DIFFERENCES[row.differs]}"
    else:
        assert own == real


def test_every_documented_difference_has_a_row() -> None:
    assert {row.differs for row in ROWS} - {""} == DIFFERENCES.keys()


@pytest.mark.parametrize("case", TRUE, ids=lambda case: case.id)
async def test_conformance_cases_pass_on_a_real_triton(
    triton_client: httpx.AsyncClient, case: Case
) -> None:
    await run_case(triton_client, case, key=None)


async def test_triton_unloads_a_model(triton_client: httpx.AsyncClient) -> None:
    """TR-52, which the gateway does not support."""
    row = Row("POST", "/v2/models/mock_llm/generate", b"{}")
    gone = b'{"error":"Request for unknown model: \'mock_llm\' has no available versions"}'
    listed = {"name": "mock_llm", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    try:
        assert (await triton_client.post("/v2/repository/models/mock_llm/unload")).is_success
        async with asyncio.timeout(10):
            while listed not in (await triton_client.post("/v2/repository/index")).json():  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.05)
        assert await send_row(triton_client, row) == (404, "application/json", gone)
    finally:
        assert (await triton_client.post("/v2/repository/models/mock_llm/load")).is_success


GOOD = [
    b'{"text_input":"hi\\u00e9\\ud83d\\ude00","parameters":{"a":1.5e3,"b":true,"e":"\\n"}}',
    b'{"text_input":"a","x":null,"y":[1,2,{"x":-0}]}',
    b'{"text_input":"a","a":NaN,"b":-Infinity,"c":false}',
    b'{"text_input":"a","id":"7"}',
    b" [1,2]\n",
    b'\xef\xbb\xbf{"text_input":"a"}',
]
BITS = b'{}[]:,"\\/ubnt0123456789.eE+-NaIinfty \n\x00\x01dDcC8'


def mutate_body(draw: random.Random) -> bytes:
    """Return a valid body with a few bytes removed, inserted or changed."""
    body = bytearray(draw.choice(GOOD))
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(body) + 1)
        match draw.randrange(5):
            case 0:
                del body[at : at + draw.randint(1, 3)]
            case 1:
                body[at:at] = bytes([draw.choice(BITS)])
            case 2:
                body[at : at + 1] = bytes([draw.choice(BITS)])
            case 3:
                del body[at:]
            case _:
                body[at:at] = bytes(draw.choices(BITS, k=3))
    return bytes(body)


LONE = re.compile(rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]")
"""A low surrogate without its high surrogate."""


def is_comparable(body: bytes) -> bool:
    """Return whether the body is Unicode and not for the model; DIFFERENCES lists the rest."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return LONE.search(body) is None and b'"n"' not in body


@pytest.mark.parametrize("seed", range(4))
async def test_malformed_bodies_get_equal_responses(
    triton_client: httpx.AsyncClient, gateway_client: httpx.AsyncClient, seed: int
) -> None:
    draw = random.Random(seed)
    bodies = [body for body in (mutate_body(draw) for _ in range(150)) if is_comparable(body)]
    assert len(bodies) > 100

    rows = [Row("POST", "/v2/models/vllm_like/generate", body) for body in bodies]
    differ = [
        row.body
        for row in rows
        if await send_row(triton_client, row) != await send_row(gateway_client, row)
    ]

    assert differ == []
