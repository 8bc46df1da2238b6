"""Requests for workers follow their models' configurations."""

import json
from typing import Any

import pytest
from msgspec import Raw

from protocols.core.request import (
    GenerationRequest,
    JsonObjectFormat,
    LogprobsOptions,
    Message,
    PromptOptions,
    Request,
    SamplingParams,
    StopConditions,
    TextPart,
)
from protocols.triton.endpoints import Triton

MESSAGES = (Message("user", (TextPart("hi"),)),)
RAW = PromptOptions(mode="raw")


def make_chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "m", "kind": "chat", "messages": MESSAGES, **fields})


def make_completion(*prompts: Any, **fields: Any) -> GenerationRequest:
    fields = {"prompts": prompts or ("hi",), "templating": RAW, **fields}
    return GenerationRequest(model="m", kind="completion", **fields)


def create_adapter(profile: str, *inputs: tuple[Any, ...], **options: Any) -> Triton:
    """Create an adapter that has read the configuration of model m."""
    decoupled = options.pop("decoupled", True)
    outputs = options.pop("outputs", ("text_output",))
    adapter = Triton(profile, **options)
    if inputs:
        config = {
            "input": [
                {"name": name, "data_type": f"TYPE_{kind}", "dims": dims, "optional": optional}
                for name, kind, dims, optional in map(_add_input_defaults, inputs)
            ],
            "output": [{"name": one} for one in outputs],
            "model_transaction_policy": {"decoupled": decoupled},
        }
        assert adapter.load_metadata("m", [json.dumps(config).encode()]) is None
    return adapter


def _add_input_defaults(one: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*one, *("STRING", [1], True)[len(one) - 1 :])


def encode_body(request: Request, adapter: Triton | str = "vllm", path: str = "generate") -> Any:
    """Return the body without the prompt and the constant fields, with parameters unpacked."""
    adapter = adapter if isinstance(adapter, Triton) else Triton(adapter)
    wire = adapter.encode_request(request)
    assert (wire.method, wire.path) == ("POST", f"/v2/models/m/{path}")
    assert wire.headers == (("Content-Type", "application/json"),)
    body = json.loads(wire.body)
    if "sampling_parameters" in body:
        body["sampling_parameters"] = json.loads(body["sampling_parameters"])
    return body


def list_unsupported_parameters(
    request: Request, adapter: Triton | str = "vllm", **names: str
) -> set[tuple[str, str]]:
    """Return the losses, without that of the chat template."""
    adapter = adapter if isinstance(adapter, Triton) else Triton(adapter)
    unsupported = adapter.unsupported_parameters(
        request, {path.replace("__", "."): wire for path, wire in names.items()}
    )
    return {(one.field, one.reason) for one in unsupported if one.detail != "no chat template"}


def test_parameters_missing_in_the_model_config_are_dropped() -> None:
    adapter = create_adapter(
        "trtllm", ("text_input",), ("max_tokens", "INT32"), ("temperature", "FP32"), ("stream",)
    )
    request = make_completion(
        sampling=SamplingParams(temperature=1, top_k=3),
        output=JsonObjectFormat(),
        logprobs=LogprobsOptions(),
    )

    assert encode_body(request, adapter) == {
        "text_input": "hi",
        "stream": False,
        "temperature": 1.0,
    }
    assert list_unsupported_parameters(request, adapter) == {
        ("top_k", "dropped"),
        ("output", "dropped"),
        ("top", "dropped"),
    }


def test_vllm_without_sampling_parameters_tensor_uses_parameters() -> None:
    adapter = create_adapter(
        "vllm", ("text_input",), ("stream", "BOOL"), ("exclude_input_in_output", "BOOL")
    )
    request = make_completion(
        sampling=SamplingParams(temperature=1, seed=2**63, bad_words=("x",)),
        stopping=StopConditions(stop=("a",), ignore_eos=True),
        output=JsonObjectFormat(),
        n=2,
    )

    body = encode_body(request, adapter)

    assert body.pop("parameters") == {
        "temperature": 1,
        "seed": 2**63 - 1,
        "stop": "a",
        "ignore_eos": True,
        "structured_outputs": '{"json_object":true}',
    }
    assert body == {"text_input": "hi", "stream": False, "exclude_input_in_output": True}
    assert list_unsupported_parameters(request, adapter) == {
        ("seed", "clamped"),
        ("bad_words", "dropped"),
        ("n", "dropped"),
    }


