"""Requests become commands, engine events become events, and losses are reported."""

import struct
from typing import Any

import msgspec
import pytest

from backends.torch import commands, events, ipc
from backends.torch.backend import TorchBackend
from backends.torch.settings import WatermarkSettings
from protocols.core import errors
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    PromptEcho,
    StreamStart,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    LogprobsOptions,
    Message,
    NamedTool,
    PromptOptions,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
)

CHAT = GenerationRequest(
    model="m", kind="chat", messages=(Message("developer", (TextPart("be brief"),)),)
)
TEXT = GenerationRequest(model="m", kind="completion", prompts=("a", (1, 2)))


def build_command(request: GenerationRequest) -> ipc.GenerateCommand:
    return commands.build_generate_command(request, 1, 9.0, templates=False)


def test_unset_parameters_stay_unset() -> None:
    assert build_command(CHAT) == ipc.GenerateCommand(
        1, ipc.PromptInput(turns=(ipc.ChatTurn("system", "be brief"),)), timeout=9.0
    )


def test_all_supported_parameters_are_mapped() -> None:
    sampling = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, typical_p=0.8, seed=2**64 - 1,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3,
        logit_bias={1: 2.0}, allowed_token_ids=(1, 2), bad_words=("no",),
    )  # fmt: skip
    stopping = StopConditions(
        max_tokens=5, min_tokens=2, stop=("x",), stop_token_ids=(7,), include_stop=True,
        ignore_eos=True, skip_special_tokens=False, truncate_prompt=9,
    )  # fmt: skip
    request = msgspec.structs.replace(
        TEXT,
        sampling=sampling,
        stopping=stopping,
        templating=PromptOptions(mode="server", arguments={"x": msgspec.Raw(b"1")}),
        n=2,
        best_of=3,
        logprobs=LogprobsOptions(4),
        echo=True,
        priority=3,
        response_options=ResponseOptions(token_ids=True, matched_stop=True),
    )

    assert commands.find_unsupported_params(request, {}, templates=False) == ()

    command = build_command(request)
    for name in set(ipc.EngineSamplingParams.__struct_fields__) - {"watermark"}:
        assert getattr(command.sampling, name) == getattr(sampling, name)
    for name in ipc.StopParams.__struct_fields__:
        assert getattr(command.stopping, name) == getattr(stopping, name)
    assert command.input == ipc.PromptInput(
        prompts=("a", (1, 2)), as_user_message=True, template_arguments=b'{"x":1}', truncate_to=9
    )
    assert (command.n, command.best_of, command.logprobs, command.prompt_logprobs) == (2, 3, 4, 4)
    assert (command.echo, command.priority, command.token_ids) == (True, 3, True)
    assert ipc.decode_commands(ipc.encode_frame([command])[4:]) == [command]


def test_do_sample_overflow_and_templates_are_mapped() -> None:
    replace = msgspec.structs.replace
    greedy = replace(CHAT, sampling=SamplingParams(do_sample=False, temperature=0.9))
    assert build_command(greedy).sampling.temperature == 0
    assert (
        build_command(replace(CHAT, stopping=StopConditions(overflow="truncate"))).input.truncate_to
        == -1
    )

    own = replace(CHAT, templating=PromptOptions(template="t", continue_final=True))
    assert build_command(own).input.template is None

    trusted = commands.build_generate_command(own, 1, 9.0, templates=True).input
    assert (trusted.template, trusted.continue_final) == ("t", True)
    assert [loss.field for loss in commands.find_unsupported_params(own, {}, templates=False)] == [
        "template"
    ]
    assert commands.find_unsupported_params(own, {}, templates=True) == ()


def test_watermark_uses_the_backend_settings() -> None:
    own = WatermarkSettings(key=7)
    for wanted, mark in ((True, own), (False, None), (None, None)):
        request = msgspec.structs.replace(TEXT, sampling=SamplingParams(watermark=wanted))
        assert commands.find_unsupported_params(request, {}, templates=False) == ()
        command = commands.build_generate_command(request, 1, 9.0, templates=False, watermark=own)
        assert command.sampling.watermark == mark


def make_search_request(
    n: int | None = None, best_of: int | None = None, **sampling: Any
) -> GenerationRequest:
    return msgspec.structs.replace(TEXT, sampling=SamplingParams(**sampling), n=n, best_of=best_of)


@pytest.mark.parametrize(
    ("request_", "beams"),
    [
        (make_search_request(beam_width=4), ipc.BeamSearchParams(4)),
        (make_search_request(beam_width=4, n=2, best_of=4), ipc.BeamSearchParams(4)),
        (make_search_request(beam_width=2, n=3), ipc.BeamSearchParams(3)),
        (
            make_search_request(beam_width=4, length_penalty=0.0),
            ipc.BeamSearchParams(4, length_penalty=0.0),
        ),
        (make_search_request(beam_width=4, diversity_penalty=0.5), ipc.BeamSearchParams(4, 4, 0.5)),
        (make_search_request(beam_width=4, diversity_penalty=0.0), ipc.BeamSearchParams(4)),
        (make_search_request(beam_width=1, temperature=0.0), None),
        (make_search_request(n=3, length_penalty=2.0, diversity_penalty=1.0), None),
    ],
)
def test_beam_search_parameters_are_mapped(
    request_: GenerationRequest, beams: ipc.BeamSearchParams | None
) -> None:
    assert commands.find_unsupported_params(request_, {}, templates=False) == ()
    assert build_command(request_).beams == beams
    assert commands.returns_best_only(request_) == (beams is not None)


