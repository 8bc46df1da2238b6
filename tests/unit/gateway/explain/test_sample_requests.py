"""Sample requests, and requests of which a part is given."""

import pytest

from gateway.explain.report import (
    ExplainRequest,
)
from gateway.explain.sample_requests import PartialRequest, build_sample_request, complete_request
from gateway.routing.paths import AdapterMount
from tests.unit.gateway.explain.test_dry_run import build_handlers


class FakeAdapter:
    """A protocol without workers."""

    name = "mute"


def test_protocol_without_upstream_adapter_has_no_sample_request() -> None:
    assert build_sample_request(AdapterMount(FakeAdapter()), "m", None, stream=False) is None  # type: ignore[arg-type]


def test_every_client_protocol_has_a_sample_request() -> None:
    mounts = [mount for one in build_handlers().values() for mount in one.path_router.mounts]

    clients_only = {one.adapter.name for one in mounts if not hasattr(one.adapter, "read_error")}
    assert clients_only == {"ollama"}

    for mount in (one for one in mounts if one.adapter.name not in clients_only):
        for stream in (False, True):
            sample_request = build_sample_request(mount, "chat", None, stream=stream)
            assert sample_request is not None
            assert sample_request.path.startswith(mount.prefix)


CHAT = b'{"messages":[],"model":"mine"}'


@pytest.mark.parametrize(
    ("partial", "path", "body"),
    [
        (PartialRequest(path="/v1/models"), "/v1/models", b""),
        (PartialRequest(path="/v1/chat/completions", body=CHAT), "/v1/chat/completions", CHAT),
        (PartialRequest(body=CHAT), "/v1/chat/completions", CHAT),
        (
            PartialRequest("new", body=CHAT, stream=True),
            "/v1/chat/completions",
            b'{"messages":[],"model":"new","stream":true}',
        ),
        (PartialRequest("new", body=b"[1]"), "/v1/chat/completions", b"[1]"),
        (PartialRequest("new", path="/nowhere", body=b"x"), "/nowhere", b"x"),
        (
            PartialRequest(path="/v2/models/chat/infer", body=CHAT, stream=True),
            "/v2/models/chat/infer",
            CHAT,
        ),
        (
            PartialRequest("a", protocol="triton", body=b'{"text_input":"x"}'),
            "/v2/models/a/generate",
            b'{"text_input":"x"}',
        ),
    ],
)
def test_partial_request_is_completed(partial: PartialRequest, path: str, body: bytes) -> None:
    completed = complete_request(ExplainRequest(path="/"), partial, build_handlers())

    assert (completed.path, completed.body_bytes) == (path, body)


@pytest.mark.parametrize(
    ("partial", "says"),
    [
        (PartialRequest(), "give the --model"),
        (PartialRequest(body=b"{}"), "give the --model"),
        (PartialRequest(body=b'{"model":1}'), "give the --model"),
        (PartialRequest("m", protocol="none"), "give --path"),
        (PartialRequest(path="/v1/chat/completions"), "give --model, or a --body"),
        (PartialRequest("m", path="/v2/models/m/infer"), "give --model, or a --body"),
    ],
)
def test_missing_request_parts_are_reported(partial: PartialRequest, says: str) -> None:
    with pytest.raises(LookupError, match=says):
        complete_request(ExplainRequest(path="/"), partial, build_handlers())


def test_completed_request_keeps_its_listener() -> None:
    handlers = build_handlers()
    address = list(handlers)[-1]

    completed = complete_request(
        ExplainRequest(path="/", listener=address), PartialRequest("m"), handlers
    )

    assert completed.listener == address
