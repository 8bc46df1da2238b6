"""The model of a request that is forwarded: where it stands, and what replaces it."""

import json
from typing import Any

import pytest

from gateway.routing.paths import AdapterMount, PathRouter
from protocols.core.errors import (
    ClientError,
    InvalidParameter,
    MalformedRequest,
    UnsupportedFeature,
)
from protocols.core.events import Usage
from protocols.core.interfaces import ClientRequest, ProxiedModel, SupportsProxy
from protocols.core.restricted import RestrictedAdapter
from protocols.openai.endpoints import OpenAI

ADAPTER = OpenAI()
ENDPOINTS = {one.operation: one for one in ADAPTER.endpoints if one.task == "proxy"}
NO_CATALOG: Any = None
FORM = "multipart/form-data; boundary=b0"


def build_call(body: bytes, content_type: str | None = FORM) -> ClientRequest:
    headers = {} if content_type is None else {"content-type": content_type}
    return ClientRequest(ENDPOINTS["transcription"], {}, headers, "", body, "/v1/audio")


def find(body: bytes, content_type: str | None = FORM, *, complete: bool = True) -> ProxiedModel:
    found = ADAPTER.find_proxied_model(build_call(body, content_type), is_complete=complete)
    assert found is not None
    return found


def build_part(head: str, value: bytes) -> bytes:
    return f"\r\n--b0\r\n{head}\r\n\r\n".encode() + value


def build_body(*parts: bytes) -> bytes:
    return b"".join(parts)[2:] + b"\r\n--b0--\r\n"


FILE = build_part('Content-Disposition: form-data; name="file"; filename="a"', b"\x00\r\n--b1\xff")
MODEL = build_part('Content-Disposition: form-data; name="model"', b"m-1")


def test_each_operation_has_its_path_of_openais_api() -> None:
    assert {ADAPTER.get_proxied_path(name, "m"): one.path for name, one in ENDPOINTS.items()} == {
        f"/v1/{path}": f"/v1/{path}"
        for path in (
            "audio/speech", "audio/transcriptions", "audio/translations", "images/generations",
            "images/edits", "images/variations", "moderations",
        )
    }  # fmt: skip
    assert OpenAI(prefix="/x").get_proxied_path("speech", "m") == "/x/audio/speech"
    assert isinstance(RestrictedAdapter(ADAPTER, ()), SupportsProxy)


def test_model_of_a_json_body_is_replaced_and_the_rest_kept() -> None:
    body = b'{"input":"\\u00e9", "model": "a", "n":1.0}'
    found = find(body, "application/json")
    assert found.name == "a"
    assert found.rename(body, "b") == b'{"input":"\\u00e9","model":"b","n":1.0}'
    assert find(b"{}", None).name == ""
    assert find(b'{"model":null}', None).name == ""


@pytest.mark.parametrize(
    ("body", "error"),
    [(b'{"model":1}', InvalidParameter), (b"{", MalformedRequest), (b"[]", MalformedRequest)],
)
def test_invalid_json_body_is_refused(body: bytes, error: type[ClientError]) -> None:
    with pytest.raises(error):
        find(body, "application/json")


def test_incomplete_json_body_is_awaited() -> None:
    call = build_call(b'{"model":"a"', "application/json")
    assert ADAPTER.find_proxied_model(call, is_complete=False) is None


@pytest.mark.parametrize("parts", [[MODEL, FILE], [FILE, MODEL], [FILE, FILE, MODEL, FILE]])
@pytest.mark.parametrize("boundary", ["b0", '"b0"', "b0 ; charset=utf-8"])
def test_model_of_a_form_is_found_in_any_part_and_replaced(
    parts: list[bytes], boundary: str
) -> None:
    body = build_body(*parts)
    found = find(body, f"Multipart/Form-Data; boundary={boundary}")
    assert found.name == "m-1"
    assert found.rename(body, "other") == body.replace(b"m-1", b"other")


@pytest.mark.parametrize(
    "head",
    [
        "content-disposition: form-data; name=model",
        'Content-Type: text/plain\r\nContent-Disposition: form-data; x="y"; name="model"',
        'CONTENT-DISPOSITION:form-data;name="model"',
    ],
)
def test_name_of_a_field_may_be_written_in_several_ways(head: str) -> None:
    assert find(build_body(FILE, build_part(head, b"m"))).name == "m"


@pytest.mark.parametrize(
    "head",
    [
        'Content-Disposition: form-data; filename="model"',
        'Content-Disposition: form-data; name="model[]"',
        'Content-Disposition: form-data; name=""',
        "X: y",
    ],
)
def test_other_fields_are_not_taken_for_the_model(head: str) -> None:
    found = find(build_body(build_part(head, b"m")))
    assert found.name == ""
    assert found.rename(b"as it is", "other") == b"as it is"


def test_form_is_awaited_until_the_model_is_complete() -> None:
    body = build_body(FILE, MODEL, FILE)
    end = body.index(b"m-1") + len(b"m-1\r\n--b0")
    for size in range(end):
        call = build_call(body[:size])
        assert ADAPTER.find_proxied_model(call, is_complete=False) is None, size
    assert find(body[:end], complete=False).name == "m-1"