def test_beam_search_reports_sampling_parameters_as_unsupported() -> None:
    for width in (1, 4):
        request = make_search_request(
            beam_width=width, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, typical_p=0.9, seed=1
        )
        unsupported = commands.find_unsupported_params(
            request, {"sampling.temperature": "heat"}, templates=False
        )
        assert {loss.field for loss in unsupported} == {
            "heat", "top_p", "top_k", "min_p", "typical_p", "seed",
        }  # fmt: skip
        assert build_command(request).sampling.temperature == 0
    neutral = make_search_request(
        beam_width=4, temperature=0.0, top_p=1.0, min_p=0.0, typical_p=1.0
    )
    assert commands.find_unsupported_params(neutral, {}, templates=False) == ()

    none = msgspec.structs.replace(
        make_search_request(beam_width=4), stopping=StopConditions(max_tokens=0)
    )
    assert build_command(none).beams is None


def test_best_of_returns_choices_at_the_end() -> None:
    assert commands.returns_best_only(make_search_request(n=2, best_of=3))
    assert not commands.returns_best_only(make_search_request(n=3, best_of=3))
    assert not commands.returns_best_only(make_search_request())


def test_unsupported_parameters_are_reported() -> None:
    request = msgspec.structs.replace(
        CHAT,
        messages=(Message("user", (TextPart("see"), ImagePart("data:"))),),
        tools=(Tool("f"),),
        tool_choice=NamedTool("f"),
        suffix="end",
    )
    unsupported = commands.find_unsupported_params(request, {"suffix": "behind"}, templates=False)

    assert {(loss.field, loss.reason) for loss in unsupported} == {
        ("messages[0].content[1]", "dropped"),
        ("behind", "dropped"),
    }


def test_embedding_request_is_mapped() -> None:
    request = EmbeddingRequest(
        model="e", inputs=("a",), instruction="i", dimensions=8, normalize=False, truncate=5
    )
    assert commands.find_unsupported_params(request, {}, templates=False) == ()
    assert commands.build_embed_command(request, 1, 9.0) == ipc.EmbedCommand(
        1, ("a",), "i", 8, False, 5, 9.0
    )

    cut = EmbeddingRequest(model="e", inputs=("a",), overflow="truncate")
    assert commands.build_embed_command(cut, 1, 9.0).max_tokens == -1


def test_engine_events_are_mapped_to_events() -> None:
    half = ipc.EngineToken(5, b"\xc3", -0.5, (ipc.TokenAlternative(6, b"a", -0.1),))
    engine_events: list[ipc.EngineEvent] = [
        ipc.PrefillDoneEvent(1, 7),
        ipc.PromptEchoEvent(1, 0, "p", (ipc.EngineToken(1, b"p", None),)),
        ipc.TextEvent(1, 2, "hi", 3, (5,), (half,)),
        ipc.ToolCallEvent(1, 2, 0, "call_1", "f", 9),
        ipc.ToolArgumentsEvent(1, 2, 0, "{}", 1),
        ipc.ChoiceEndEvent(1, 2, "stop", "END"),
        ipc.EmbeddingsEvent(1, 4, 2, struct.pack("<4f", 1, 2, 3, 4)),
        ipc.HeartbeatEvent(0, 0),
    ]
    again = ipc.decode_events(ipc.encode_frame(engine_events)[4:])

    assert again == engine_events

    mapped = [event for one in again for event in events.map_engine_event(one)]
    start, echo, text, call, arguments, end, *vectors = mapped
    assert start == StreamStart(7)
    assert isinstance(echo, PromptEcho)
    assert echo.logprobs[0].logprob is None
    assert isinstance(text, TextDelta)
    assert (text.text, text.index, text.tokens, text.token_ids) == ("hi", 2, 3, (5,))
    assert text.logprobs[0].data == b"\xc3"
    assert text.logprobs[0].token == "\ufffd"
    assert (text.logprobs[0].top[0].token, text.logprobs[0].top[0].data) == ("a", None)
    assert (call, arguments) == (ToolCallStart(2, 0, "call_1", "f"), ToolCallDelta(2, 0, "{}"))
    assert end == ChoiceEnd("stop", 2, "END")
    assert vectors == [Embedding(4, (1.0, 2.0)), Embedding(5, (3.0, 4.0))]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("invalid", errors.InvalidParameter),
        ("unsupported", errors.UnsupportedFeature),
        ("too_long", errors.ContextTooLong),
        ("overloaded", errors.Overloaded),
        ("deadline", errors.DeadlineExceeded),
        ("failed", errors.WorkerFailed),
    ],
)
def test_engine_failures_are_mapped_to_gateway_errors(
    kind: ipc.FailureKind, error: type[errors.GatewayError]
) -> None:
    raised = events.build_engine_error(ipc.RequestFailedEvent(1, kind, "why", "field", 9, 8))
    assert type(raised) is error
    assert raised.message == "why"


def test_oversized_ipc_frame_is_rejected() -> None:
    with pytest.raises(ValueError, match="bytes"):
        ipc.read_body_length(b"\xff\xff\xff\xff")


def test_engine_command_contains_the_tenant() -> None:
    request = GenerationRequest(model="m", kind="completion", prompts=("a",))
    backend = TorchBackend(path="x")
    order = backend._build_command(request, 1, 5.0, "web-app")

    assert isinstance(order, ipc.GenerateCommand)
    assert (order.tenant, order.timeout) == ("web-app", 5.0)
