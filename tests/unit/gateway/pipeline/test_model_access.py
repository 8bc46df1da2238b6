"""Bodies of keys with a list of models: which part is JSON, and which can't be read."""

import msgspec
import pytest

from gateway.pipeline import model_access
from protocols.core.errors import ClientError, InvalidParameter
from protocols.core.interfaces import ClientRequest, Endpoint, RoutingInfo
from protocols.json_body import read_unchecked_fields

LENGTH = "inference-header-content-length"
TENSORS = b"\x05\x00\x00\x00hello"


async def check_named_models(call: ClientRequest) -> None:
    if model_access.names_only_routed_model(call, RoutingInfo("m")):
        return
    await model_access.check_named_models(call, RoutingInfo("m"), {"mine"}.__contains__)


def make_request(body: bytes, length: str = "") -> ClientRequest:
    endpoint = Endpoint("POST", "/v1/chat/completions", "generate", "chat")
    headers = {LENGTH: length} if length else {}
    return ClientRequest(endpoint, {}, headers, "", body, endpoint.path)


async def test_only_the_json_before_the_bytes_of_tensors_is_read() -> None:
    await check_named_models(make_request(b'{"a": 1}' + TENSORS, "8"))
    with pytest.raises(InvalidParameter, match="'models' names further models"):
        await check_named_models(make_request(b'{"models": 1}' + TENSORS, "13"))


@pytest.mark.parametrize("length", ["", "0" * 19 + "8" + "1" * 5000, "9" * 5000, "-8", "eight"])
async def test_body_with_a_length_that_says_nothing_is_refused_if_it_is_no_json(
    length: str,
) -> None:
    with pytest.raises(ClientError, match="needs a body of JSON"):
        await check_named_models(make_request(b'{"a": 1}' + TENSORS, length))


@pytest.mark.parametrize(
    "name",
    [
        "models",
        "Models",
        "model\u017f",
        "fallbac\u212as",
        "%6dodels",
        "models[0]",
        " models",
        "preset",
        "providerOptions",
        "router_settings_override",
    ],
)
async def test_decoded_field_that_names_models_is_refused(name: str) -> None:
    call = make_request(b'{"model": "m", "%b": 1}' % name.encode())
    read_unchecked_fields(call)

    with pytest.raises(InvalidParameter, match="names further models"):
        await check_named_models(call)


async def test_text_of_a_decoded_body_names_no_models() -> None:
    call = make_request(b'{"model": "m", "messages": [{"content": "\\u0041 models: "}]}')
    read_unchecked_fields(call)

    await check_named_models(call)


@pytest.mark.parametrize(
    "name", ["models", "model\u017f", r"model\u017f", r"fallbac\u212As", "\u212a"]
)
async def test_name_in_what_is_no_json_is_refused(name: str) -> None:
    """A worker might read more than the gateway does."""
    with pytest.raises(ClientError, match="needs a body of JSON"):
        await check_named_models(make_request(b'{"a": 1, "%b": 1,}' % name.encode()))


REFUSED = [
    b'"model": "other"',
    b'"plugins": [{"id": "auto-router", "allowed_models": ["other"]}]',
    b'"plugins": [{"id": "auto-router", "allowed_models": ["mine", "other"]}]',
    b'"plugins": [{"id": "auto-router", "allowed_models": []}]',
    b'"tools": [{"type": "image_generation", "model": "other"}]',
    b'"tools": [{"type": "x:image", "parameters": {"model": "other"}}]',
    b'"tools": [{"type": "advisor_20260301", "model": {"id": "mine"}}]',
    b'"tools": [{"type": "advisor", "model": "other", "model": "mine"}]',
    b'"tools": [{"type": "advisor", "mode\\u006c": "other"}]',
    b'"tools": [{"type": "advisor", "MODEL": "other"}]',
    b'"x": [[[{"fallbac\xe2\x84\xaas": ["other"]}]]]',
    b'"input": [{"type": "additional_tools", "tools": [{"model": "other"}]}]',
    b'"parameters": {"lora_name": "other"}',
    b'"adapter_id": "other"',
    b'"inputs": [{"name": "model_name", "datatype": "BYTES", "shape": [1], "data": ["other"]}]',
]
ACCEPTED = [
    b'"tools": [{"type": "image_generation", "model": "mine"}]',
    b'"plugins": [{"id": "auto-router", "allowed_models": ["mine"]}]',
    b'"tools": [{"function": {"name": "model", "parameters": {"properties": {"model": {}}}}}]',
    b'"messages": [{"tool_calls": [{"function": {"arguments": {"model": "T"}}}]}]',
    b'"messages": [{"content": [{"type": "tool_use", "input": {"model": "T"}}]}]',
    b'"metadata": {"model": "T"}',
    b'"documents": [{"data": {"model": "T"}}]',
    b'"messages": [{"content": "{\\"model\\": 1}"}]',
]