@pytest.mark.parametrize(
    ("kind", "dims", "field", "value", "wire"),
    [
        ("INT32", [1], "max_tokens", 5, 5),
        ("INT32", [1], "max_tokens", 2**40, 2**31 - 1),
        ("UINT32", [1, 1], "max_tokens", 5, 5),
        ("INT16", [1], "max_tokens", 5, 5),
        ("FP32", [1], "max_tokens", 5, 5.0),
        ("STRING", [1], "max_tokens", 5, "5"),
        ("INT32", [2], "max_tokens", 5, None),
        ("INT32", [2, -1], "max_tokens", 5, None),
        ("INT32", [-1], "max_tokens", 5, 5),
        ("INT32", [1], "temperature", 1.0, 1),
        ("INT32", [1], "temperature", 0.5, None),
        ("FP16", [1], "temperature", 0.5, 0.5),
        ("STRING", [1], "temperature", 0.5, "0.5"),
        ("BOOL", [1], "temperature", 0.5, True),
        ("INT32", [1], "stop", ("a",), None),
        ("STRING", [1], "stop", ("a",), ["a"]),
        ("STRING", [1], "stop", ("a", "b"), None),
        ("STRING", [-1], "stop", ("a", "b"), ["a", "b"]),
        ("STRING", [2], "stop", ("a", "b"), ["a", "b"]),
        ("STRING", [-1, 2], "stop", ("a", "b", "c"), None),
        ("UINT64", [1], "seed", 2**64 - 1, 2**64 - 1),
        ("INT64", [1], "seed", 2**64 - 1, 2**63 - 1),
        ("INT32", [1], "seed", 2**31, 2**31 - 1),
        ("UINT32", [1], "seed", 2**32 + 3, 2**32 - 1),
        ("STRING", [1], "seed", 2**63, str(2**63)),
    ],
)
def test_values_are_converted_to_the_tensor_type_and_shape(
    kind: str, dims: list[int], field: str, value: Any, wire: Any
) -> None:
    adapter = create_adapter("plain", ("text_input",), (field, kind, dims))
    section = SamplingParams if field in {"temperature", "seed"} else StopConditions
    where = "sampling" if section is SamplingParams else "stopping"
    request = make_completion(**{where: section(**{field: value})})

    body = encode_body(request, adapter, "generate_stream")

    assert body.pop(field, None) == wire
    assert body == {"text_input": "hi", "stream": False}
    assert ((field, "dropped") in list_unsupported_parameters(request, adapter)) is (wire is None)


def test_unreadable_model_config_leaves_the_profile_defaults() -> None:
    for response in (None, b"", b"{}", b"\xff", b"[" * 9000, b'{"input": [{"name": 1}]}'):
        adapter = Triton("trtllm")
        assert adapter.load_metadata("m", [response]) is None
        assert adapter.encode_request(make_completion()) == Triton("trtllm").encode_request(
            make_completion()
        )


def test_model_config_cache_is_bounded() -> None:
    adapter = Triton("trtllm")
    config = b'{"input": [{"name": "text_input"}]}'
    for number in range(1024):
        adapter.load_metadata(f"m{number}", [config])
    adapter.load_metadata("m", [config])
    adapter.load_metadata("m7", [config.replace(b"]", b', {"name": "temperature", "dims": [1]}]')])

    assert "max_tokens" in json.loads(adapter.encode_request(make_completion()).body)

    warm = GenerationRequest(
        model="m7", kind="chat", messages=MESSAGES, sampling=SamplingParams(temperature=1)
    )
    assert json.loads(adapter.encode_request(warm).body) == {"text_input": "hi", "temperature": 1}


def test_stream_of_non_decoupled_model_is_approximated() -> None:
    adapter = create_adapter("trtllm", ("text_input",), ("stream", "BOOL"), decoupled=False)

    assert encode_body(make_completion(stream=True), adapter, "generate_stream")["stream"] is False
    assert ("stream", "approximated") in list_unsupported_parameters(
        make_completion(stream=True), adapter
    )
    assert list_unsupported_parameters(make_completion(), adapter) == set()


def test_decoupled_model_uses_generate_stream_for_unary_requests() -> None:
    adapter = create_adapter("plain", ("text_input",))

    assert encode_body(make_completion(), adapter, "generate_stream") == {
        "text_input": "hi",
        "stream": False,
    }


