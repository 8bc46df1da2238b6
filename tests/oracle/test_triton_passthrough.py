"""Through the gateway, a Triton client gets the same responses as from the real server.

Requests are passed through unchanged, so no difference is intended, except that errors of models
are redacted.
"""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.conftest import RunningGateway, Serve
from tests.oracle.request_rows import (
    VLLM,
    Row,
    iterate_batch_rows,
    iterate_body_rows,
    iterate_path_rows,
)

pytestmark = pytest.mark.oracle

FRONT = """
listeners:
  - address: "127.0.0.1:0"
    protocols:
      - triton
      - {{name: triton, profile: trtllm, prefix: /trtllm}}
      - {{name: triton, profile: plain, prefix: /plain}}
limits: {{drain_timeout: 1s}}
backends:
  vllm: {{protocol: triton, profile: vllm, workers: ["{url}"]}}
  trtllm: {{protocol: triton, profile: trtllm, workers: ["{url}"]}}
  plain: {{protocol: triton, profile: plain, workers: ["{url}"]}}
models:
  vllm_like: {{backend: vllm}}
  vllm_fails_first: {{backend: vllm}}
  vllm_fails_third: {{backend: vllm}}
  nope: {{backend: vllm}}
  trt_like: {{backend: trtllm}}
  mock_llm: {{backend: plain}}
  vllm_like_public: {{backend: vllm, model: vllm_like/versions/1}}
  vllm_fails_first_public: {{backend: vllm, model: vllm_fails_first}}
  vllm_fails_third_public: {{backend: vllm, model: vllm_fails_third}}
  nope_public: {{backend: vllm, model: nope}}
  trt_like_public: {{backend: trtllm, model: trt_like}}
  mock_llm_public: {{backend: plain, model: mock_llm}}
"""
MOUNTS = {"trt_like": "/trtllm", "mock_llm": "/plain"}
MOCK = "/v2/models/mock_llm"
MOCKED = [
    *(
        b'{"PROMPT":"a","STREAM":true,"REPETITION":%d%b}' % (times, fields)
        for times in (0, 1, 3)
        for fields in (b"", b',"FAIL_LAST":true', b',"id":"7"')
    ),
    b'{"PROMPT":["a"],"STREAM":[true],"parameters":{"REPETITION":2}}',
    b'{"PROMPT":"a","STREAM":false}',
    b'{"PROMPT":"a","STREAM":false,"OUTPUT_0_DIM":true}',
    b'{"PROMPT":"a","STREAM":true,"OUTPUT_0_DIM":true,"REPETITION":2}',
    b'{"PROMPT":"a","STREAM":false,"input_ids":[100,200]}',
    b'{"PROMPT":"\\"model_name\\":\\"mock_llm\\"","STREAM":false,"id":"mock_llm"}',
    b'{"PROMPT":"a\xff","STREAM":false}',
    b'{"PROMPT":"a","STREAM":true,"REPETITION":2,"x":[1]}',
    b'{"PROMPT":"a","STREAM":true,"PROMPT":"b"}',
    b'{"PROMPT":"a","STREAM":true,"STREAM":true}',
    b'{"PROMPT":"a"}',
    b'{"STREAM":true,"other":"x"}',
    b'{"PROMPT":1,"STREAM":true}',
    b'{"STREAM":1,"PROMPT":true}',
    b'{"PROMPT":{"USER":"a"},"STREAM":true}',
    b'{"PROMPT":"a","STREAM":true,"parameters":1}',
    b'{"PROMPT":"a","STREAM":true,"parameters":{"nested":{"twice":1}}}',
    b'{"PROMPT":"a","STREAM":true,"input_ids":[1.5]}',
    b'{"PROMPT":"a","STREAM":true,"id":7}',
    b'{"PROMPT":"a","STREAM":true',
    b'{"abc":123}',
    b"{}",
    b"[]",
    b"",
]


