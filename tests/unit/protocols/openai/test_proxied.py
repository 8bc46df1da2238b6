"""The model of a forwarded request is found and replaced."""

import json
from typing import Any

import pytest

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
from tests.support.path_routers import get_path_router

ADAPTER = OpenAI()
ENDPOINTS = {one.operation: one for one in ADAPTER.endpoints if one.task == "proxy"}
NO_CATALOG: Any = None
FORM = "multipart/form-data; boundary=b0"


def build_call(body: bytes, content_type: str | None = FORM) -> ClientRequest:
    headers = {} if content_type is None else {"content-type": content_type}
    return ClientRequest(ENDPOINTS["transcription"], {}, headers, "", body, "/v1/audio")


def find(body: bytes, content_type: str | None = FORM) -> ProxiedModel:
    return ADAPTER.find_proxied_model(build_call(body, content_type))


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
    assert OpenAI().get_proxied_path("speech", "m") == "/v1/audio/speech"
    assert isinstance(RestrictedAdapter(ADAPTER, ()), SupportsProxy)


def test_model_of_a_json_body_is_replaced_and_the_rest_kept() -> None:
    body = b'{"input":"\\u00e9", "model": "a", "n":1.0}'
    model = find(body, "application/json")

    assert model.name == "a"
    assert model.write("b") == (
        "application/json", b'{"input":"\\u00e9","model":"b","n":1.0}'
    )  # fmt: skip
    assert model.write("")[1] == b'{"input":"\\u00e9","model":"a","n":1.0}'
    assert find(b"{}", None).name == ""
    assert find(b'{"model":null}', None).name == ""


@pytest.mark.parametrize(
    ("body", "error"),
    [(b'{"model":1}', InvalidParameter), (b"{", MalformedRequest), (b"[]", MalformedRequest)],
)
def test_invalid_json_body_is_refused(body: bytes, error: type[ClientError]) -> None:
    with pytest.raises(error):
        find(body, "application/json")


def test_json_is_encoded_again_with_one_model_for_any_content_type() -> None:
    body = b'{"model":"a","input":"x","model":"b"}'
    for content_type in (None, "application/x-www-form-urlencoded", "multipart/mixed; boundary=b"):
        model = find(body, content_type)
        assert model.name == "b"
        assert model.write("") == ("application/json", b'{"model":"b","input":"x"}')


@pytest.mark.parametrize("parts", [[MODEL, FILE], [FILE, MODEL], [FILE, FILE, MODEL, FILE]])
@pytest.mark.parametrize("boundary", ["b0", '"b0"', "b0 ; charset=utf-8"])
def test_model_of_a_form_is_found_in_any_part_and_replaced(
    parts: list[bytes], boundary: str
) -> None:
    body = build_body(*parts)
    model = find(body, f"Multipart/Form-Data; boundary={boundary}")

    assert model.name == "m-1"
    assert model.write("other") == (FORM, body.replace(b"m-1", b"other"))
    assert model.write("") == (FORM, body)


def test_fields_of_a_form_are_read_as_texts_or_as_json() -> None:
    named = b'{"model": "a"}'
    texts = {
        "prompt": named,
        "style": b"[x",
        "remark": b"[model] is {a}",
        "tool": b" \n" + named,
        "marked": b"\xef\xbb\xbf" + named,
        "language": b"de\xff",
    }
    parts = [
        build_part(f'Content-Disposition: form-data; name="{name}"', value)
        for name, value in texts.items()
    ]

    read = dict(find(build_body(FILE, *parts)).read_fields())

    assert read["tool"] == read["marked"] == named
    assert {name: json.loads(value) for name, value in read.items()} == {
        "file": "",
        "prompt": named.decode(),
        "style": "[x",
        "remark": "[model] is {a}",
        "tool": {"model": "a"},
        "marked": {"model": "a"},
        "language": "de\ufffd",
    }


