"""generate, generate_stream and infer: accepted fields, and the errors of invalid ones."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core.request import AudioPart, ExtraFields, ImagePart, Message, TextPart, VideoPart
from protocols.mindie.messages import PromptPartKeys
from protocols.mindie.params import count_utf16_units, format_json_number

PATH = "/v2/models/m/generate"
STREAM = "/v2/models/m/generate_stream"
ID_WORDS = (
    "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 "
    "words in length."
)
LIMITS = {"1x": 4194304, "rc1": 524288}


def build_text_body(**fields: Any) -> dict[str, Any]:
    return {"text_input": "hi", **fields}


def build_body_with_parameters(**parameters: Any) -> dict[str, Any]:
    return build_text_body(parameters=parameters)


# --- errors ---------------------------------------------------------------------------------------

FIELDS: tuple[tuple[Any, str], ...] = (
    (b"{", "Failed to parse request context to json"),
    (b"", "Failed to parse request context to json"),
    (b'{"text_input":"\xff"}', "Failed to parse request context to json"),
    (b"[" * 100_000, "Failed to parse request context to json"),
    (b'{"text_input":' * 100_000, "Failed to parse request context to json"),
    (b"[]", "The text_input not found"),
    (build_text_body(id="a b"), ID_WORDS),
    (build_text_body(id=""), ID_WORDS),
    (build_text_body(id="x" * 257), ID_WORDS),
    (build_text_body(id=5), "id must be string type."),
    ({"id": 5}, "id must be string type."),
    ({}, "The text_input not found"),
    ({"text_input": None}, "The text_input not found"),
    (
        {"text_input": 5},
        "The type of text_input is abnormal. The requestId is endpoint_common_0",
    ),
    (
        {"text_input": ""},
        (
            "text_input must be necessary and data type must be string and length in "
            "(0, 41943040], but the length of inputs is 0"
        ),
    ),
    ({"text_input": []}, "Parameter text_input arr is empty"),
    ({"text_input": [{"text": 5}]}, "Request param text must be string"),
    ({"text_input": [{"image_url": None}]}, "Request param image_url null"),
    ({"text_input": [{"image_url": 5}]}, "The type of inputs is abnormal"),
    (
        {"text_input": [{"image_url": "u"}] * 21},
        "The number of multimodal url should be no more than 20",
    ),
    (build_text_body(parameters=[]), "parameters must be object type."),
    (build_text_body(parameters="x"), "parameters must be object type."),
)
PARAMETERS: tuple[tuple[str, Any, str], ...] = (
    ("temperature", 0, "Parameter temperature must be in (0.0,3.40282e+38], got 0."),
    ("temperature", -0.5, "Parameter temperature must be in (0.0,3.40282e+38], got -0.5."),
    ("temperature", 1e39, "Parameter temperature must be in (0.0,3.40282e+38], got 1e+39."),
    ("temperature", "1", "temperature must be float type."),
    ("temperature", True, "temperature must be float type."),
    ("top_k", -1, "Parameter top_k must be in -1 || (0,2147483647], got -1"),
    ("top_k", 2147483648, "Parameter top_k must be in -1 || (0,2147483647], got 2147483648"),
    ("top_k", 1.5, "top_k must be integer type."),
    ("top_k", 10**20, "top_k must be integer type."),
    ("top_p", 0, "Parameter top_p must be in (0.0,1.0], got 0."),
    ("top_p", 1.01, "Parameter top_p must be in (0.0,1.0], got 1.01."),
    ("typical_p", -1.0, "Parameter typical_p must be in (0.0,1.0], got -1.0."),
    ("do_sample", 1, "do_sample must be boolean type."),
    ("seed", -1, "seed must be unsigned type."),
    ("seed", 1.0, "seed must be unsigned type."),
    (
        "seed",
        2**63,
        "Parameter seed must be in [0, 9223372036854775807], got 9223372036854775808.",
    ),
    (
        "repetition_penalty",
        0,
        "Parameter 'repetition_penalty' must be in (0.0, 3.40282e+38], got 0.",
    ),
    ("watermark", "no", "watermark must be boolean type."),
    ("priority", 6, "Parameter priority must be in [1,5], got 6."),
    ("priority", 0, "Parameter priority must be in [1,5], got 0."),
    ("max_new_tokens", 0, "Parameter max_new_tokens must be in (0,2147483647], got 0."),
    ("max_new_tokens", -1, "Parameter max_new_tokens must be in (0,2147483647], got -1."),
    ("max_new_tokens", 2.5, "max_new_tokens must be integer type."),
    ("details", "true", "details must be boolean type."),
    ("batch_size", 0, "Parameter batch_size must be in (0,2147483647], got 0."),
    (
        "timeout",
        0,
        "Parameter timeout must be strictly positive and small than 65535 seconds, got 0.",
    ),
    (
        "timeout",
        65536,
        "Parameter timeout must be strictly positive and small than 65535 seconds, got 65536.",
    ),
    ("timeout", 1.5, "timeout must be unsigned type."),
)


@pytest.mark.parametrize("path", [PATH, STREAM])
@pytest.mark.parametrize(("body", "message"), FIELDS)
def test_invalid_generate_field_returns_422(bench: Any, path: str, body: Any, message: str) -> None:
    assert bench().refused(path, body) == (422, message)


@pytest.mark.parametrize(("name", "value", "message"), PARAMETERS)
def test_invalid_generate_parameter_returns_422(
    bench: Any, name: str, value: Any, message: str
) -> None:
    assert bench().refused(PATH, build_body_with_parameters(**{name: value})) == (422, message)


def test_first_invalid_parameter_in_server_order_is_reported(bench: Any) -> None:
    order = (
        *("temperature", "top_k", "top_p", "typical_p", "do_sample", "seed", "repetition_penalty"),
        *("watermark", "priority", "max_new_tokens", "details", "batch_size", "timeout"),
    )
    for i, name in enumerate(order):
        wrong = dict.fromkeys(reversed(order[i:]), "x")
        _, message = bench().refused(PATH, build_body_with_parameters(**wrong))
        assert message.startswith(f"{name} must be ")


def test_validation_order_is_id_then_text_then_parameters(bench: Any) -> None:
    both = {"id": "a b", "text_input": "", "parameters": []}
    assert bench().refused(PATH, both)[1] == ID_WORDS

    del both["id"]
    assert bench().refused(PATH, both)[1].startswith("text_input must be necessary")


@pytest.mark.parametrize("profile", LIMITS)
def test_text_length_limit_counts_utf_16_units(bench: Any, profile: str) -> None:
    """A character beyond the basic plane counts as two."""
    limit = LIMITS[profile]
    message = (
        f"text_input must be necessary and data type must be string and length in (0, {limit}], "
        f"but the length of inputs is {limit + 2}"
    )

    one = bench(profile)

    assert one.refused(PATH, {"text_input": "\U0001f600" * (limit // 2 + 1)}) == (422, message)
    assert one.decode(PATH, {"text_input": "\u4f60" * limit}).prompts[0][0] == "\u4f60"


def test_text_input_list_length_counts_its_serialized_json(bench: Any) -> None:
    body = {"text_input": [{"type": "text", "text": "x" * 4194304}]}
    assert bench("1x").refused(PATH, body)[1].endswith("but the length of inputs is 4194331")


# --- accepted requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "path", "value"),
    [
        ({"temperature": 1}, "sampling.temperature", 1.0),
        ({"temperature": None}, "sampling.temperature", None),
        ({"top_p": 1.0}, "sampling.top_p", 1.0),
        ({"top_k": 0}, "sampling.top_k", None),
        ({"top_k": 2147483647}, "sampling.top_k", 2147483647),
        ({"typical_p": 0.5}, "sampling.typical_p", 0.5),
        ({"seed": 0}, "sampling.seed", 0),
        ({"seed": None}, "sampling.seed", None),
        ({"do_sample": True}, "sampling.do_sample", True),
        ({"watermark": True}, "sampling.watermark", True),
        ({}, "stopping.max_tokens", 20),
        ({"max_new_tokens": None}, "stopping.max_tokens", 20),
        ({"max_new_tokens": 2147483647}, "stopping.max_tokens", 2147483647),
        ({"details": True}, "response_options.details", True),
        ({"details": True}, "response_options.timing", True),
        ({"perf_stat": True}, "response_options.timing", True),
        ({"perf_stat": "x"}, "response_options.timing", False),
        ({"priority": 1}, "priority", 0),
        ({"priority": 5}, "priority", 204),
        ({"timeout": 3}, "timeout", 3.0),
        ({"temperature": 0.5, "do_sample": False}, "sampling.temperature", 0.0),
        ({"batch_size": 100}, "choice_count", 1),
    ],
)
def test_generate_parameter_is_decoded(bench: Any, parameters: Any, path: str, value: Any) -> None:
    request: Any = bench().decode(PATH, build_text_body(parameters=parameters))
    for name in path.split("."):
        request = getattr(request, name)

    assert request == value
    assert type(request) is type(value)


def test_null_means_that_the_parameter_is_absent(bench: Any) -> None:
    silent = bench().decode(PATH, build_text_body())
    names = (
        *("temperature", "top_k", "top_p", "typical_p", "do_sample", "seed", "repetition_penalty"),
        *("watermark", "priority", "max_new_tokens", "details", "timeout"),
    )
    nulls = build_text_body(id=None, parameters=dict.fromkeys(names))

    assert bench().decode(PATH, nulls) == silent
    assert bench().decode(PATH, build_text_body(parameters=None)) == silent


def test_unknown_parameters_are_kept_as_extra(bench: Any) -> None:
    body = build_text_body(stop=["x"], parameters={"batch_size": 3, "perf_stat": "x", "foo": [1]})
    request = bench().decode(PATH, body)

    extra = {name: bytes(raw) for name, raw in request.extra.items()}

    assert extra == {"batch_size": b"3", "perf_stat": b'"x"', "foo": b"[1]"}
    assert request.stopping.stop == ()
    assert request.field_extra == (ExtraFields("", {("stop",): ["x"]}),)


def test_rc1_id_seed_and_greedy_default_rules(bench: Any) -> None:
    """Any id, seeds from 1 to 64 bits, text only, and greedy unless sampling is requested."""
    one = bench("rc1")
    assert one.decode(PATH, build_text_body(id="a b")).client_id == "a b"
    assert one.decode(PATH, build_body_with_parameters(seed=2**64 - 1)).sampling.seed == 2**64 - 1

    message = "Parameter seed must be in (0, 18446744073709551615], got 0."
    assert one.refused(PATH, build_body_with_parameters(seed=0)) == (422, message)
    assert one.refused(PATH, {"text_input": ["x"]})[1].startswith("The type of text_input is abn")
    assert one.decode(PATH, build_text_body()).sampling.temperature == 0
    assert one.decode(PATH, build_body_with_parameters(temperature=0.5)).sampling.temperature == 0.5
    assert one.decode(PATH, build_body_with_parameters(do_sample=True)).sampling.temperature is None
    assert bench().decode(PATH, build_text_body()).sampling.temperature is None


def test_request_id_precedence_is_body_then_header_then_counter(bench: Any) -> None:
    """Without an id in body or header, the server's counter is used."""
    one = bench()
    assert one.decode(PATH, build_text_body(id="a123")).client_id == "a123"
    assert one.decode(PATH, build_text_body()).client_id == "endpoint_common_1"

    call = one.call(PATH, build_text_body(), headers={"req-id": "from-header"})
    assert one.adapter.decode_request(call).client_id == "from-header"
    assert one.decode(PATH, build_text_body()).client_id == "endpoint_common_2"


