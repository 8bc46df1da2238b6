"""Probes: invalid requests are rejected as client errors, and affect no other request."""

from functools import partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gateway.tools.probe.client import (
    NotOffered,
    Probe,
    UnexpectedResponse,
    WorkerClient,
    WorkerResponse,
    error_statuses,
    expect,
)
from protocols.core.interfaces import UpstreamRequest
from protocols.core.json_text import decode_json
from protocols.core.request import SamplingParams, StopConditions

_TEMPERATURE: Final = 0.4375
_LIMIT: Final = 29
"""Marker values that locate a field in the encoded request."""
_HUGE: Final = 10_000_000


async def _invalid_body(worker: WorkerClient, body: bytes) -> str:
    request = worker.text_request("Say hi.")
    response = await worker.send_encoded(replace(worker.encode(request), body=body), request)
    return _check_refused(worker, response)


def _check_refused(worker: WorkerClient, response: WorkerResponse) -> str:
    if response.result is not None:
        raise UnexpectedResponse("the request is answered")
    is_error_status = response.status in error_statuses(worker.adapter)
    expect(
        response.is_refused or is_error_status,
        f"expected a client error, got {response.summary}",
    )
    return f"rejected: {response.summary}"


async def _truncated_body(worker: WorkerClient) -> str:
    request = worker.text_request("Say hi.")
    upstream_request = worker.encode(request)
    response = await worker.send_encoded(
        replace(upstream_request, body=upstream_request.body[: len(upstream_request.body) // 2]),
        request,
    )
    return _check_refused(worker, response)


async def _wrong_value(worker: WorkerClient, old: Any, new: Any, *, must_reject: bool) -> str:
    """Replace the value ``old`` of a field by ``new``, which the worker may or must reject."""
    sampling, stopping = SamplingParams(temperature=_TEMPERATURE), StopConditions(max_tokens=_LIMIT)
    request = worker.text_request("Say hi.", sampling=sampling, stopping=stopping)
    response = await worker.send_encoded(_replace_value(worker.encode(request), old, new), request)
    if response.result is not None and not must_reject:
        worker.quirks.append(f"{new!r} is accepted as a number")
        return "accepted"
    return _check_refused(worker, response)


def _replace_value(upstream_request: UpstreamRequest, old: Any, new: Any) -> UpstreamRequest:
    fields = decode_json(upstream_request.body)
    changed = _substitute(fields, old, new)
    if changed == fields:
        raise NotOffered("the body does not contain the field")
    return replace(upstream_request, body=msgspec.json.encode(changed))


def _substitute(value: Any, old: Any, new: Any) -> Any:
    match value:
        case dict():
            return {key: _substitute(item, old, new) for key, item in value.items()}
        case list():
            return [_substitute(item, old, new) for item in value]
        case str() if value.startswith("{"):
            return _substitute_text(value, old, new)
        case _:
            return new if value == old and type(value) is type(old) else value


def _substitute_text(text: str, old: Any, new: Any) -> str:
    """Replace a value within a string that holds JSON, as some protocols have it."""
    try:
        return msgspec.json.encode(_substitute(decode_json(text), old, new)).decode()
    except msgspec.DecodeError:
        return text


async def _number_as_text(worker: WorkerClient) -> str:
    text = "interlingua says hi"
    request = worker.text_request(text)
    response = await worker.send_encoded(_replace_value(worker.encode(request), text, 5), request)
    if response.result is not None:
        worker.quirks.append("a number is accepted as a text")
        return "accepted"
    return _check_refused(worker, response)


async def _huge_limit(worker: WorkerClient) -> str:
    """Disconnect after the first text: a model may generate without end."""
    request = worker.text_request("Say hi.", stream=True, stopping=StopConditions(max_tokens=_HUGE))
    response = await worker.send_and_disconnect(request)
    if response.error is None:
        return "accepted"
    return _check_refused(worker, response)


async def _method(worker: WorkerClient) -> str:
    response = await worker.fetch(
        replace(worker.encode(worker.text_request("hi")), method="PUT", body=b"{}")
    )
    expect(response.status in range(400, 500), f"PUT is answered {response.status}")
    return f"{response.status}"


async def _path(worker: WorkerClient) -> str:
    response = await worker.fetch(UpstreamRequest("/interlingua/no/such/path", b"", method="GET"))
    expect(response.status in range(400, 500), f"it is answered {response.status}")
    return f"{response.status}"


async def _recovery(worker: WorkerClient) -> str:
    """After any invalid request, a valid one is answered."""
    request = worker.text_request("Say hi.")
    upstream_request = worker.encode(request)
    for body in (b"", b"{", upstream_request.body[:-1], b"\xff" * 64):
        await worker.send_encoded(replace(upstream_request, body=body), request)
    choice = (await worker.send(request)).choice
    return f"answered: {choice.finish_reason}"


PROBES: Final = (
    Probe(
        "not-json", "A body that is not JSON is rejected.", partial(_invalid_body, body=b"hello")
    ),
    Probe("no-body", "An empty body is rejected.", partial(_invalid_body, body=b"")),
    Probe("empty-object", "An empty JSON object is rejected.", partial(_invalid_body, body=b"{}")),
    Probe("half-body", "A truncated body is rejected.", _truncated_body),
    Probe(
        "not-utf-8",
        "A body that is not UTF-8 is rejected.",
        partial(_invalid_body, body=b"\xff\xfe{}"),
    ),
    Probe(
        "deep-body",
        "A body of 100,000 nested arrays is rejected.",
        partial(_invalid_body, body=b"[" * 100_000),
    ),
    Probe(
        "text-is-a-number", "A number in place of a text is rejected or accepted.", _number_as_text
    ),
    Probe(
        "temperature-is-a-text",
        "A string as temperature is rejected.",
        partial(_wrong_value, old=_TEMPERATURE, new="hot", must_reject=True),
        needs=("sampling.temperature",),
    ),
    Probe(
        "temperature-is-a-list",
        "An array as temperature is rejected.",
        partial(_wrong_value, old=_TEMPERATURE, new=[1], must_reject=True),
        needs=("sampling.temperature",),
    ),
    Probe(
        "max-tokens-is-a-text",
        "A string as token limit is rejected.",
        partial(_wrong_value, old=_LIMIT, new="many", must_reject=True),
        needs=("stopping.max_tokens",),
    ),
    Probe(
        "max-tokens-negative",
        "A negative token limit is rejected or accepted.",
        partial(_wrong_value, old=_LIMIT, new=-5, must_reject=False),
        needs=("stopping.max_tokens",),
    ),
    Probe(
        "max-tokens-huge",
        "A token limit of millions is accepted or rejected.",
        _huge_limit,
        needs=("stopping.max_tokens",),
    ),
    Probe("wrong-method", "A wrong method is rejected.", _method),
    Probe("wrong-path", "A wrong path is rejected.", _path),
    Probe("after-mistakes", "A valid request after invalid ones is answered.", _recovery),
)