def iterate_generate_rows() -> Iterator[Row]:
    """Yield bodies of generate and generate_stream."""
    ends = ("/generate", "/generate_stream")
    for row in iterate_path_rows():
        if row.method == "POST" and row.path.startswith(VLLM) and row.path.endswith(ends):
            yield row
    yield from iterate_body_rows()
    yield from iterate_batch_rows()
    for end in ends:
        for body in MOCKED:
            yield Row("POST", MOCK + end, body)
        for body in (b"", b"{", b'{"text_input":"a"}'):
            yield Row("POST", "/v2/models/nope" + end, body)


ROWS = list(iterate_generate_rows())


@pytest.fixture
async def gateway(serve: Serve, triton: str) -> RunningGateway:
    """A gateway in front of the real server."""
    return await serve(FRONT.format(url=triton))


@pytest.fixture
async def triton_client(triton: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the real server."""
    async with httpx.AsyncClient(base_url=triton, timeout=30) as http:
        yield http


async def send_row(http: httpx.AsyncClient, row: Row, path: str) -> tuple[int, str | None, bytes]:
    """Send a request; return status, content type and body."""
    response = await http.request(row.method, path, content=row.body, headers=dict(row.headers))
    return response.status_code, response.headers.get("content-type"), response.content


STREAMS_ONLY = b"generate expects model to produce exactly 1 response"
"""How Triton refuses an unary request for a model that answers with several responses."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_passthrough_response_equals_the_triton_response(
    triton_client: httpx.AsyncClient, gateway: RunningGateway, row: Row
) -> None:
    """This holds under the model's own name, and under another public name."""
    name = row.path.split("/")[3]
    other, mount = f"{name}_public", MOUNTS.get(name, "")
    status, kind, body = await send_row(triton_client, row, row.path)
    renamed = body
    for form in (b'"model_name":"%b"', b"'%b'"):
        renamed = renamed.replace(form % name.encode(), form % other.encode())

    own = await send_row(gateway.http, row, mount + row.path)
    public = await send_row(gateway.http, row, mount + row.path.replace(name, other, 1))

    if STREAMS_ONLY in body:  # the gateway collects the model's stream instead
        assert STREAMS_ONLY not in own[2] + public[2]
        return
    assert own == (status, kind, body)
    assert public == (status, kind, renamed)


@pytest.mark.parametrize("end", ["generate", "generate_stream"])
async def test_traceback_is_removed_from_the_model_error(
    triton_client: httpx.AsyncClient, gateway: RunningGateway, end: str
) -> None:
    row = Row("POST", f"{MOCK}/{end}", b'{"PROMPT":"a","STREAM":true,"REPETITION":"x"}')
    status, kind, body = await send_row(triton_client, row, row.path)
    assert b"\\n\\nAt:" in body

    own = await send_row(gateway.http, row, "/plain" + row.path)

    assert own[:2] == (status, kind)

    message = own[2].decode().strip().removeprefix("data: ")
    assert message.startswith(
        '{"error":"Failed to process the request(s) for model \'mock_llm_0_0\''
    )
    assert "\\n" not in message
    assert len(message) <= len('{"error":""}') + 300


async def test_client_errors_do_not_eject_the_worker(gateway: RunningGateway) -> None:
    wrong = (b"{", b"", b'{"PROMPT":1,"STREAM":true}', b'{"PROMPT":"a"}', b'{"a":1,"a":{}}')
    for body in wrong * 4:
        for end in ("generate", "generate_stream"):
            response = await gateway.http.post(f"/plain{MOCK}/{end}", content=body)
            assert response.status_code in {400, 500}

    good = await gateway.http.post(
        f"/plain{MOCK}/generate", content=b'{"PROMPT":"a","STREAM":false}'
    )
    assert good.status_code == 200
    assert {record.outcome for record in gateway.records[:-1]} == {"client_error"}
    assert gateway.records[-1].usage is not None
