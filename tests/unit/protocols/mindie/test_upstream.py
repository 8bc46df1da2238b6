"""Requests for workers, by release, and their losses."""

import json
from typing import Any

import pytest
from msgspec import Raw

from protocols.core.errors import UnsupportedFeature
from protocols.core.request import (
    AudioPart,
    ChoiceFormat,
    EmbeddingRequest,
    ExtraFields,
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    LogprobsOptions,
    Message,
    NamedTool,
    PromptOptions,
    ReasoningOptions,
    ReasoningPart,
    RefusalPart,
    Request,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
    ToolCall,
    VideoPart,
)
from protocols.mindie.endpoints import MindIE
from protocols.mindie.messages import PromptPartKeys

RAW = PromptOptions(mode="raw")
TEXT = "/v2/models/m/generate"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
UNKNOWN_FIELDS = (
    ExtraFields("", {("later",): 1}),
    ExtraFields("text_input[0]", {("type",): "x"}, ("text_input[0]",)),
)
MESSAGES = (Message("user", (TextPart("hi"),)),)
HI = [{"role": "user", "content": "hi"}]
LONGEST = 2147483647
TOOL = Tool("f", parameters=Raw(b'{"type":"object"}'))


def make_completion(**fields: Any) -> GenerationRequest:
    fields = {"prompts": ("a b",), "templating": RAW, **fields}
    return GenerationRequest(model="m", kind="completion", **fields)


def make_chat(*messages: Message, **fields: Any) -> GenerationRequest:
    fields = {"messages": messages or MESSAGES, **fields}
    return GenerationRequest(model="m", kind="chat", **fields)


def encode_path_and_body(request: Request, profile: str = "2x", **options: Any) -> tuple[str, Any]:
    """Return the path, and the parameters of a text, or a chat's body without plain fields."""
    wire = MindIE(profile, **options).encode_request(request)
    assert (wire.method, wire.headers[0]) == ("POST", ("Content-Type", "application/json"))
    body = json.loads(wire.body)
    if "text_input" in body:
        assert body["text_input"] == "a b"
        parameters = body["parameters"]
        assert parameters.pop("details") is True
        if parameters["max_new_tokens"] == LONGEST:
            del parameters["max_new_tokens"]
        return wire.path, parameters
    assert body.pop("model") == "m"
    if body.get("messages") == HI:
        del body["messages"]
    return wire.path, body


def list_unsupported_parameters(
    request: Request, profile: str = "2x", names: Any = None, **options: Any
) -> set[tuple[str, str, str]]:
    unsupported = MindIE(profile, **options).unsupported_parameters(request, names or {})
    return {(loss.field, loss.reason, loss.path) for loss in unsupported}


# --- text -----------------------------------------------------------------------------------------


def test_text_prompt_is_sent_to_generate_with_details() -> None:
    wire = MindIE().encode_request(make_completion(client_id="a-1_B"))

    assert wire.path == TEXT
    assert wire.body == (
        b'{"id":"a-1_B","text_input":"a b","parameters":{"details":true,'
        b'"max_new_tokens":2147483647}}'
    )


def test_streaming_text_is_sent_to_generate_stream() -> None:
    wire = MindIE("rc1").encode_request(make_completion(stream=True, client_id="a b/ü" + "x" * 300))

    assert wire.path == f"{TEXT}_stream"
    assert json.loads(wire.body)["id"] == "a_b__" + "x" * 251


def test_model_name_is_escaped_in_the_path() -> None:
    request = GenerationRequest(model="../a?b", kind="completion", prompts=("x",), templating=RAW)

    assert MindIE().encode_request(request).path == "/v2/models/..%2Fa%3Fb/generate"


@pytest.mark.parametrize(
    ("sampling", "parameters"),
    [
        (SamplingParams(), {}),
        (SamplingParams(temperature=0.5, top_p=0.9), {"temperature": 0.5, "top_p": 0.9}),
        (SamplingParams(temperature=0.0, top_k=5), {"do_sample": False, "top_k": 5}),
        (SamplingParams(temperature=0.5, do_sample=False), {"do_sample": False}),
        (SamplingParams(do_sample=True), {"do_sample": True}),
        (SamplingParams(temperature=1e-5), {"temperature": 0.001}),
        (
            SamplingParams(top_p=0.0, repetition_penalty=0.0),
            {"top_p": 1e-6, "repetition_penalty": 1e-6},
        ),
        (SamplingParams(seed=7, typical_p=0.5, watermark=True), {"seed": 7, "typical_p": 0.5}),
        (SamplingParams(seed=2**64 - 1), {"seed": 2**63 - 1}),
        (SamplingParams(min_p=0.1, beam_width=4, presence_penalty=1.0), {}),
    ],
)
def test_sampling_parameters_are_encoded(
    sampling: SamplingParams, parameters: dict[str, Any]
) -> None:
    assert encode_path_and_body(make_completion(sampling=sampling)) == (TEXT, parameters)


