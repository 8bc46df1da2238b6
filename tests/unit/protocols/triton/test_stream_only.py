"""A model that refuses generate is streamed from then on, and its stream collected."""

import pytest

from protocols.core.errors import WorkerFailed
from protocols.core.request import GenerationRequest
from protocols.triton import upstream
from protocols.triton.endpoints import Triton
from protocols.triton.errors import needs_stream
from protocols.triton.passthrough import merge_stream

REFUSAL = (
    b'{"error":"generate expects model to produce exactly 1 response, use generate stream for '
    b'model that generates various number of responses"}'
)
REQUEST = GenerationRequest(model="m", kind="completion", prompts=("hi",))


def test_a_refusal_changes_the_endpoint_of_the_model_once() -> None:
    worker = Triton()
    refusal = worker.read_error(400, {}, REFUSAL)

    assert needs_stream(refusal)
    assert worker.encode_request(REQUEST).path.endswith("/generate")
    assert worker.learn_from_error("m", refusal)
    assert worker.encode_request(REQUEST).path.endswith("/generate_stream")
    assert worker.streams_always("m")
    assert not worker.learn_from_error("m", refusal)


def test_other_errors_change_nothing() -> None:
    worker = Triton()

    assert not worker.learn_from_error("m", worker.read_error(400, {}, b'{"error":"no memory"}'))
    assert not worker.streams_always("m")


def test_only_so_many_models_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_MAX_REMEMBERED_MODELS", 1)
    worker = Triton()
    refusal = worker.read_error(400, {}, REFUSAL)

    assert worker.learn_from_error("m", refusal)
    assert not worker.learn_from_error("n", refusal)


def test_texts_are_joined_and_other_values_are_the_last() -> None:
    data = (
        b'data: {"model_name":"w","text_output":"a","n":1,"T":["x"]}\n\n'
        b'data: {"model_name":"w","text_output":"b","n":2,"T":["y"]}\n\n'
        b'data: {"model_name":"w","text_output":"c","n":3,"T":["y","z"]}'
    )

    merged = merge_stream(data)

    assert merged == b'{"model_name":"w","text_output":"abc","n":3,"T":["y","z"]}'


def test_an_error_is_the_whole_response() -> None:
    assert merge_stream(b'data: {"a":"b"}\n\ndata: {"error":"x"}\n\n') == b'{"error":"x"}'


def test_a_body_without_events_is_kept() -> None:
    assert merge_stream(b"") == b""


def test_an_event_that_is_not_json_is_the_workers_failure() -> None:
    with pytest.raises(WorkerFailed):
        merge_stream(b"data: no\n\n")