@pytest.mark.parametrize("is_decoded", [True, False])
@pytest.mark.parametrize("field", REFUSED)
async def test_other_model_within_a_field_is_refused(field: bytes, is_decoded: bool) -> None:
    call = make_request(b'{"model": "m", %b}' % field)
    if is_decoded:
        read_unchecked_fields(call)

    with pytest.raises(InvalidParameter, match="names further models"):
        await check_named_models(call)


@pytest.mark.parametrize("field", [b'"lora_name": "other"', b'"x": {"models": ["other"]}'])
async def test_each_of_the_fields_with_one_name_is_looked_at(field: bytes) -> None:
    """A body that is passed on as it came has both, and workers read the first or the last."""
    for fields in (field + b', "lora_name": "mine", "x": {}', b'"lora_name": "mine", ' + field):
        with pytest.raises(InvalidParameter, match="names further models"):
            await check_named_models(make_request(b"{%b}" % fields))


@pytest.mark.parametrize("field", ACCEPTED)
async def test_own_model_and_names_of_the_client_are_accepted(field: bytes) -> None:
    await check_named_models(make_request(b'{"model": "m", %b}' % field))


async def test_error_names_the_place() -> None:
    body = b'{"model": "m", "plugins": [{}, {"x": {"allowed_models": "other"}}]}'
    with pytest.raises(InvalidParameter) as excinfo:
        await check_named_models(make_request(body))

    assert excinfo.value.param == "plugins[1].x.allowed_models"


async def test_number_that_only_some_decoders_read_is_refused() -> None:
    body = b'{"model": "m", "x": [{"a_model": %b}]}' % (b"1" * 5000)
    with pytest.raises(ClientError, match="needs a body of JSON"):
        await check_named_models(make_request(body))


def read_call(body: bytes) -> ClientRequest:
    call = make_request(body)
    read_unchecked_fields(call)
    return call


@pytest.mark.parametrize(
    "text", ["the model of 50 %", '{"models": ["x"]}', "\\", '\\"models": 1', "fallbacks\\n"]
)
def test_text_that_speaks_of_models_needs_no_further_check(text: str) -> None:
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": text}]})
    assert model_access.names_only_routed_model(read_call(body), RoutingInfo("m"))


@pytest.mark.parametrize(
    "field",
    [
        b'"models":1',
        b'"Models" \t: 1',
        b'"mod\\u0065ls":1',
        b'"model":"other"',
        b'"%6dodels":1',
        '"model\u017f":1'.encode(),
        b'"x":"\\\\","models":1',
        b'"x":"\\"","models":1',
        b'"datatype":"BYTES","name":"lora_name"',
    ],
)
@pytest.mark.parametrize("inside", [b"{%b}", b'{"plugins":[{%b}]}', b'{"model":"m","a":{%b}}'])
def test_name_that_may_be_a_models_is_checked(field: bytes, inside: bytes) -> None:
    call = read_call(inside % field)
    assert not model_access.names_only_routed_model(call, RoutingInfo("m"))


WORDS = (*model_access._WORDS, *model_access._SETTINGS)


@pytest.mark.parametrize("is_decoded", [True, False])
def test_every_letter_that_folds_to_a_name_is_checked(is_decoded: bool) -> None:
    folded = [(chr(i), chr(i).casefold()) for i in range(128, 0x110000)]
    names = {
        word.replace(plain, letter)
        for letter, plain in folded
        for word in WORDS
        if plain.isascii() and plain in word
    }
    assert len(names) > 2

    for name in names:
        call = make_request(b'{"%b":1}' % name.encode())
        if is_decoded:
            read_unchecked_fields(call)
        assert not model_access.names_only_routed_model(call, RoutingInfo("")), name


@pytest.mark.parametrize("text", ["the model" * 100_000, "\\" * 1_100_000, '"' * 300_000])
async def test_large_text_that_speaks_of_models_is_accepted(text: str) -> None:
    messages = [{"role": "user", "content": text}]
    call = read_call(msgspec.json.encode({"model": "m", "messages": messages}))

    await model_access.check_named_models(call, RoutingInfo("m"), {"m"}.__contains__)


async def test_name_of_another_model_in_a_large_body_is_refused() -> None:
    fields = {"model": "m", "messages": ["x" * 500_000], "plugins": [{"models": ["other"]}]}
    call = read_call(msgspec.json.encode(fields))

    with pytest.raises(InvalidParameter, match=r"plugins\[0\]\.models"):
        await model_access.check_named_models(call, RoutingInfo("m"), {"m"}.__contains__)
