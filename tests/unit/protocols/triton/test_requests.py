"""Requests are decoded by the parameters of each profile."""

from collections.abc import Callable
from typing import Any

import pytest

from protocols.core.errors import GatewayError, InvalidParameter, UnsupportedFeature
from protocols.core.request import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    RegexFormat,
)
from tests.support.requested_parameters import list_requested_parameters

VLLM = [
    ({"max_tokens": 5, "min_tokens": 1}, {"stopping.max_tokens": 5, "stopping.min_tokens": 1}),
    ({"max_tokens": "5"}, {"stopping.max_tokens": 5}),
    ({"max_tokens": 5.9}, {"stopping.max_tokens": 5}),
    ({"temperature": 0}, {"sampling.temperature": 0.0}),
    ({"temperature": "0.5"}, {"sampling.temperature": 0.5}),
    ({"top_k": -1, "top_p": 1}, {"sampling.top_p": 1.0}),
    ({"top_k": 40, "min_p": 0.1}, {"sampling.top_k": 40, "sampling.min_p": 0.1}),
    ({"seed": -1}, {"sampling.seed": -1}),
    ({"ignore_eos": 1}, {"stopping.ignore_eos": True}),
    ({"stop": "x", "n": 2, "best_of": 3}, {"stopping.stop": ("x",), "n": 2, "best_of": 3}),
    ({"lora_name": "sql"}, {"adapter": "sql"}),
    ({"lora_name": 5}, {"adapter": "5"}),
    ({"logprobs": 2, "prompt_logprobs": 1}, {"logprobs.top": 2, "logprobs.prompt": 1}),
    ({"return_logprobs": True}, {"logprobs.top": 0}),
    ({"return_cumulative_logprob": True, "logprobs": 3}, {"logprobs.top": 3}),
    ({"return_cumulative_logprob": False}, {}),
    ({"truncate_prompt_tokens": -1}, {"stopping.truncate_prompt": -1}),
    ({"sampling_parameters": '{"stop":["a","b"],"top_p":null}', "top_p": 0.5},
     {"stopping.stop": ("a", "b")}),
    ({"sampling_parameters": '{"stop_token_ids":[1,2],"bad_words":["x"]}'},
     {"stopping.stop_token_ids": (1, 2), "sampling.bad_words": ("x",)}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "meaning"), VLLM)
@pytest.mark.parametrize("nested", [False, True])
def test_vllm_parameters_are_decoded(
    client: Any, body: dict[str, Any], meaning: dict[str, Any], nested: bool
) -> None:
    whole = {"text_input": "a", "exclude_input_in_output": True}
    request = client.decode({**whole, "parameters": body} if nested else {**whole, **body})
    assert list_requested_parameters(request) == meaning