@pytest.mark.parametrize(
    ("sampling", "parameters"),
    [
        (SamplingParams(), {}),
        (SamplingParams(temperature=0.5), {"temperature": 0.5, "do_sample": True}),
        (SamplingParams(top_p=0.5), {"top_p": 0.5, "do_sample": True}),
        (SamplingParams(top_k=5), {"top_k": 5, "do_sample": True}),
        (SamplingParams(top_k=5, do_sample=False), {"top_k": 5, "do_sample": False}),
        (SamplingParams(temperature=0.0), {"do_sample": False}),
        (SamplingParams(seed=0, typical_p=0.5), {"seed": 2**63 - 1}),
    ],
)
def test_rc1_sampling_parameters_set_do_sample(
    sampling: SamplingParams, parameters: dict[str, Any]
) -> None:
    assert encode_path_and_body(make_completion(sampling=sampling), "rc1") == (TEXT, parameters)


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({"stopping": StopConditions(max_tokens=3)}, {"max_new_tokens": 3}),
        ({"stopping": StopConditions(max_tokens=2**40)}, {}),
        ({"priority": 0}, {"priority": 1}),
        ({"priority": 204}, {"priority": 5}),
        ({"priority": 255}, {"priority": 5}),
        ({"priority": -3}, {"priority": 1}),
        ({"timeout": 0.2}, {"timeout": 1}),
        ({"timeout": 2.5}, {"timeout": 3}),
        ({"timeout": 1e7}, {"timeout": 65535}),
        ({"response_options": ResponseOptions(timing=True)}, {"perf_stat": True}),
        ({"source": "mindie", "extra": {"batch_size": Raw(b"100")}}, {"batch_size": 100}),
        ({"source": "openai", "extra": {"batch_size": Raw(b"100")}}, {}),
        ({"prompts": ("a b", "c"), "n": 3}, {}),
    ],
)
def test_other_generate_parameters_are_encoded(
    fields: dict[str, Any], parameters: dict[str, Any]
) -> None:
    assert encode_path_and_body(make_completion(**fields)) == (TEXT, parameters)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n": 1, "best_of": 1, "stopping": StopConditions(overflow="error")}, set()),
        ({"n": 2, "best_of": 2}, {("n", "dropped", "n")}),
        ({"n": 2, "best_of": 3}, {("n", "dropped", "n"), ("best_of", "dropped", "best_of")}),
        ({"prompts": ("a", "b")}, {("prompt", "dropped", "prompts")}),
        ({"stopping": StopConditions(stop=("x",))}, {("stop", "dropped", "stopping.stop")}),
        ({"sampling": SamplingParams(temperature=0.0, do_sample=True)}, set()),
        (
            {"sampling": SamplingParams(temperature=1e-5, watermark=True)},
            {
                ("temperature", "clamped", "sampling.temperature"),
                ("watermark", "dropped", "sampling.watermark"),
            },
        ),
        ({"sampling": SamplingParams(seed=2**63)}, {("seed", "approximated", "sampling.seed")}),
        ({"sampling": SamplingParams(seed=2**63 - 1, typical_p=0.5)}, set()),
        (
            {"response_options": ResponseOptions(token_ids=True)},
            {("token_ids", "dropped", "response_options.token_ids")},
        ),
        ({"priority": 5, "timeout": 3.0, "response_options": ResponseOptions(timing=True)}, set()),
        ({"extra": {"x": Raw(b"1")}}, {("x", "dropped", "")}),
        ({"extra": {"x": Raw(b"1")}, "source": "mindie"}, set()),
    ],
)
def test_generate_reports_unsupported_parameters(
    fields: dict[str, Any], expected: set[tuple[str, str, str]]
) -> None:
    assert list_unsupported_parameters(make_completion(**fields)) == expected