@pytest.mark.parametrize(
    ("body", "content_type", "error"),
    [
        (build_body(MODEL), "multipart/form-data", MalformedRequest),
        (build_body(MODEL), "multipart/form-data; boundary=", MalformedRequest),
        (build_body(MODEL), "multipart/form-data; boundary=" + "b" * 71, MalformedRequest),
        (b"preamble" + build_body(MODEL), FORM, MalformedRequest),
        (b"--b0\r\n" + b"x" * 20_000, FORM, MalformedRequest),
        (build_body(MODEL).replace(b"m-1", b""), FORM, InvalidParameter),
        (build_body(MODEL).replace(b"m-1", b"\xff"), FORM, InvalidParameter),
        (build_body(MODEL).replace(b"m-1", b"m" * 1025), FORM, InvalidParameter),
    ],
)
def test_invalid_form_is_refused(body: bytes, content_type: str, error: type[ClientError]) -> None:
    with pytest.raises(error):
        find(body, content_type)


def test_form_that_ends_early_has_no_model() -> None:
    for body in (b"", b"--b0", b"--b0\r\nContent-Disposition: form-data", build_body(FILE)[:-9]):
        assert find(body).name == ""


@pytest.mark.parametrize("operation", ["files", "batches"])
def test_files_and_batches_are_refused_by_name(operation: str) -> None:
    endpoints = [one for one in ADAPTER.endpoints if one.operation == operation]
    assert {one.task for one in endpoints} == {"inform"}
    for endpoint in endpoints:
        call = ClientRequest(endpoint, {"id": "x"}, {}, "", b"", endpoint.path)
        with pytest.raises(UnsupportedFeature) as caught:
            ADAPTER.handle_info_request(call, NO_CATALOG)
        answer = ADAPTER.encode_error(caught.value, call)
        assert answer.status == 400
        assert operation[:4].title() in json.loads(answer.body)["error"]["message"]


# --- Azure: the deployment in the path is the model -----------------------------------------------

AZURE = OpenAI("azure")
SPEECH = "/openai/deployments/tts/audio/speech"


def find_deployment(
    body: bytes, content_type: str | None = None, query: str = "api-version=2024-10-21"
) -> ProxiedModel:
    match = PathRouter([AdapterMount(AZURE)]).find_endpoint("POST", SPEECH)
    headers = {} if content_type is None else {"content-type": content_type}
    call = ClientRequest(match.endpoint, match.params, headers, query, body, SPEECH)
    found = AZURE.find_proxied_model(call, is_complete=True)
    assert found is not None
    return found


def test_deployments_have_the_paths_that_azures_client_calls() -> None:
    paths = {one.path for one in AZURE.endpoints if one.task == "proxy"}

    for path in ("audio/speech", "audio/transcriptions", "images/generations", "images/edits"):
        assert f"/openai/deployments/{{deployment}}/{path}" in paths
        assert f"/openai/v1/{path}" in paths
    assert "/openai/v1/moderations" in paths


@pytest.mark.parametrize("body", [b'{"input":"a"}', b'{"model":"x","input":"a"}'])
def test_deployment_of_the_path_counts_instead_of_the_body(body: bytes) -> None:
    found = find_deployment(body)

    assert (found.name, found.is_in_body) == ("tts", False)
    assert json.loads(found.rename(body, "w")) == {"input": "a", "model": "w"}


def test_deployment_that_the_body_names_too_is_in_the_body() -> None:
    assert find_deployment(b'{"model":"tts"}').is_in_body


def test_form_without_a_model_gets_the_deployment_as_a_field() -> None:
    body = build_body(FILE)
    found = find_deployment(body, FORM)
    renamed = found.rename(body, "w")

    assert (found.name, found.is_in_body) == ("tts", False)
    assert renamed.endswith(body)
    assert find(renamed).name == "w"


def test_form_with_a_model_gets_the_deployment_in_its_place() -> None:
    body = build_body(MODEL, FILE)

    assert find(find_deployment(body, FORM).rename(body, "w")).name == "w"


def test_deployment_needs_an_api_version() -> None:
    with pytest.raises(ClientError):
        find_deployment(b"{}", query="")


def test_azures_workers_have_paths_of_deployments() -> None:
    assert AZURE.get_proxied_path("speech", "a b") == (
        "/openai/deployments/a%20b/audio/speech?api-version=2024-10-21"
    )
    assert AZURE.get_proxied_path("moderation", "m") is None
    newest = OpenAI("azure", api_version="v1")
    assert newest.get_proxied_path("moderation", "m") == "/openai/v1/moderations"


# --- the usage of responses -----------------------------------------------------------------------

USAGE = b'{"type":"tokens","input_tokens":14,"input_token_details":{"a":1},"output_tokens":45}'


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'{"text":"a","usage":' + USAGE + b"}", Usage(14, 45)),
        (b'data: {"type":"transcript.text.done","usage": ' + USAGE + b"}\n\n", Usage(14, 45)),
        (b'b64"}],"usage":{"input_tokens":3}}', Usage(3)),
        (b'{"usage":{"type":"duration","seconds":4}}', None),
        (b'{"usage":{"input_tokens":-1}}', None),
        (b'{"usage":{"input_tokens":1', None),
        (b'{"usage":{' + b'"a":{},' * 9 + b'"input_tokens":1}}', None),
        (b'{"text":"\\"usage\\":{\\"input_tokens\\":5}"}', None),
        (b'{"usage":null}', None),
        (b"", None),
    ],
)
def test_usage_is_read_at_the_end_of_a_response(tail: bytes, usage: Usage | None) -> None:
    assert ADAPTER.read_proxied_usage(tail) == usage
