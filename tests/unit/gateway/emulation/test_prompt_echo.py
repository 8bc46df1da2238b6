"""An emulated response has the prompt before and the suffix after the text."""

from gateway.emulation.prompt_echo import strip_echo_and_suffix
from protocols.core.events import ChoiceEnd, Event, PromptEcho, StreamEnd, TextDelta
from protocols.core.request import EmbeddingRequest, GenerationRequest, LogprobsOptions


def make_completion(**fields: object) -> GenerationRequest:
    return GenerationRequest(model="m", kind="completion", prompts=("a", "b"), **fields)  # type: ignore[arg-type]


def test_request_without_echo_and_suffix_is_unchanged() -> None:
    plain = make_completion()

    assert strip_echo_and_suffix(plain) == (plain, None)
    assert strip_echo_and_suffix(EmbeddingRequest(model="m", inputs=("a",)))[1] is None


def test_every_choice_starts_with_the_prompt_and_ends_with_the_suffix() -> None:
    inner, outside = strip_echo_and_suffix(make_completion(echo=True, suffix="<e>", n=2))
    assert outside is not None
    assert (inner.echo, inner.suffix) == (None, None)  # type: ignore[union-attr]

    events: list[Event] = [
        TextDelta("x", 0),
        TextDelta("y", 0),
        ChoiceEnd("eos", 0),
        ChoiceEnd("length", 3),
        StreamEnd(),
    ]

    assert list(outside.apply(events)) == [
        PromptEcho(0, "a"),
        TextDelta("x", 0),
        TextDelta("y", 0),
        TextDelta("<e>", 0, tokens=0),
        ChoiceEnd("eos", 0),
        PromptEcho(3, "b"),
        TextDelta("<e>", 3, tokens=0),
        ChoiceEnd("length", 3),
        StreamEnd(),
    ]


def test_echo_with_logprobs_is_left_to_the_worker() -> None:
    inner, outside = strip_echo_and_suffix(make_completion(echo=True, logprobs=LogprobsOptions()))

    assert inner.echo is True  # type: ignore[union-attr]
    assert outside is not None
    assert list(outside.apply([TextDelta("x"), ChoiceEnd("eos")])) == [
        TextDelta("x"),
        ChoiceEnd("eos"),
    ]
