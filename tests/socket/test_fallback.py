"""Who answers in a model's stead."""

import pytest

from tests.conftest import Serve

FRONT = """
listeners: [{address: "127.0.0.1:0", dialects: [openai]}]
backends:
  gone: {dialect: openai, workers: ["http://127.0.0.1:1"]}
  broken: {kind: echo, script: [a, b], fail: {how: error}}
  late: {kind: echo, script: [a, b], fail: {how: cut, after: 1}}
  well: {kind: echo, script: [fine]}
models:
  chat:
    versions: {"1": {backend: gone}, "2": {backend: broken}, "3": {backend: well}}
    split: {weights: {"1": 1, "2": 0, "3": 0}}
    fallback: ["2", spare]
  spare: {backend: well}
  own: {versions: {"1": {backend: gone}, "2": {backend: well}}, split: {weights: {"1": 1}},
        fallback: ["1", "2"]}
  mid: {backend: late, fallback: [spare]}
  lost: {backend: gone, fallback: [also-lost]}
  also-lost: {backend: broken}
"""


def ask(model: str, *, stream: bool = False) -> dict[str, object]:
    return {"model": model, "stream": stream, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("model", "tried", "version"),
    [
        ("chat", ["chat@1 Overloaded", "chat@2 WorkerFailed"], "1"),
        ("own", ["own@1 Overloaded"], "2"),
    ],
)
async def test_the_next_in_line_answers(
    serve: Serve, model: str, tried: list[str], version: str, *, stream: bool
) -> None:
    front = await serve(FRONT)

    answer = await front.http.post("/v1/chat/completions", json=ask(model, stream=stream))

    assert answer.status_code == 200
    assert "fine" in answer.text
    assert f'"model":"{model}"' in answer.text
    assert answer.headers["x-served-model"] == version
    assert list(front.records[0].fell_back) == tried
    assert front.records[0].outcome == "ok"


async def test_when_nobody_can_the_last_says_why(serve: Serve) -> None:
    front = await serve(FRONT)
    answer = await front.http.post("/v1/chat/completions", json=ask("lost"))
    assert answer.status_code == 502
    assert list(front.records[0].fell_back) == ["lost@1 Overloaded"]


async def test_what_has_begun_is_never_begun_again(serve: Serve) -> None:
    front = await serve(FRONT)
    answer = await front.http.post("/v1/chat/completions", json=ask("mid", stream=True))
    assert b'"error"' in answer.content
    assert b"fine" not in answer.content


async def test_a_version_that_was_pinned_is_answered_by_no_other(serve: Serve) -> None:
    front = await serve(FRONT)
    answer = await front.http.post("/v1/chat/completions", json=ask("chat@1"))
    assert answer.status_code == 503


async def test_the_clients_own_fault_goes_no_further(serve: Serve) -> None:
    front = await serve(FRONT)
    answer = await front.http.post("/v1/chat/completions", json=ask("chat") | {"temperature": 9})
    assert answer.status_code == 400
    assert front.records[0].fell_back == ()