def test_loss_uses_the_client_field_name() -> None:
    request = make_completion(prompts=("a", "b"), n=2, sampling=SamplingParams(seed=2**63))
    names = {"prompts": "inputs", "n": "num", "sampling.seed": "random_seed"}

    assert {name for name, *_ in list_unsupported_parameters(request, names=names)} == {
        "inputs",
        "num",
        "random_seed",
    }


def test_rc1_generate_reports_unsupported_parameters() -> None:
    request = make_completion(sampling=SamplingParams(typical_p=0.5, seed=0))

    assert list_unsupported_parameters(request, "rc1") == {
        ("typical_p", "dropped", "sampling.typical_p"),
        ("seed", "approximated", "sampling.seed"),
    }


# --- features of completions only -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"prompts": ((1, 2),)}, {"prompt": [1, 2]}),
        ({"prompts": ((1, 2), "b")}, {"prompt": [1, 2]}),
        ({"logprobs": LogprobsOptions(9)}, {"prompt": "a b", "logprobs": 5}),
        (
            {
                "prompts": ((1,),),
                "n": 2,
                "sampling": SamplingParams(temperature=1.0),
                "stopping": StopConditions(stop=("x",)),
            },
            {"prompt": [1], "n": 2, "temperature": 1.0, "stop": ["x"]},
        ),
    ],
)
def test_token_ids_and_logprobs_are_sent_to_completions(
    fields: dict[str, Any], body: dict[str, Any]
) -> None:
    assert encode_path_and_body(make_completion(**fields)) == (COMPLETIONS, body)


@pytest.mark.parametrize("profile", ["1x", "rc1"])
def test_token_ids_are_rejected_for_profiles_without_completions(profile: str) -> None:
    with pytest.raises(UnsupportedFeature, match="token ids"):
        MindIE(profile).encode_request(make_completion(prompts=((1, 2),)))


def test_logprobs_are_dropped_for_profiles_without_completions() -> None:
    request = make_completion(logprobs=LogprobsOptions(2))

    assert encode_path_and_body(request, "1x") == (TEXT, {})
    assert list_unsupported_parameters(request, "1x") == {("top", "dropped", "logprobs.top")}


# --- chat -----------------------------------------------------------------------------------------


def test_chat_is_sent_to_chat_completions_with_req_id_header() -> None:
    wire = MindIE().encode_request(make_chat(client_id="x-1"))

    assert wire.path == CHAT
    assert ("req-id", "x-1") in wire.headers
    assert wire.body == b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def test_prompt_in_server_template_mode_is_sent_as_chat() -> None:
    request = make_completion(prompts=("hi",), templating=PromptOptions(mode="server"))

    assert encode_path_and_body(request) == (CHAT, {})


WARM = SamplingParams(temperature=0.7)


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (
            {"stopping": StopConditions(max_tokens=3),
             "provided_fields": frozenset({"max_completion_tokens"})},
            {"max_tokens": 3},
        ),
        ({"sampling": SamplingParams(temperature=0.0, seed=2**64 - 1)},
         {"temperature": 0.0, "seed": 2**63 - 1}),
        ({"sampling": SamplingParams(do_sample=False, temperature=0.5)}, {"temperature": 0.0}),
        ({"sampling": SamplingParams(do_sample=True)}, {"temperature": 1.0}),
        ({"sampling": SamplingParams(do_sample=True, top_k=5)}, {"top_k": 5}),
        ({"sampling": SamplingParams(repetition_penalty=3.0)}, {"repetition_penalty": 2}),
        ({"n": 1, "best_of": 1}, {"n": 1}),
        ({"n": 2}, {}),
        ({"n": 2, "sampling": WARM, "best_of": 4}, {"n": 2, "temperature": 0.7}),
        ({"n": 2, "sampling": SamplingParams(temperature=0.7, do_sample=False)},
         {"temperature": 0.0}),
        (
            {"sampling": SamplingParams(beam_width=4), "stopping": StopConditions(max_tokens=128),
             "n": 2},
            {"use_beam_search": True, "best_of": 4, "n": 2, "max_tokens": 128},
        ),
        ({"sampling": SamplingParams(beam_width=4), "stopping": StopConditions(max_tokens=129)},
         {"max_tokens": 129}),
        (
            {"stopping": StopConditions(stop=("", "a" * 1025, "b"), stop_token_ids=(5,),
             include_stop=True, ignore_eos=True, skip_special_tokens=False)},
            {"stop": ["b"], "stop_token_ids": [5], "include_stop_str_in_output": True,
             "ignore_eos": True, "skip_special_tokens": False},
        ),
        ({"logprobs": LogprobsOptions(30)}, {"logprobs": True, "top_logprobs": 20}),
        (
            {"tools": (TOOL,), "tool_choice": NamedTool("f")},
            {"tools": [{"type": "function",
                        "function": {"name": "f", "parameters": {"type": "object"}}}],
             "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ({"output": JsonObjectFormat()}, {"response_format": {"type": "json_object"}}),
        ({"output": ChoiceFormat(("a",))}, {}),
        (
            {"reasoning": ReasoningOptions(budget=9)},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 9}},
        ),
        (
            {"reasoning": ReasoningOptions(budget=2**40),
             "templating": PromptOptions(arguments={"x": Raw(b"1")})},
            {"chat_template_kwargs": {
                "x": 1, "enable_thinking": True, "thinking_budget": LONGEST}},
        ),
        ({"reasoning": ReasoningOptions(budget=0)}, {}),
        ({"reasoning": ReasoningOptions(effort="low")}, {}),
        ({"labels": {"user": "u"}, "extra": {"x": Raw(b"1")}}, {}),
        ({"source": "mindie", "extra": {"x": Raw(b"1")}}, {"x": 1}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
    ],
)  # fmt: skip
def test_chat_parameters_are_encoded(fields: dict[str, Any], body: dict[str, Any]) -> None:
    assert encode_path_and_body(make_chat(**fields)) == (CHAT, body)


