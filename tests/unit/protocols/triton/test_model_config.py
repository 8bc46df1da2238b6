"""Requests for workers, held against what their models' configurations tell."""

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

SAID = (Message("user", (TextPart("hi"),)),)
RAW = PromptOptions(mode="raw")


def chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "m", "kind": "chat", "messages": SAID, **fields})


def text(*prompts: Any, **fields: Any) -> GenerationRequest:
    fields = {"prompts": prompts or ("hi",), "templating": RAW, **fields}
    return GenerationRequest(model="m", kind="completion", **fields)


def dialect(profile: str, *inputs: tuple[Any, ...], **options: Any) -> Triton:
    """With what the configuration of model m tells, where inputs are given."""
    decoupled = options.pop("decoupled", True)
    outputs = options.pop("outputs", ("text_output",))
    made = Triton(profile, **options)
    if inputs:
        config = {
            "input": [
                {"name": name, "data_type": f"TYPE_{kind}", "dims": dims, "optional": optional}
                for name, kind, dims, optional in map(_filled, inputs)
            ],
            "output": [{"name": one} for one in outputs],
            "model_transaction_policy": {"decoupled": decoupled},
        }
        assert made.load_metadata("m", [json.dumps(config).encode()]) is None
    return made


def _filled(one: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*one, *("STRING", [1], True)[len(one) - 1 :])


def sent(request: Request, made: Triton | str = "vllm", path: str = "generate") -> Any:
    """The body less the prompt and what is set in every request; the packed parameters unpacked."""
    made = made if isinstance(made, Triton) else Triton(made)
    wire = made.encode_request(request)
    assert (wire.method, wire.path) == ("POST", f"/v2/models/m/{path}")
    assert wire.headers == (("Content-Type", "application/json"),)
    body = json.loads(wire.body)
    if "sampling_parameters" in body:
        body["sampling_parameters"] = json.loads(body["sampling_parameters"])
    return body


def lost(request: Request, made: Triton | str = "vllm", **names: str) -> set[tuple[str, str]]:
    """What is lost, but for the template that none of these have."""
    made = made if isinstance(made, Triton) else Triton(made)
    found = made.unsupported_parameters(
        request, {path.replace("__", "."): wire for path, wire in names.items()}
    )
    return {(one.field, one.reason) for one in found if one.detail != "no chat template"}


def test_what_a_model_does_not_have_is_not_asked_of_it() -> None:
    made = dialect(
        "trtllm", ("text_input",), ("max_tokens", "INT32"), ("temperature", "FP32"), ("stream",)
    )
    request = text(
        sampling=SamplingParams(temperature=1, top_k=3),
        output=JsonObjectFormat(),
        logprobs=LogprobsOptions(),
    )

    assert sent(request, made) == {"text_input": "hi", "stream": False, "temperature": 1.0}
    assert lost(request, made) == {("top_k", "dropped"), ("output", "dropped"), ("top", "dropped")}