@pytest.mark.parametrize(
    ("before", "text", "after"),
    [
        (b" \n\xef\xbb\xbf ", b'{"model": "a"}', b""),
        (b"\xc2\xa0", b'{"model": "a"}', b"\xef\xbb\xbf"),
        (b"", b'[{"model": "a"}]', b"\0"),
        (b"", b'{"model": "a", "x": NaN}', b""),
        (b"", b'{"model": "a", "x": %b}' % (b"1" * 5000), b""),
        (b"", b'{"model": "a", "x": %b}' % (b"[" * 200 + b"]" * 200), b""),
        (b"", b'{"model": "a", "x": "\xff"}', b""),
    ],
)
def test_field_of_a_form_is_json_for_any_reader(before: bytes, text: bytes, after: bytes) -> None:
    part = build_part('Content-Disposition: form-data; name="x"', before + text + after)

    assert dict(find(build_body(FILE, part)).read_fields())["x"] == text


@pytest.mark.parametrize("file_name", ['filename=""', "filename*=utf-8''a"])
def test_part_that_some_servers_read_as_a_field_is_read(file_name: str) -> None:
    """Go reads a part with an empty name as a field, and many know no ``filename*``."""
    part = build_part(f'Content-Disposition: form-data; name="x"; {file_name}', b'{"model": "a"}')

    assert dict(find(build_body(FILE, part)).read_fields())["x"] == b'{"model": "a"}'


def test_json_in_all_fields_of_a_form_is_limited() -> None:
    """It is decoded on the event loop: 24 MB took three seconds."""
    value = b"[%b1]" % (b"1," * (50 << 10))
    parts = [build_part(f'Content-Disposition: form-data; name="x{i}"', value) for i in range(3)]
    texts = build_part('Content-Disposition: form-data; name="prompt"', value * 3)

    assert len(dict(find(build_body(FILE, *parts[:2], texts)).read_fields())) == 4
    with pytest.raises(InvalidParameter, match="256 KiB of JSON"):
        dict(find(build_body(FILE, *parts)).read_fields())


@pytest.mark.parametrize("operation", ["files", "batches"])
def test_files_and_batches_are_refused_by_name(operation: str) -> None:
    endpoints = [one for one in ADAPTER.endpoints if one.operation == operation]
    assert {one.task for one in endpoints} == {"inform"}

    for endpoint in endpoints:
        call = ClientRequest(endpoint, {"id": "x"}, {}, "", b"", endpoint.path)
        with pytest.raises(UnsupportedFeature) as excinfo:
            ADAPTER.handle_info_request(call, NO_CATALOG)
        response = ADAPTER.encode_error(excinfo.value, call)
        assert response.status == 400
        assert operation[:4].title() in json.loads(response.body)["error"]["message"]


# --- Azure: the deployment in the path is the model -----------------------------------------------

AZURE = OpenAI("azure")
SPEECH = "/openai/deployments/tts/audio/speech"


def find_deployment(
    body: bytes, content_type: str | None = None, query: str = "api-version=2024-10-21"
) -> ProxiedModel:
    match = get_path_router(AZURE).find_endpoint("POST", SPEECH)
    headers = {} if content_type is None else {"content-type": content_type}
    call = ClientRequest(match.endpoint, match.params, headers, query, body, SPEECH)
    return AZURE.find_proxied_model(call)


def test_deployments_have_the_paths_that_azures_client_calls() -> None:
    paths = {one.path for one in AZURE.endpoints if one.task == "proxy"}

    for path in ("audio/speech", "audio/transcriptions", "images/generations", "images/edits"):
        assert f"/openai/deployments/{{deployment}}/{path}" in paths
        assert f"/openai/v1/{path}" in paths
    assert "/openai/v1/moderations" in paths


@pytest.mark.parametrize("body", [b'{"input":"a"}', b'{"model":"x","input":"a"}'])
def test_deployment_of_the_path_counts_instead_of_the_body(body: bytes) -> None:
    model = find_deployment(body)

    assert model.name == "tts"
    assert json.loads(model.write("w")[1]) == {"input": "a", "model": "w"}


def test_form_without_a_model_gets_the_deployment_as_a_field() -> None:
    body = build_body(FILE)
    model = find_deployment(body, FORM)

    content_type, written = model.write("w")

    assert model.name == "tts"
    assert (content_type, written.endswith(body)) == (FORM, True)
    assert find(written).name == "w"


def test_form_with_a_model_gets_the_deployment_in_its_place() -> None:
    body = build_body(MODEL, FILE)

    assert find_deployment(body, FORM).write("w")[1] == body.replace(b"m-1", b"w")


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