def test_stop_strings_are_truncated_to_the_server_limit() -> None:
    long = tuple(f"{i:04}" + "x" * 1020 for i in range(40))

    _, body = encode_path_and_body(make_chat(stopping=StopConditions(stop=long)))
    _, short = encode_path_and_body(
        make_chat(stopping=StopConditions(stop=tuple(map(str, range(2000)))))
    )

    assert body["stop"] == list(long[:32])
    assert len(short["stop"]) == 1024


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n": 1, "best_of": 1, "sampling": SamplingParams(do_sample=True)}, set()),
        ({"n": 2}, {("n", "dropped", "n")}),
        ({"n": 2, "sampling": WARM}, set()),
        ({"n": 2, "sampling": WARM, "best_of": 4}, {("best_of", "dropped", "best_of")}),
        (
            {"sampling": SamplingParams(beam_width=4), "stopping": StopConditions(max_tokens=128),
             "n": 2},
            set(),
        ),
        ({"sampling": SamplingParams(beam_width=4)},
         {("beam_width", "dropped", "sampling.beam_width")}),
        ({"stopping": StopConditions(stop=("", "b"))}, {("stop", "clamped", "stopping.stop")}),
        ({"output": JsonObjectFormat(), "reasoning": ReasoningOptions(budget=9)}, set()),
        ({"output": ChoiceFormat(("a",))}, {("output", "dropped", "output")}),
        ({"reasoning": ReasoningOptions(budget=0)}, {("budget", "dropped", "reasoning.budget")}),
        ({"templating": PromptOptions(template="{{x}}")},
         {("template", "dropped", "templating.template")}),
        ({"extra": {"x": Raw(b"1")}}, {("x", "dropped", "")}),
        ({"source": "mindie", "extra": {"x": Raw(b"1")}}, set()),
        ({"priority": 3}, {("priority", "dropped", "priority")}),
    ],
)  # fmt: skip
def test_chat_reports_unsupported_parameters(
    fields: dict[str, Any], expected: set[tuple[str, str, str]]
) -> None:
    assert list_unsupported_parameters(make_chat(**fields)) == expected


def test_native_validator_clamps_and_drops_chat_parameters() -> None:
    request = make_chat(
        output=JsonObjectFormat(),
        reasoning=ReasoningOptions(budget=9),
        sampling=SamplingParams(temperature=3.0),
    )

    assert encode_path_and_body(request, vllm_validator=False) == (CHAT, {"temperature": 2})
    assert list_unsupported_parameters(request, vllm_validator=False) == {
        ("response_format", "dropped", "output"),
        ("budget", "dropped", "reasoning.budget"),
        ("temperature", "clamped", "sampling.temperature"),
    }