def test_custom_field_names_are_sent() -> None:
    fields = {"text_input": "PROMPT", "stream": "STREAM", "max_tokens": "LENGTH"}
    request = make_completion(stream=True, stopping=StopConditions(max_tokens=3))
    expected = {"PROMPT": "hi", "STREAM": True}

    adapter = Triton("plain", fields=fields)
    assert encode_body(request, adapter, "generate_stream") == {
        **expected,
        "parameters": {"LENGTH": 3},
    }

    adapter = create_adapter(
        "plain", ("PROMPT",), ("STREAM", "BOOL"), ("LENGTH", "INT32"), fields=fields
    )
    assert encode_body(request, adapter, "generate_stream") == {**expected, "LENGTH": 3}

    adapter = Triton(fields={"structured_outputs": "guided_decoding"})
    packed = encode_body(make_completion(output=JsonObjectFormat()), adapter)["sampling_parameters"]
    assert packed == {"guided_decoding": '{"json_object":true}'}


def test_custom_name_of_unknown_field_is_rejected() -> None:
    with pytest.raises(ValueError, match="plain have no PROMPT, TEXT; known: best_of, "):
        Triton("plain", fields={"PROMPT": "text_input", "TEXT": "x"})


# --- further fields of a Triton client ------------------------------------------------------------


def build_request_with_extra(source: str = "triton", **fields: str) -> GenerationRequest:
    extra = {name: Raw(raw.encode()) for name, raw in fields.items()}
    return make_completion(extra=extra, source=source, stopping=StopConditions(max_tokens=1))


@pytest.mark.parametrize(
    ("profile", "inputs", "name", "raw", "where"),
    [
        ("vllm", (), "priority", "7", "sampling_parameters"),
        ("vllm", (), "foo", '["a"]', "sampling_parameters"),
        ("vllm", (), "image", '["a"]', ""),
        ("vllm", [("text_input",), ("sampling_parameters",)], "image", '["a"]', None),
        ("vllm", [("text_input",)], "foo", "7", "parameters"),
        ("vllm", [("text_input",)], "foo", '["a"]', None),
        ("vllm", [("text_input",)], "foo", "null", None),
        ("vllm", (), "streaming", "true", "sampling_parameters"),
        ("vllm", (), "stream", "true", None),
        ("vllm", (), "return_logprobs", "true", None),
        ("vllm", (), "return_perf_metrics", "true", None),
        ("trtllm", (), "end_id", "2", ""),
        ("trtllm", (), "foo", "2", None),
        ("llmapi", (), "stop", "true", None),
        ("plain", (), "foo", '"x"', "parameters"),
        ("plain", (), "temperature", '"x"', None),
        ("plain", [("text_input",), ("stream", "BOOL"), ("own", "FP32")], "own", "1.5", ""),
    ],
)
def test_unknown_fields_of_triton_clients_are_forwarded(
    profile: str, inputs: Any, name: str, raw: str, where: str | None
) -> None:
    adapter = create_adapter(profile, *inputs)
    request = build_request_with_extra(**{name: raw})

    body = json.loads(adapter.encode_request(request).body)
    if "sampling_parameters" in body:
        body["sampling_parameters"] = json.loads(body["sampling_parameters"])

    flat = {**body, **body.get("parameters", {}), **body.get("sampling_parameters", {})}
    if where is None:
        is_kept = name in {"stream", "temperature"} or name not in flat
        assert is_kept, "the table has only our own keys"
        assert (name, "dropped") in list_unsupported_parameters(request, adapter)
    else:
        assert (body[where] if where else body)[name] == json.loads(raw)
        assert list_unsupported_parameters(request, adapter) == set()


def test_unknown_fields_of_other_protocols_are_dropped() -> None:
    assert list_unsupported_parameters(build_request_with_extra("openai", foo="1"), "plain") == {
        ("foo", "dropped")
    }
    assert (
        "foo"
        not in Triton("plain")
        .encode_request(build_request_with_extra("openai", foo="1"))
        .body.decode()
    )


def test_output_flags_that_are_honoured_are_not_reported_as_lost() -> None:
    flags = {"return_finish_reason": Raw(b"true"), "return_cumulative_logprob": Raw(b"true")}
    request = make_completion(extra=flags, source="triton", logprobs=LogprobsOptions())

    assert list_unsupported_parameters(request, "vllm") == set()
    assert "return_cumulative_logprob" not in encode_body(request)
    assert list_unsupported_parameters(make_completion(extra=flags, source="triton"), "vllm") == {
        ("return_cumulative_logprob", "dropped")
    }