TRTLLM = [
    ({"temperature": 1, "top_k": 0, "top_p": 0.5},
     {"sampling.temperature": 1.0, "sampling.top_p": 0.5}),
    ({"stop_words": "x", "bad_words": ["a", "", "b"]},
     {"stopping.stop": ("x",), "sampling.bad_words": ("a", "b")}),
    ({"stop_words": ""}, {}),
    ({"seed": 2**64 - 1, "beam_width": 1}, {"sampling.seed": 2**64 - 1}),
    ({"beam_width": 4, "num_return_sequences": 2}, {"sampling.beam_width": 4, "n": 2}),
    ({"length_penalty": 1, "repetition_penalty": 1.1, "min_tokens": 2},
     {"sampling.length_penalty": 1.0, "sampling.repetition_penalty": 1.1,
      "stopping.min_tokens": 2}),
    ({"return_log_probs": True}, {"logprobs.top": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "meaning"), TRTLLM)
def test_trtllm_parameters_are_decoded(
    client_of: Callable[..., Any], body: dict[str, Any], meaning: dict[str, Any]
) -> None:
    whole = {"text_input": "a", "max_tokens": 7, "exclude_input_in_output": True, **body}
    request = client_of("trtllm").decode(whole)
    assert list_requested_parameters(request) == {"stopping.max_tokens": 7, **meaning}


def test_llmapi_parameters_are_decoded(client_of: Callable[..., Any]) -> None:
    body = {
        "text_input": "a",
        "streaming": True,
        "sampling_param_max_tokens": 9,
        "sampling_param_temperature": 0.5,
        "sampling_param_stop": ["x", "y"],
        "sampling_param_seed": 3,
    }
    request = client_of("llmapi").decode(body, "generate_stream")

    assert request.stream
    assert list_requested_parameters(request) == {
        "stopping.max_tokens": 9,
        "stopping.stop": ("x", "y"),
        "sampling.temperature": 0.5,
        "sampling.seed": 3,
    }
    assert client_of("llmapi").decode({"text_input": "a", "stream": True}, "generate_stream").stream


def test_llmapi_stop_flag_is_rejected(client_of: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedFeature):
        client_of("llmapi").decode({"text_input": "a", "id": "7", "stop": True})
    assert client_of("llmapi").decode({"text_input": "a", "stop": False}).extra == {}


ECHO = [
    ("vllm", "generate", {}, True),
    ("vllm", "generate", {"exclude_input_in_output": True}, None),
    ("vllm", "generate", {"exclude_input_in_output": False}, True),
    ("vllm", "generate", {"stream": True}, None),
    ("vllm", "generate_stream", {}, True),
    ("vllm", "generate_stream", {"stream": True}, None),
    ("vllm", "generate_stream", {"stream": True, "exclude_input_in_output": True}, None),
    ("trtllm", "generate", {"max_tokens": 1}, True),
    ("trtllm", "generate", {"max_tokens": 1, "exclude_input_in_output": True}, None),
    ("trtllm", "generate_stream", {"max_tokens": 1, "stream": True}, None),
    ("trtllm", "generate_stream",
     {"max_tokens": 1, "stream": True, "exclude_input_in_output": False}, None),
    ("llmapi", "generate", {}, True),
    ("llmapi", "generate", {"sampling_param_exclude_input_from_output": True}, None),
    ("llmapi", "generate", {"exclude_input_in_output": True}, None),
    ("plain", "generate", {}, None),
    ("plain", "generate", {"exclude_input_in_output": False}, None),
    ("plain", "generate_stream", {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "variant", "body", "echo"), ECHO)
def test_echo_default_by_profile_and_variant(
    client_of: Callable[..., Any], profile: str, variant: str, body: Any, echo: bool | None
) -> None:
    assert client_of(profile).decode({"text_input": "a", **body}, variant).echo is echo


def test_vllm_stream_that_includes_the_input_returns_400(client: Any) -> None:
    body = {"text_input": "a", "stream": True, "exclude_input_in_output": False}
    response = client.post("/v2/models/vllm_like/generate_stream", body)

    assert response.status == 400
    assert response.body == (
        b'data: {"error":"Error generating stream: When streaming, `exclude_input_in_output` ='
        b' False is not allowed."}\n\n'
    )


STREAMS = [
    ("vllm", {"stream": True}, True),
    ("vllm", {"stream": [True]}, True),
    ("vllm", {"parameters": {"stream": True}}, True),
    ("vllm", {"stream": False}, False),
    ("vllm", {}, False),
    ("vllm", {"text_input": "a stream"}, False),
    ("plain", {}, True),
    ("plain", {"parameters": {"stream": False}}, False),
    ("plain", {"stream": "no flag"}, True),
]


@pytest.mark.parametrize(("profile", "body", "streams"), STREAMS)
def test_stream_flag_applies_only_to_generate_stream(
    client_of: Callable[..., Any], profile: str, body: Any, streams: bool
) -> None:
    client, whole = client_of(profile), {"text_input": "a", **body}
    assert client.decode(whole, "generate_stream").stream is streams
    assert client.decode(whole, "generate").stream is False


@pytest.mark.parametrize("body", [b"", b"{", b'{"stream":', b"[]", b'{"parameters":5,"stream":9}'])
def test_routing_info_is_read_from_a_malformed_body(client: Any, body: bytes) -> None:
    call = client.call("/v2/models/nope/generate_stream", body, method="POST")
    assert client.adapter.read_routing_info(call).model == "nope"


GUIDES = [
    ("vllm", {"structured_outputs": '{"json":{"type":"object"}}'}, JsonSchemaFormat),
    ("vllm", {"structured_outputs": '{"json":"{}"}'}, JsonSchemaFormat),
    ("vllm", {"guided_decoding": '{"regex":"a+","json":null}'}, RegexFormat),
    ("vllm", {"guided_decoding": '{"choice":["a","b"]}'}, ChoiceFormat),
    ("vllm", {"guided_decoding": '{"json_object":true}'}, JsonObjectFormat),
    ("trtllm", {"guided_decoding_guide_type": "json"}, JsonObjectFormat),
    ("trtllm", {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{}"},
     JsonSchemaFormat),
    ("trtllm", {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "x ::= y"},
     GrammarFormat),
    ("vllm", {}, type(None)),
    ("trtllm", {}, type(None)),
    ("plain", {"guided_decoding": '{"regex":"a+"}'}, type(None)),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "body", "kind"), GUIDES)
def test_guided_output_formats_are_decoded(
    client_of: Callable[..., Any], profile: str, body: dict[str, Any], kind: type
) -> None:
    request = client_of(profile).decode({"text_input": "a", "max_tokens": 1, **body})
    assert type(request.output) is kind
    if profile != "plain":
        assert not request.extra


REFUSED = [
    ("vllm", {"temperature": -1}),
    ("vllm", {"temperature": "warm"}),
    ("vllm", {"temperature": "inf"}),
    ("vllm", {"top_p": 1.5}),
    ("vllm", {"n": 0}),
    ("vllm", {"sampling_parameters": "{"}),
    ("vllm", {"sampling_parameters": "[]"}),
    ("vllm", {"sampling_parameters": '{"max_tokens":"many"}'}),
    ("vllm", {"structured_outputs": "{}"}),
    ("vllm", {"guided_decoding": "["}),
    ("vllm", {"guided_decoding": '{"regex":null}'}),
    ("trtllm", {"max_tokens": 1, "guided_decoding_guide_type": "json_schema",
                "guided_decoding_guide": "{"}),
    ("vllm", {"guided_decoding": '{"shape":"round"}'}),
    ("plain", {"max_tokens": "5"}),
    ("trtllm", {"max_tokens": 1, "top_p": 2}),
    ("trtllm", {"max_tokens": 2**31}),
    ("trtllm", {"max_tokens": 1, "guided_decoding_guide_type": "regex"}),
    ("trtllm", {"max_tokens": []}),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "body"), REFUSED)
def test_invalid_parameter_value_returns_400(
    client_of: Callable[..., Any], profile: str, body: dict[str, Any]
) -> None:
    client = client_of(profile)
    with pytest.raises(InvalidParameter) as excinfo:
        client.decode({"text_input": "a", **body})

    call = client.call("/v2/models/m/generate", {"text_input": "a"}, method="POST")
    assert client.adapter.encode_error(excinfo.value, call).status == 400


def test_non_finite_temperature_is_rejected(client_of: Callable[..., Any]) -> None:
    for profile, rest in (("vllm", b""), ("trtllm", b',"max_tokens":1')):
        with pytest.raises(InvalidParameter, match="must be a finite number"):
            client_of(profile).decode(b'{"text_input":"a","temperature":NaN%s}' % rest)


def test_unknown_parameters_keep_their_raw_json(client: Any) -> None:
    body = (
        b'{"text_input":"a","foo":1.50,"foo":2,"bar":NaN,"parameters":{"baz":true,"big":1e3},'
        b'"image":["aGk="],"return_finish_reason":[true],"id":"7"}'
    )
    request = client.decode(body)

    assert {name: bytes(raw) for name, raw in request.extra.items()} == {
        "foo": b"1.50",
        "bar": b"NaN",
        "baz": b"true",
        "big": b"1e3",
        "image": b'["aGk="]',
    }
    assert request.provided_fields == {
        "text_input", "foo", "bar", "baz", "big", "image", "return_finish_reason"
    }  # fmt: skip


@pytest.mark.parametrize("requested", [True, False])
def test_output_flag_is_not_forwarded_as_an_extra_field(client: Any, *, requested: bool) -> None:
    request = client.decode({"text_input": "a", "return_finish_reason": requested})

    assert request.extra == {}
    assert ("return_finish_reason" in request.provided_fields) is requested


def test_first_duplicate_parameter_wins(client: Any) -> None:
    request = client.decode(
        b'{"text_input":"a","parameters":{"max_tokens":1},"parameters":{"max_tokens":2,"n":"x"}}'
    )
    assert (request.stopping.max_tokens, request.n) == (1, None)


def test_batch_requires_equal_sampling_parameters(client_of: Callable[..., Any]) -> None:
    client = client_of("trtllm")
    request = client.decode({"text_input": ["a", "b"], "max_tokens": [3, 3]})

    assert (request.prompts, request.stopping.max_tokens, request.choice_count) == (
        ("a", "b"),
        3,
        2,
    )
    with pytest.raises(UnsupportedFeature, match="must be the same for every prompt"):
        client.decode({"text_input": ["a", "b"], "max_tokens": [3, 4]})


WANT = [
    ({}, "none", False),
    ({"return_num_input_tokens": True}, "final", False),
    ({"return_num_output_tokens": True}, "final", False),
    ({"return_num_output_tokens": False, "return_finish_reason": True}, "none", True),
]


@pytest.mark.parametrize(("body", "usage", "details"), WANT)
def test_output_flags_set_response_options(
    client: Any, body: Any, usage: str, details: bool
) -> None:
    want = client.decode({"text_input": "a", **body}).response_options
    assert (want.usage, want.details) == (usage, details)


NESTED = [
    (b'{"text_input":[["a"]]}', None),
    (b'{"text_input":[["a","b"]]}', "unexpected number of string elements 2"),
    (b'{"text_input":[[]]}', "expected 1 string elements"),
    (b'{"text_input":' + b"[" * 127 + b'"a"' + b"]" * 127 + b"}", None),
    (b'{"text_input":' + b"[" * 128 + b'"a"' + b"]" * 128 + b"}", "nested too deep"),
]


@pytest.mark.parametrize(("body", "complaint"), NESTED)
def test_nested_arrays_are_flattened_or_rejected(
    client: Any, body: bytes, complaint: str | None
) -> None:
    if complaint is None:
        assert client.decode(body).prompts == ("a",)
        return
    with pytest.raises(GatewayError, match=complaint):
        client.decode(body)


def test_parameter_with_empty_name_is_kept(client: Any) -> None:
    assert bytes(client.decode({"text_input": "a", "": True}).extra[""]) == b"true"


def test_missing_text_input_is_rejected(client: Any) -> None:
    with pytest.raises(
        InvalidParameter, match=r"but got 1 inputs for model 'vllm_like'"
    ) as excinfo:
        client.decode({"stream": True})
    assert excinfo.value.problem == "missing"


def test_field_names_map_internal_paths_to_wire_names(client_of: Callable[..., Any]) -> None:
    for profile, wire in (("vllm", "max_tokens"), ("llmapi", "sampling_param_max_tokens")):
        client = client_of(profile)
        call = client.call("/v2/models/m/generate", {}, method="POST")
        assert client.adapter.field_names(call)["stopping.max_tokens"] == wire
    stream = client_of("vllm").call("/v2/models/m/generate_stream", {}, method="POST")

    assert "echo" not in client_of("vllm").adapter.field_names(stream)
    assert (
        client_of("vllm").adapter.field_names(
            client_of("vllm").call("/v2/models/m/generate", {}, method="POST")
        )["echo"]
        == "exclude_input_in_output"
    )


def test_unknown_profiles_and_options_are_rejected(client_of: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="vllm, trtllm, llmapi, plain"):
        client_of("sglang")
    with pytest.raises(ValueError, match="strict or sane"):
        client_of("vllm", status="kind")
    with pytest.raises(ValueError, match="raw or chat"):
        client_of("vllm", prompts="cooked")


HI = {"text_input": "hi"}
INFER = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]}
ENDPOINTS: list[tuple[str, Any]] = [("generate", HI), ("generate_stream", HI), ("infer", INFER)]


