"""The prompt before and the suffix behind an answer, whatever answers."""

from gateway.core.types import (
    Done,
    EmbedRequest,
    End,
    Event,
    GenerateRequest,
    Logprobs,
    PromptEcho,
    Text,
)
from gateway.emulation import around


def completion(**fields: object) -> GenerateRequest:
    return GenerateRequest(model="m", kind="completion", prompts=("a", "b"), **fields)  # type: ignore[arg-type]


def test_nothing_is_done_where_nothing_was_asked() -> None:
    plain = completion()

    assert around(plain) == (plain, None)
    assert around(EmbedRequest(model="m", inputs=("a",)))[1] is None


def test_the_prompt_comes_first_and_the_suffix_last_in_every_choice() -> None:
    inner, outside = around(completion(echo=True, suffix="<e>", n=2))
    assert outside is not None
    assert (inner.echo, inner.suffix) == (None, None)  # type: ignore[union-attr]

    events: list[Event] = [Text("x", 0), Text("y", 0), End("eos", 0), End("length", 3), Done()]

    assert list(outside.apply(events)) == [
        PromptEcho(0, "a"),
        Text("x", 0),
        Text("y", 0),
        Text("<e>", 0, tokens=0),
        End("eos", 0),
        PromptEcho(3, "b"),
        Text("<e>", 3, tokens=0),
        End("length", 3),
        Done(),
    ]


def test_only_the_model_can_score_the_prompt() -> None:
    inner, outside = around(completion(echo=True, logprobs=Logprobs()))

    assert inner.echo is True  # type: ignore[union-attr]
    assert outside is not None
    assert list(outside.apply([Text("x"), End("eos")])) == [Text("x"), End("eos")]