def test_max_iter_times_is_the_default_max_tokens(bench: Any) -> None:
    one = bench(max_iter_times=16)
    assert one.decode(PATH, build_text_body()).stopping.max_tokens == 16
    assert one.decode(PATH, build_body_with_parameters(max_new_tokens=3)).stopping.max_tokens == 3


def test_text_input_list_is_text_or_multimodal_message(bench: Any) -> None:
    words = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert bench().decode(PATH, {"text_input": words}).prompts == ("ab",)

    media = [
        {"type": "image_url", "image_url": "i"},
        {"type": "video_url", "video_url": {"url": "v"}},
        {"type": "audio_url", "audio_url": {"url": "a"}},
        {"type": "text", "text": "what is this?"},
    ]
    request = bench().decode(PATH, {"text_input": media})
    parts = (ImagePart("i"), VideoPart("v"), AudioPart("a"), TextPart("what is this?"))

    assert request.messages == (Message("user", parts),)
    assert (request.kind, request.templating.mode) == ("chat", "server")


def test_unknown_words_and_keys_of_parts_are_kept_with_their_path(bench: Any) -> None:
    texts = [{"type": "later", "text": "a"}]
    media = [{"type": "image_url", "image_url": {"url": "i", "detail": "low"}, "x": 1}]

    text = bench().decode(PATH, {"text_input": texts})
    [message] = bench().decode(PATH, {"text_input": media}).messages

    assert text.field_extra == (
        PromptPartKeys("text_input[0]", {("type",): "later"}, ("text_input[0]",), ("a",)),
    )
    assert message.parts[0].extra == ExtraFields(
        "text_input[0]", {("image_url", "detail"): "low", ("x",): 1}
    )


