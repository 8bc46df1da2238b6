"""A body whose Content-Encoding is not read is a 415, or an error in the real server's words."""

from typing import Final

import pytest

from tests.conftest import RunningGateway, Serve
from tests.protocols import find_rows, list_mounts

CONFIG: Final = """\
listeners: [{address: "127.0.0.1:0", protocols: [
  openai, anthropic, ollama, OTHERS, {name: openai, profile: azure, prefix: /azure},
  {name: databricks, prefix: /databricks}, {name: ovms, prefix: /ovms}, {name: tgi, prefix: /tgi},
  {name: mindie, prefix: /mindie}, {name: triton, prefix: /triton}]}]
backends: {echo: {kind: echo, script: [hi]}}
models: {m: {backend: echo}}
""".replace("OTHERS", list_mounts())
CHAT: Final = "/chat/completions"
EXPECTED: Final = [
    (f"/v1{CHAT}", 415),
    ("/v1/messages", 415),
    ("/v1/responses", 415),
    ("/v1/embeddings", 415),
    ("/api/chat", 415),
    (f"/azure/openai/deployments/m{CHAT}?api-version=2024-10-21", 415),
    ("/databricks/serving-endpoints/m/invocations", 415),
    (f"/ovms/v3{CHAT}", 415),
    (f"/tgi/v1{CHAT}", 415),
    (f"/mindie/v1{CHAT}", 415),
    ("/triton/v2/models/m/generate", 400),
    ("/triton/v2/models/m/infer", 501),
    *((path, 415) for path, _ in find_rows("CONVERSATION").values()),
]


@pytest.fixture
async def gateway(serve: Serve) -> RunningGateway:
    return await serve(CONFIG)


async def test_unknown_encoding_is_an_unsupported_media_type(gateway: RunningGateway) -> None:
    """Triton's own words are those of its server."""
    for path, status in EXPECTED:
        answer = await gateway.http.post(
            path,
            content=b'{"model":"m"}',
            headers={"content-encoding": "br", "anthropic-version": "2023-06-01"},
        )
        assert answer.status_code == status, (path, answer.text)
        if status == 415:
            assert "'br'" in answer.text, (path, answer.text)


@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate"])
async def test_other_encodings_are_read(gateway: RunningGateway, encoding: str) -> None:
    """Given a body that is no gzip and no deflate, which is another error than 415."""
    answer = await gateway.http.post(
        f"/v1{CHAT}", content=b'{"model":"m"}', headers={"content-encoding": encoding}
    )
    assert answer.status_code == 400


async def test_empty_encoding_is_none(gateway: RunningGateway) -> None:
    for path in (f"/v1{CHAT}", "/v1/audio/speech"):
        answer = await gateway.http.post(
            path, content=b'{"model":"m","messages":5}', headers={"content-encoding": ""}
        )
        assert (answer.status_code, "encoding" in answer.text) == (400, False), path
