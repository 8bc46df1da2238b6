"""The requests that a gateway sends to our own workers are decoded unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw

from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.core.request import (
    AudioPart,
    ChoiceFormat,
    EmbeddingRequest,
    GenerationRequest,
    GrammarFormat,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    NamedTool,
    OutputFormat,
    PromptOptions,
    ReasoningPart,
    RegexFormat,
    Request,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
)
from protocols.openai.endpoints import OpenAI

MakeCall = Callable[..., ClientRequest]
MESSAGES = (Message("user", (TextPart("hi"),)),)
WORKER = OpenAI("interlingua")

SAMPLING: dict[str, Any] = {
    "temperature": 3.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.5,
    "typical_p": 0.75,
    "seed": -(2**63),
    "repetition_penalty": 1.5,
    "presence_penalty": 2.5,
    "frequency_penalty": -3.5,
    "logit_bias": {5: 50.0},
    "allowed_token_ids": (1, 2),
    "bad_words": ("a", "b"),
    "watermark": True,
    "beam_width": 4,
    "diversity_penalty": 0.5,
    "length_penalty": -1.5,
}
STOPPING: dict[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 3,
    "stop": ("a", "b", "c", "d", "e"),
    "stop_token_ids": (4, 5),
    "include_stop": True,
    "ignore_eos": True,
    "truncate_prompt": 100,
    "skip_special_tokens": False,
}
REST: dict[str, Any] = {
    "n": 200,
    "best_of": 300,
    "logprobs": LogprobsOptions(-1),
    "response_options": ResponseOptions(token_ids=True),
}
OTHERWISE = {
    "do_sample": "greedy is temperature 0",
    "overflow": "truncation is truncate_prompt_tokens -1",
    "spaces_between_special_tokens": "the engine does not heed it",
}
"""Parameters that are sent under another name, and why."""


def make_chat(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"model": "m", "kind": "chat", "messages": MESSAGES, **fields})


def make_completion(**fields: Any) -> GenerationRequest:
    values: dict[str, Any] = {
        "templating": PromptOptions(mode="raw"),
        "stopping": StopConditions(max_tokens=1),
    }
    return GenerationRequest(
        **{"model": "m", "kind": "completion", "prompts": ("a b",), **values, **fields}
    )


@pytest.fixture
def round_trip(make_call: MakeCall) -> Callable[[Request], Any]:
    """Return the request as the worker decodes it."""

    def read(request: Request) -> Any:
        assert WORKER.unsupported_parameters(request, {}) == ()
        wire = WORKER.encode_request(request)
        variants = {"chat/completions": "chat", "completions": "completion"}
        variant = variants.get(wire.path.removeprefix("/v1/"), "embedding")
        return WORKER.decode_request(make_call(variant, wire.body))

    return read


@pytest.mark.parametrize("kind", [make_chat, make_completion])
@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_parameter_round_trips(
    round_trip: Callable[[Request], Any], kind: Callable[..., GenerationRequest], name: str
) -> None:
    sampling = SamplingParams(**{name: SAMPLING[name]})
    assert round_trip(kind(sampling=sampling)).sampling == sampling


@pytest.mark.parametrize("kind", [make_chat, make_completion])
@pytest.mark.parametrize("name", STOPPING)
def test_stopping_parameter_round_trips(
    round_trip: Callable[[Request], Any], kind: Callable[..., GenerationRequest], name: str
) -> None:
    stopping = StopConditions(**{"max_tokens": 1, name: STOPPING[name]})
    assert round_trip(kind(stopping=stopping)).stopping == stopping


def test_tables_cover_every_sampling_and_stopping_field() -> None:
    for struct, table in ((SamplingParams, SAMPLING), (StopConditions, STOPPING)):
        assert set(struct.__struct_fields__) - set(OTHERWISE) == set(table)


@pytest.mark.parametrize("kind", [make_chat, make_completion])
@pytest.mark.parametrize("name", REST)
def test_other_parameter_round_trips(
    round_trip: Callable[[Request], Any], kind: Callable[..., GenerationRequest], name: str
) -> None:
    assert getattr(round_trip(kind(**{name: REST[name]})), name) == REST[name]


@pytest.mark.parametrize(("kind", "mode"), [(make_chat, "chat"), (make_completion, "raw")])
def test_add_special_tokens_round_trips(
    round_trip: Callable[[Request], Any], kind: Callable[..., GenerationRequest], mode: Any
) -> None:
    prompting = PromptOptions(mode=mode, add_special_tokens=False)
    assert round_trip(kind(templating=prompting)).templating == prompting


def test_greedy_and_truncate_are_encoded_as_equivalent_parameters(
    round_trip: Callable[[Request], Any],
) -> None:
    greedy = make_chat(sampling=SamplingParams(do_sample=False))
    assert round_trip(greedy).sampling == SamplingParams(temperature=0.0)

    fitted = make_chat(stopping=StopConditions(overflow="truncate"))
    assert round_trip(fitted).stopping == StopConditions(truncate_prompt=-1)


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"use_beam_search": True}, 1),
        ({"use_beam_search": True, "n": 3}, 3),
        ({"use_beam_search": True, "n": 3, "beam_width": 5}, 5),
        ({"beam_width": 5}, 5),
        ({}, None),
    ],
)
def test_beam_width_is_decoded_from_either_field_name(
    make_call: MakeCall, fields: dict[str, Any], width: int | None
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    decoded = WORKER.decode_request(make_call("chat", body))

    assert isinstance(decoded, GenerationRequest)
    assert decoded.sampling.beam_width == width


@pytest.mark.parametrize("kind", [make_chat, make_completion])
@pytest.mark.parametrize(
    "output",
    [
        JsonObjectFormat(),
        JsonSchemaFormat(Raw(b'{"type":"object"}'), "s", strict=True),
        RegexFormat("a+"),
        ChoiceFormat(("a", "b")),
        GrammarFormat("root ::= 'a'"),
    ],
)
def test_output_format_round_trips(
    round_trip: Callable[[Request], Any],
    kind: Callable[..., GenerationRequest],
    output: OutputFormat,
) -> None:
    assert round_trip(kind(output=output)).output == output


def test_tools_round_trip(round_trip: Callable[[Request], Any]) -> None:
    tools = (Tool("f", parameters=Raw(b'{"type":"object"}')), Tool("g"))
    decoded = round_trip(make_chat(tools=tools, tool_choice=NamedTool("g"), parallel_tools=False))

    assert (decoded.tools, decoded.tool_choice, decoded.parallel_tools) == (
        tools,
        NamedTool("g"),
        False,
    )


@pytest.mark.parametrize(
    "field",
    [
        {"instruction": "query: "},
        {"dimensions": 8},
        {"normalize": False},
        {"truncate": 5},
        {"overflow": "truncate"},
    ],
)
def test_embedding_parameter_round_trips(
    round_trip: Callable[[Request], Any], field: dict[str, Any]
) -> None:
    decoded = round_trip(EmbeddingRequest(model="m", inputs=("a",), **field))
    for name, value in field.items():
        assert getattr(decoded, name) == value


def test_priority_and_template_need_the_powers_option(make_call: MakeCall) -> None:
    request = make_chat(priority=3, templating=PromptOptions(template="T"))
    assert {loss.path for loss in WORKER.unsupported_parameters(request, {})} == {
        "priority", "templating.template",
    }  # fmt: skip

    open_ = OpenAI("interlingua", powers=True)
    assert open_.unsupported_parameters(request, {}) == ()

    decoded = open_.decode_request(make_call("chat", open_.encode_request(request).body))
    assert isinstance(decoded, GenerationRequest)
    assert (decoded.priority, decoded.templating.template) == (3, "T")


def test_parameters_that_the_engine_ignores_are_reported_as_lost() -> None:
    parts = (TextPart("hi"), ImagePart("https://x/y.png"), AudioPart("AA=="), ReasoningPart("so"))
    request = make_chat(
        messages=(*MESSAGES, Message("user", parts)),
        stopping=StopConditions(spaces_between_special_tokens=True),
    )

    reported = {
        (loss.field, loss.reason, loss.detail)
        for loss in WORKER.unsupported_parameters(request, {})
    }

    assert reported == {
        ("messages[1].content[1]", "dropped", "images"),
        ("messages[1].content[2]", "dropped", "audio"),
        ("messages[1].reasoning_content", "dropped", "earlier reasoning"),
        ("spaces_between_special_tokens", "dropped", ""),
    }


def test_pass_through_to_interlingua_workers_only_from_openai_clients(
    make_call: MakeCall, response_context: ResponseContext
) -> None:
    """Only OpenAI's adapter rejects what its clients may not send."""
    plain = OpenAI()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "top_k": 5}
    call = make_call("chat", body)

    assert WORKER.prepare_passthrough(plain, call, response_context) is not None
    assert plain.prepare_passthrough(WORKER, call, response_context) is None
    assert WORKER.prepare_passthrough(WORKER, call, response_context) is None