@pytest.mark.parametrize(
    ("fields", "body", "expected"),
    [
        ({"sampling": SamplingParams(temperature=0.0)}, {"temperature": 0.001},
         {("temperature", "clamped", "sampling.temperature")}),
        ({"sampling": SamplingParams(do_sample=False)}, {"temperature": 0.001},
         {("do_sample", "approximated", "sampling.do_sample")}),
        ({"sampling": SamplingParams(do_sample=True)}, {"temperature": 1.0}, set()),
        ({"sampling": SamplingParams(top_k=3)}, {}, {("top_k", "dropped", "sampling.top_k")}),
        ({"n": 1}, {"n": 1}, set()),
        ({"n": 2}, {}, {("n", "dropped", "n")}),
        ({"tools": (TOOL,), "tool_choice": "auto"}, {}, {("tools", "dropped", "tools")}),
        ({"logprobs": LogprobsOptions(2)}, {}, {("logprobs", "dropped", "logprobs.top")}),
        ({"stopping": StopConditions(stop=("x",))}, {}, {("stop", "dropped", "stopping.stop")}),
        ({"output": JsonObjectFormat()}, {}, {("response_format", "dropped", "output")}),
    ],
)  # fmt: skip
def test_rc1_chat_encodes_few_parameters_and_reports_the_rest(
    fields: dict[str, Any], body: dict[str, Any], expected: set[tuple[str, str, str]]
) -> None:
    assert encode_path_and_body(make_chat(**fields), "rc1") == (CHAT, body)
    assert list_unsupported_parameters(make_chat(**fields), "rc1") == expected


CALL = ToolCall("c", "f", "{}")
WIRE_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK = (
    Message("developer", (TextPart("a"), TextPart("b"))),
    Message("user", (TextPart("see"), ImagePart("https://x/i.png"), VideoPart("https://x/v.mp4"))),
    Message("user", (AudioPart("QQ==", "wav"), AudioPart("QQ==", "flac"), AudioPart("https://a"))),
    Message("user", (FilePart("f1"), TextPart("file"))),
    Message("assistant", (TextPart(""),)),
    Message("assistant", (RefusalPart("no"),)),
    Message("assistant", (), tool_calls=(CALL,)),
    Message("tool", (TextPart(""),), tool_call_id="c"),
)


def test_chat_messages_are_encoded_by_part_type() -> None:
    _, body = encode_path_and_body(make_chat(*TALK))

    assert body["messages"] == [
        {"role": "system", "content": "ab"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "https://x/i.png"}},
                {"type": "video_url", "video_url": {"url": "https://x/v.mp4"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "audio_url", "audio_url": {"url": "data:audio/x-wav;base64,QQ=="}},
                {"type": "audio_url", "audio_url": {"url": "data:audio/flac;base64,QQ=="}},
                {"type": "audio_url", "audio_url": {"url": "https://a"}},
            ],
        },
        {"role": "user", "content": "file"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "", "tool_calls": [WIRE_CALL]},
        {"role": "tool", "content": "", "tool_call_id": "c"},
    ]

    unsupported, changed = MindIE().unsupported_parameters(make_chat(*TALK), {})
    assert (changed.field, changed.reason) == ("messages[5].refusal", "approximated")
    assert (unsupported.field, unsupported.reason, unsupported.detail, unsupported.path) == (
        *("messages[3].content[0]", "dropped", "files", "messages"),
    )


def test_rc1_messages_keep_only_text_and_report_the_rest() -> None:
    _, body = encode_path_and_body(make_chat(*TALK), "rc1")

    assert [(one["role"], one["content"]) for one in body["messages"]] == [
        ("system", "ab"),
        ("user", "see"),
        ("user", "file"),
        ("assistant", "no"),
    ]

    unsupported = MindIE("rc1").unsupported_parameters(make_chat(*TALK), {})
    assert {one.detail for one in unsupported} == {
        *("audio", "files", "images", "refusals", "tool calls", "videos"),
    }


def test_a_message_that_has_only_encrypted_reasoning_is_reported() -> None:
    message = Message("assistant", (ReasoningPart("", redacted="R"),))
    question = Message("user", (TextPart("hi"),))
    request = make_chat(question, Message("assistant", (TextPart("a"),)), question, message)

    _, body = encode_path_and_body(request)
    losses = MindIE().unsupported_parameters(request, {})

    assert [one["role"] for one in body["messages"]] == ["user", "assistant", "user"]
    assert [one.detail for one in losses] == ["earlier reasoning"]


def test_message_without_content_is_sent_with_empty_content() -> None:
    _, body = encode_path_and_body(make_chat(Message("assistant")))

    assert body["messages"] == [{"role": "assistant", "content": ""}]