def test_vllm_without_its_own_tensor_takes_plain_parameters() -> None:
    made = dialect("vllm", ("text_input",), ("stream", "BOOL"), ("exclude_input_in_output", "BOOL"))
    request = text(
        sampling=SamplingParams(temperature=1, seed=2**63, bad_words=("x",)),
        stopping=StopConditions(stop=("a",), ignore_eos=True),
        output=JsonObjectFormat(),
        n=1,
    )

    body = sent(request, made)

    assert body.pop("parameters") == {
        "temperature": 1,
        "seed": 2**63 - 1,
        "stop": "a",
        "ignore_eos": True,
        "structured_outputs": '{"json_object":true}',
    }
    assert body == {"text_input": "hi", "stream": False, "exclude_input_in_output": True}
    assert lost(request, made) == {
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
def test_values_become_what_the_tensor_takes(
    kind: str, dims: list[int], field: str, value: Any, wire: Any
) -> None:
    made = dialect("plain", ("text_input",), (field, kind, dims))
    section = SamplingParams if field in {"temperature", "seed"} else StopConditions
    where = "sampling" if section is SamplingParams else "stopping"
    request = text(**{where: section(**{field: value})})

    body = sent(request, made, "generate_stream")

    assert body.pop(field, None) == wire
    assert body == {"text_input": "hi", "stream": False}
    assert ((field, "dropped") in lost(request, made)) is (wire is None)


def test_what_is_no_configuration_leaves_the_profile_s_rules() -> None:
    for answer in (None, b"", b"{}", b"\xff", b"[" * 9000, b'{"input": [{"name": 1}]}'):
        made = Triton("trtllm")
        assert made.load_metadata("m", [answer]) is None
        assert made.encode_request(text()) == Triton("trtllm").encode_request(text())


def test_no_more_models_are_remembered_than_a_worker_has() -> None:
    made = Triton("trtllm")
    config = b'{"input": [{"name": "text_input"}]}'
    for number in range(1024):
        made.load_metadata(f"m{number}", [config])
    made.load_metadata("m", [config])
    made.load_metadata("m7", [config.replace(b"]", b', {"name": "temperature", "dims": [1]}]')])

    assert "max_tokens" in json.loads(made.encode_request(text()).body)
    warm = GenerationRequest(
        model="m7", kind="chat", messages=SAID, sampling=SamplingParams(temperature=1)
    )
    assert json.loads(made.encode_request(warm).body) == {"text_input": "hi", "temperature": 1}


def test_a_model_that_does_not_stream_answers_streams_in_one_event() -> None:
    made = dialect("trtllm", ("text_input",), ("stream", "BOOL"), decoupled=False)

    assert sent(text(stream=True), made, "generate_stream")["stream"] is False
    assert ("stream", "approximated") in lost(text(stream=True), made)
    assert lost(text(), made) == set()


def test_a_model_that_nothing_keeps_from_streaming_is_read_as_a_stream() -> None:
    made = dialect("plain", ("text_input",))

    assert sent(text(), made, "generate_stream") == {"text_input": "hi", "stream": False}


def test_words_of_a_model_s_own() -> None:
    fields = {"text_input": "PROMPT", "stream": "STREAM", "max_tokens": "LENGTH"}
    request = text(stream=True, stopping=StopConditions(max_tokens=3))
    expected = {"PROMPT": "hi", "STREAM": True}

    made = Triton("plain", fields=fields)
    assert sent(request, made, "generate_stream") == {**expected, "parameters": {"LENGTH": 3}}
    made = dialect("plain", ("PROMPT",), ("STREAM", "BOOL"), ("LENGTH", "INT32"), fields=fields)
    assert sent(request, made, "generate_stream") == {**expected, "LENGTH": 3}
    made = Triton(fields={"structured_outputs": "guided_decoding"})
    packed = sent(text(output=JsonObjectFormat()), made)["sampling_parameters"]
    assert packed == {"guided_decoding": '{"json_object":true}'}


def test_words_that_the_profile_does_not_have() -> None:
    with pytest.raises(ValueError, match="plain have no PROMPT, TEXT; known: best_of, "):
        Triton("plain", fields={"PROMPT": "text_input", "TEXT": "x"})


# --- what a client of the same dialect sent beside ------------------------------------------------


def extra(source: str = "triton", **fields: str) -> GenerationRequest:
    given = {name: Raw(raw.encode()) for name, raw in fields.items()}
    return text(extra=given, source=source, stopping=StopConditions(max_tokens=1))


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
def test_fields_of_the_same_dialect_go_on(
    profile: str, inputs: Any, name: str, raw: str, where: str | None
) -> None:
    made = dialect(profile, *inputs)
    request = extra(**{name: raw})

    body = json.loads(made.encode_request(request).body)
    if "sampling_parameters" in body:
        body["sampling_parameters"] = json.loads(body["sampling_parameters"])

    flat = {**body, **body.get("parameters", {}), **body.get("sampling_parameters", {})}
    if where is None:
        kept = name in {"stream", "temperature"} or name not in flat
        assert kept, "what is here is our own"
        assert (name, "dropped") in lost(request, made)
    else:
        assert (body[where] if where else body)[name] == json.loads(raw)
        assert lost(request, made) == set()


def test_fields_of_another_dialect_are_lost() -> None:
    assert lost(extra("openai", foo="1"), "plain") == {("foo", "dropped")}
    assert "foo" not in Triton("plain").encode_request(extra("openai", foo="1")).body.decode()


def test_flags_that_the_answer_heeds_are_not_lost() -> None:
    asked = {"return_finish_reason": Raw(b"true"), "return_cumulative_logprob": Raw(b"true")}
    request = text(extra=asked, source="triton", logprobs=LogprobsOptions())

    assert lost(request, "vllm") == set()
    assert "return_cumulative_logprob" not in sent(request)
    assert lost(text(extra=asked, source="triton"), "vllm") == {
        ("return_cumulative_logprob", "dropped")
    }
