"""Requests to orders, news to events, and what is reported as lost."""

import struct

import msgspec
import pytest

from backends.torch import mapping, spec
from gateway.core import errors
from gateway.core.types import (
    EmbedRequest,
    End,
    GenerateRequest,
    ImagePart,
    JsonObject,
    Logprobs,
    Message,
    PromptEcho,
    Sampling,
    Start,
    Stopping,
    Templating,
    Text,
    TextPart,
    Tool,
    Vector,
    Want,
)

CHAT = GenerateRequest(
    model="m", kind="chat", messages=(Message("developer", (TextPart("be brief"),)),)
)
TEXT = GenerateRequest(model="m", kind="completion", prompts=("a", (1, 2)))


def order(request: GenerateRequest) -> spec.Generate:
    return mapping.generate(request, 1, 9.0, templates=False)


def test_silence_stays_silence() -> None:
    assert order(CHAT) == spec.Generate(
        1, spec.Input(turns=(spec.Turn("system", "be brief"),)), timeout=9.0
    )


def test_everything_carried_arrives() -> None:
    sampling = Sampling(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, typical_p=0.8, seed=2**64 - 1,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3,
        logit_bias={1: 2.0}, allowed_token_ids=(1, 2), bad_words=("no",),
    )  # fmt: skip
    stopping = Stopping(
        max_tokens=5, min_tokens=2, stop=("x",), stop_token_ids=(7,), include_stop=True,
        ignore_eos=True, skip_special_tokens=False, truncate_prompt=9,
    )  # fmt: skip
    request = msgspec.structs.replace(
        TEXT,
        sampling=sampling,
        stopping=stopping,
        templating=Templating(mode="server", arguments={"x": msgspec.Raw(b"1")}),
        n=2,
        best_of=3,
        logprobs=Logprobs(4),
        echo=True,
        priority=3,
        want=Want(token_ids=True),
    )
    assert mapping.lost(request, {}, templates=False) == ()
    got = order(request)
    for name in spec.Picking.__struct_fields__:
        assert getattr(got.picking, name) == getattr(sampling, name)
    for name in spec.Ending.__struct_fields__:
        assert getattr(got.ending, name) == getattr(stopping, name)
    assert got.input == spec.Input(prompts=("a", (1, 2)), wrap=True, arguments=b'{"x":1}', keep=9)
    assert (got.n, got.best_of, got.logprobs, got.prompt_logprobs) == (2, 3, 4, 4)
    assert (got.echo, got.priority, got.token_ids) == (True, 3, True)
    assert spec.read_orders(spec.frame([got])[4:]) == [got]


def test_greedy_truncation_and_templates() -> None:
    replace = msgspec.structs.replace
    greedy = replace(CHAT, sampling=Sampling(do_sample=False, temperature=0.9))
    assert order(greedy).picking.temperature == 0
    assert order(replace(CHAT, stopping=Stopping(overflow="truncate"))).input.keep == -1
    own = replace(CHAT, templating=Templating(template="t", continue_final=True))
    assert order(own).input.template is None
    trusted = mapping.generate(own, 1, 9.0, templates=True).input
    assert (trusted.template, trusted.continue_final) == ("t", True)
    assert [loss.field for loss in mapping.lost(own, {}, templates=False)] == ["template"]
    assert mapping.lost(own, {}, templates=True) == ()


def test_what_is_not_done_is_reported() -> None:
    request = msgspec.structs.replace(
        CHAT,
        messages=(Message("user", (TextPart("see"), ImagePart("data:"))),),
        tools=(Tool("f"),),
        tool_choice="required",
        output=JsonObject(),
        sampling=Sampling(beam_width=2, watermark=True),
    )
    found = mapping.lost(request, {"output": "response_format"}, templates=False)
    assert {(loss.field, loss.reason) for loss in found} == {
        ("messages", "dropped"),
        ("tools", "dropped"),
        ("tool_choice", "dropped"),
        ("response_format", "dropped"),
        ("beam_width", "dropped"),
        ("watermark", "dropped"),
    }


def test_embedding() -> None:
    request = EmbedRequest(
        model="e", inputs=("a",), instruction="i", dimensions=8, normalize=False, truncate=5
    )
    assert mapping.lost(request, {}, templates=False) == ()
    assert mapping.embed(request, 1, 9.0) == spec.Embed(1, ("a",), "i", 8, False, 5, 9.0)
    cut = EmbedRequest(model="e", inputs=("a",), overflow="truncate")
    assert mapping.embed(cut, 1, 9.0).keep == -1


def test_news_become_events() -> None:
    half = spec.Token(5, b"\xc3", -0.5, (spec.Alternative(6, b"a", -0.1),))
    news: list[spec.News] = [
        spec.Started(1, 7),
        spec.Echo(1, 0, "p", (spec.Token(1, b"p", None),)),
        spec.Piece(1, 2, "hi", 3, (5,), (half,)),
        spec.Ended(1, 2, "stop", "END"),
        spec.Vectors(1, 4, 2, struct.pack("<4f", 1, 2, 3, 4)),
        spec.Heartbeat(0, 0),
    ]
    again = spec.read_news(spec.frame(news)[4:])
    assert again == news
    start, echo, text, end, *vectors = [e for one in again for e in mapping.events(one)]
    assert start == Start(7)
    assert isinstance(echo, PromptEcho)
    assert echo.logprobs[0].logprob is None
    assert isinstance(text, Text)
    assert (text.text, text.index, text.tokens, text.token_ids) == ("hi", 2, 3, (5,))
    assert text.logprobs[0].data == b"\xc3"
    assert text.logprobs[0].token == "\ufffd"
    assert (text.logprobs[0].top[0].token, text.logprobs[0].top[0].data) == ("a", None)
    assert end == End("stop", 2, "END")
    assert vectors == [Vector(4, (1.0, 2.0)), Vector(5, (3.0, 4.0))]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("invalid", errors.InvalidParameter),
        ("unsupported", errors.Unsupported),
        ("too_long", errors.ContextTooLong),
        ("overloaded", errors.Overloaded),
        ("deadline", errors.DeadlineExceeded),
        ("failed", errors.WorkerFailed),
    ],
)
def test_failures_are_errors_of_the_tree(
    kind: spec.FailKind, error: type[errors.GatewayError]
) -> None:
    got = mapping.error(spec.Failed(1, kind, "why", "field", 9, 8))
    assert type(got) is error
    assert got.message == "why"


def test_a_frame_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        spec.body_length(b"\xff\xff\xff\xff")
