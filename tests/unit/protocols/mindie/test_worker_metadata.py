"""Other requests to a worker: health, limits, and stopping a request."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core.interfaces import ModelMetadataReader, SupportsCancel
from protocols.core.request import GenerationRequest, StopConditions
from protocols.mindie.endpoints import MindIE

SLOTS = b'{"total_slots":200,"free_slots":0,"available_tokens_length":8192}'
SERVER = b'{"name":"MindIE Server","version":"1.0","extensions":{"max_iter_times":512}}'


def make_completion(**fields: object) -> GenerationRequest:
    return GenerationRequest(model="a/b", kind="completion", prompts=("x",), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", MindIE.profiles)
def test_health_check_requests_v2_health_ready(profile: str) -> None:
    probe = MindIE(profile).health_request

    assert (probe.method, probe.path, probe.body) == ("GET", "/v2/health/ready", b"")


def test_cancel_request_bears_the_id_of_the_sent_request() -> None:
    adapter = MindIE()
    assert isinstance(adapter, SupportsCancel)

    wire = adapter.encode_cancel(make_completion(client_id="r 1"))

    assert (wire.method, wire.path) == ("POST", "/v2/models/a%2Fb/stopInfer")
    assert wire.headers == (("Content-Type", "application/json"),)
    assert json.loads(wire.body) == {"id": "r_1"}
    assert json.loads(adapter.encode_request(make_completion(client_id="r 1")).body)["id"] == "r_1"


def test_metadata_requests_read_slot_count_and_server_info() -> None:
    adapter = MindIE()
    assert isinstance(adapter, ModelMetadataReader)

    slots, server = adapter.metadata_requests("a/b")

    assert (slots.method, slots.path) == ("GET", "/v2/models/a%2Fb/getSlotCount")
    assert (server.method, server.path) == ("GET", "/v2")


@pytest.mark.parametrize(
    ("answers", "slots", "longest"),
    [
        ([SLOTS, SERVER], 200, 512),
        ([SLOTS], 200, None),
        ([None, SERVER], None, 512),
        ([], None, None),
        ([b"<html>", b"\xff"], None, None),
        ([b"\xff", b"[" * 100_000], None, None),
        ([b"[" * 100_000, b'{"extensions":{}}'], None, None),
        ([b'{"total_slots":0}', b'{"extensions":{"max_iter_times":0}}'], None, None),
        ([b'{"total_slots":"9"}', b'{"extensions":{"max_iter_times":2147483648}}'], None, None),
    ],
)
def test_metadata_sets_slot_count_and_max_tokens(
    answers: list[bytes | None], slots: int | None, longest: int | None
) -> None:
    adapter = MindIE()

    assert adapter.load_metadata("a/b", answers) == slots

    parameters = json.loads(adapter.encode_request(make_completion()).body)["parameters"]
    assert parameters["max_new_tokens"] == (longest or 2147483647)


def test_smaller_of_configured_and_reported_max_iter_times_applies() -> None:
    adapter = MindIE(max_iter_times=100)
    adapter.load_metadata("a/b", [None, SERVER])
    adapter.load_metadata("c", [None, b'{"extensions":{"max_iter_times":5}}'])

    request = make_completion(stopping=StopConditions(max_tokens=300))
    assert json.loads(adapter.encode_request(request).body)["parameters"]["max_new_tokens"] == 100


@given(st.lists(st.none() | st.binary(max_size=50), max_size=3))
def test_load_metadata_accepts_arbitrary_bytes(answers: list[bytes | None]) -> None:
    MindIE().load_metadata("m", answers)