def test_reasoning_parts_in_messages_are_dropped() -> None:
    thinking = Message("assistant", (ReasoningPart("hm"), TextPart("a")))

    assert list_unsupported_parameters(make_chat(*MESSAGES, thinking)) == {
        ("messages[1].reasoning_content", "dropped", "messages")
    }


# --- conversations as text ------------------------------------------------------------------------


class UppercaseRenderer:
    def render_prompt(self, request: GenerationRequest) -> str:
        return "<" + request.messages[-1].text.upper() + ">"


def test_chats_text_option_renders_messages_to_a_prompt() -> None:
    adapter = MindIE(chats="text", renderer=UppercaseRenderer())
    wire = adapter.encode_request(make_chat(stream=True))

    assert wire.path == f"{TEXT}_stream"
    assert json.loads(wire.body)["text_input"] == "<HI>"
    assert adapter.unsupported_parameters(make_chat(), {}) == ()


def test_chats_text_without_template_joins_text_and_reports_losses() -> None:
    adapter = MindIE(chats="text")
    image = Message("user", (TextPart("hi"), ImagePart("https://x")))

    assert json.loads(adapter.encode_request(make_chat(image)).body)["text_input"] == "hi"
    assert list_unsupported_parameters(make_chat(image, tools=(TOOL,)), chats="text") == {
        ("messages", "approximated", "messages"),
        ("messages[0].content[1]", "dropped", "messages"),
        ("tools", "dropped", "tools"),
    }


# --- lengths, vectors -----------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [None, 9])
def test_max_iter_times_clamps_max_tokens(max_tokens: int | None) -> None:
    request = make_completion(stopping=StopConditions(max_tokens=max_tokens))

    assert encode_path_and_body(request, max_iter_times=5) == (TEXT, {"max_new_tokens": 5})

    losses = {("max_tokens", "clamped", "stopping.max_tokens")} if max_tokens else set()
    assert list_unsupported_parameters(request, max_iter_times=5) == losses


def test_embedding_request_raises_unsupported_feature() -> None:
    adapter, request = MindIE(), EmbeddingRequest(model="m", inputs=("a",))

    for ask in (
        adapter.encode_request,
        adapter.create_decoder,
        lambda r: adapter.unsupported_parameters(r, {}),
    ):
        with pytest.raises(UnsupportedFeature, match="embeddings"):
            ask(request)


def test_unknown_fields_beside_the_parameters_are_passed_on_and_those_of_parts_are_reported() -> (
    None
):
    request = make_completion(field_extra=UNKNOWN_FIELDS)

    body = json.loads(MindIE("2x").encode_request(request).body)
    losses = MindIE("2x").unsupported_parameters(request, {})

    assert (body["text_input"], body["later"]) == ("a b", 1)
    assert [one.field for one in losses] == ["text_input[0].type"]


def test_unknown_keys_of_a_prompt_s_texts_reach_the_worker_with_the_texts() -> None:
    keys = PromptPartKeys("inputs[1]", {("x",): 1}, ("text_input[1]",), ("a", " b"))
    request = make_completion(field_extra=(keys,), source="mindie")

    body = json.loads(MindIE().encode_request(request).body)

    assert body["text_input"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": " b", "x": 1},
    ]
    assert MindIE().unsupported_parameters(request, {}) == ()


def test_they_are_reported_where_the_prompt_is_sent_as_one_text() -> None:
    keys = PromptPartKeys("inputs[1]", {("x",): 1}, ("text_input[1]",), ("a", " b"))
    early = make_completion(field_extra=(keys,), source="mindie")
    rendered = make_completion(field_extra=(keys,), source="mindie", prompts=("<a b>",))

    for worker, request in ((MindIE("rc1"), early), (MindIE(), rendered)):
        losses = worker.unsupported_parameters(request, {})
        assert [one.field for one in losses] == ["inputs[1].x"]


def test_keys_of_a_message_that_is_not_sent_are_reported() -> None:
    called = Message("assistant", tool_calls=(CALL,), extra=ExtraFields("messages[1]", {("x",): 1}))

    losses = MindIE("rc1").unsupported_parameters(make_chat(*MESSAGES, called), {})

    assert [(one.field, one.detail) for one in losses] == [
        ("messages[1].tool_calls[0]", "tool calls"),
        ("messages[1]", ""),
    ]