@pytest.mark.parametrize("item", ["?", 5, {}, {"type": "table", "rows": 2}])
def test_an_item_of_a_prompt_that_is_no_part_is_refused(bench: Any, item: Any) -> None:
    _, message = bench().refused(PATH, {"text_input": [{"text": "a"}, item]})

    assert message == (
        "Request param content item must have text, image_url, video_url or audio_url"
    )


# --- token ids ------------------------------------------------------------------------------------

INFER = "/v2/models/m/infer"
TENSOR = {"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [396, 319, 13]}


def build_tensor_body(**fields: Any) -> dict[str, Any]:
    return {"inputs": [{**TENSOR, **fields}], "outputs": [{"name": "output0"}]}


def test_infer_tensor_is_decoded_as_token_ids(bench: Any) -> None:
    request = bench().decode(
        INFER, build_tensor_body(parameters={"max_new_tokens": 5}) | {"id": "a"}
    )
    assert request.prompts == ((396, 319, 13),)
    assert (request.client_id, request.stopping.max_tokens) == ("a", 5)
    assert request.response_options.token_ids


def test_top_level_infer_parameters_are_decoded(bench: Any) -> None:
    """Every published example has them there."""
    body = build_tensor_body(shape=[3]) | {"parameters": {"temperature": 0.5}}
    request = bench().decode(INFER, body)

    assert (request.sampling.temperature, request.stopping.max_tokens) == (0.5, 20)
    assert request.client_id == "endpoint_common_0"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Req should contain 'inputs' and the type should be array."),
        ({"inputs": []}, "Inputs count must be 1."),
        ({"inputs": [5]}, "Cannot find name in inputs or its type is not string"),
        (build_tensor_body(name="x" * 257), "The length of name set in inputs exceeds 256."),
        (build_tensor_body(shape=3), "Cannot find shape in inputs or its type is not array"),
        (build_tensor_body(shape=["3"]), "Shape element must be integer type."),
        (
            build_tensor_body(shape=[2, 3]),
            (
                "Shape must be at most two-dimensional, and the last element's value must be in "
                "(0,1048576]."
            ),
        ),
        (
            build_tensor_body(datatype=None),
            "Cannot find datatype in inputs or its type is not string",
        ),
        (build_tensor_body(datatype="INT64"), "Unsupported datatype, got INT64."),
        (build_tensor_body(data="x"), "Cannot find data in inputs or its type is not array"),
        (build_tensor_body(data=[1]), "Data size should be 3, got 1."),
        (build_tensor_body(data=[1, 2, 0.5]), "Data element must be integer type."),
        (build_tensor_body() | {"id": 5}, "id must be string type."),
        (
            build_tensor_body() | {"outputs": None},
            "Req should contain 'outputs' and the type should be array.",
        ),
        (build_tensor_body() | {"outputs": []}, "Outputs size should be 1, got 0."),
        (
            build_tensor_body() | {"outputs": [{"name": 5}]},
            "Outputs name must be non-empty string.",
        ),
        (build_tensor_body() | {"outputs": [5]}, "Outputs name must be non-empty string."),
        (build_tensor_body(parameters=[]), "parameters must be object type."),
        (
            build_tensor_body(parameters={"temperature": 0}),
            "Parameter temperature must be in (0.0,3.40282e+38], got 0.",
        ),
    ],
)
def test_invalid_infer_tensor_returns_422(bench: Any, body: Any, message: str) -> None:
    assert bench().refused(INFER, body) == (422, message)


# --- numbers and lengths --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "1"),
        (1.0, "1.0"),
        (0.0001, "0.0001"),
        (1e-05, "1e-05"),
        (100000000000000.0, "100000000000000.0"),
        (1e15, "1e+15"),
        (-1.5e15, "-1.5e+15"),
        (1234567890123456.0, "1.234567890123456e+15"),
        (1000000000000000.5, "1.0000000000000005e+15"),
        (1e16, "1e+16"),
        (2**64 - 1, "18446744073709551615"),
        (2**64, "1.8446744073709552e+19"),
    ],
)
def test_numbers_are_formatted_as_the_server_formats_them(value: float, message: str) -> None:
    assert format_json_number(value) == message


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_formatted_number_parses_to_the_same_value(value: float) -> None:
    assert msgspec.json.decode(format_json_number(value), type=float) == value


@given(st.text())
def test_count_utf16_units_equals_encoded_length(text: str) -> None:
    assert count_utf16_units(text) * 2 == len(text.encode("utf-16-le", "surrogatepass"))