@pytest.mark.parametrize(("variant", "body"), ENDPOINTS)
def test_prompts_option_selects_the_template_mode(
    client_of: Callable[..., Any], variant: str, body: Any
) -> None:
    for options, mode in (
        ({}, "raw"),
        ({"prompts": "raw"}, "raw"),
        ({"prompts": "chat"}, "server"),
    ):
        request = client_of("plain", **options).decode(body, variant)
        assert (request.prompts, request.templating.mode) == (("hi",), mode)


def test_prompt_logprobs_request_no_top_logprobs(client: Any) -> None:
    request = client.decode({"text_input": "a", "prompt_logprobs": 2})
    assert request.logprobs == LogprobsOptions(0, 2)


@pytest.mark.parametrize("flag", ["true", "false"])
@pytest.mark.parametrize("extra_json", ["", ', "my_own": 1'])
def test_stream_flag_with_escaped_name_is_decoded(client: Any, flag: str, extra_json: str) -> None:
    for name in ("stream", "\\u0073tream"):
        body = f'{{"text_input": "a", "{name}": {flag}{extra_json}}}'.encode()
        call = client.call("/v2/models/vllm_like/generate_stream", body, method="POST")

        assert client.adapter.read_routing_info(call).stream is (flag == "true")
        assert client.adapter.decode_request(call).stream is (flag == "true")


def test_parameters_object_is_decoded(client: Any) -> None:
    body = {"text_input": 'a "b"', "stream": True, "parameters": {"max_tokens": 5, "top_k": 3}}
    call = client.call("/v2/models/vllm_like/generate_stream", body, method="POST")

    request = client.adapter.decode_request(call)

    assert request.stopping.max_tokens == 5
    assert request.stream
    assert request.provided_fields == {"text_input", "stream", "max_tokens", "top_k"}
