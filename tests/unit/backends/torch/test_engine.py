"""The engine, run step by step: commands, steps, events."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from backends.torch.ipc import (
    ChatTurn,
    ChoiceEndEvent,
    EngineSamplingParams,
    GenerateCommand,
    PrefillDoneEvent,
    PromptInput,
    RequestFailedEvent,
    RequestFinishedEvent,
    StopParams,
    TextEvent,
)
from backends.torch.scheduler import SchedulerConfig

Drive = Callable[..., Any]

GREEDY = EngineSamplingParams(temperature=0)


def asked(
    prompt: str = "Hello",
    *,
    job: int = 1,
    picking: EngineSamplingParams = GREEDY,
    max_tokens: int = 24,
    **fields: Any,
) -> GenerateCommand:
    ending = fields.pop("ending", None) or StopParams(max_tokens=max_tokens, ignore_eos=True)
    fields = {"token_ids": True, **fields}
    return GenerateCommand(job, PromptInput(prompts=(prompt,)), picking, ending, **fields)


def said(script_ending: StopParams, **fields: Any) -> GenerateCommand:
    return GenerateCommand(
        1, PromptInput(prompts=("x",)), GREEDY, script_ending, token_ids=True, **fields
    )


# --- the model ----------------------------------------------------------------------------------


def test_greedy_is_what_transformers_generates(
    driven: Drive, reference: Any, tokenizer: Any
) -> None:
    for prompt in ("Hello", "a much longer prompt, with commas, to be read in chunks", "é"):
        ids = tokenizer.encode(prompt)
        with torch.inference_mode():
            whole = reference.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        for chunk in (256, 3, 1):
            got = driven(SchedulerConfig(max_chunk_tokens=chunk)).run(asked(prompt))
            assert got.ids() == whole[0, len(ids) :].tolist()


def test_neighbours_do_not_matter(driven: Drive) -> None:
    prompts = [f"prompt {i} " * (i + 1) for i in range(6)]
    hot = EngineSamplingParams(temperature=0.9, top_p=0.9, seed=7)
    alone = [driven().run(asked(p, picking=hot)).ids() for p in prompts]
    specs = [asked(p, job=i + 1, picking=hot) for i, p in enumerate(prompts)]
    together = driven(SchedulerConfig(max_chunk_tokens=5)).run(*specs)
    assert [together.ids(i + 1) for i in range(6)] == alone
    assert together.finished(6).max_batch > 1


def test_logprobs_are_the_models_own(driven: Drive, reference: Any, tokenizer: Any) -> None:
    hot = EngineSamplingParams(temperature=3.0, seed=1, top_k=5, repetition_penalty=1.5)
    got = driven().run(asked("Hello", picking=hot, logprobs=3, echo=True, prompt_logprobs=2))
    prompt, output = tokenizer.encode("Hello"), got.ids()
    with torch.inference_mode():
        truth = reference(torch.tensor([prompt + output])).logits[0].log_softmax(-1)
    tokens = [token for piece in got.select(TextEvent) for token in piece.tokens]
    assert [t.id for t in tokens] == output
    for at, token in enumerate(tokens):
        line = truth[len(prompt) - 1 + at]
        assert token.logprob == pytest.approx(float(line[token.id]), abs=1e-3)
        assert [a.id for a in token.top] == line.topk(3).indices.tolist()
        assert token.data == bytes([token.id]) or token.id >= 256
    echo = got.echo()
    assert echo.text == "Hello"
    assert [t.id for t in echo.tokens] == prompt
    assert echo.tokens[0].logprob is None
    for at, token in enumerate(echo.tokens[1:]):
        assert token.logprob == pytest.approx(float(truth[at][token.id]), abs=1e-3)
        assert len(token.top) == 2


# --- sampling -----------------------------------------------------------------------------------


def test_a_seed_reproduces_and_another_differs(driven: Drive) -> None:
    def ids(seed: int) -> list[int]:
        found: list[int] = (
            driven().run(asked(picking=EngineSamplingParams(temperature=1, seed=seed))).ids()
        )
        return found

    assert ids(5) == ids(5) != ids(6)
    assert ids(2**64 - 1) != ids(0)


def test_neighbours_that_leave_do_not_matter(driven: Drive) -> None:
    """The same seed gives the same text whoever comes and goes, and in whichever order."""
    hot = EngineSamplingParams(
        temperature=1.2, seed=9, top_p=0.95, typical_p=0.9, repetition_penalty=1.1
    )
    alone = driven().run(asked(picking=hot)).ids()
    for order in ((1, 2, 3), (3, 1, 2), (2, 3, 1)):
        got = driven()
        for job in order:
            got.engine.submit(asked(f"Hello{job}"[: 4 + job], job=job, picking=hot))
        for at in range(12):
            got.engine.step()
            if at in (3, 7):
                got.engine.cancel(2 + at // 4)
        got.run()
        assert got.ids() == alone


def test_without_a_seed_answers_differ(driven: Drive) -> None:
    hot = EngineSamplingParams(temperature=2)
    assert driven().run(asked(picking=hot)).ids() != driven().run(asked(picking=hot)).ids()


def test_n_choices_differ_and_the_first_is_that_of_one(driven: Drive) -> None:
    hot = EngineSamplingParams(temperature=1, seed=5)
    got = driven().run(asked(picking=hot, n=3, best_of=3))
    choices = [got.ids(choice=i) for i in range(3)]
    assert len({tuple(ids) for ids in choices}) == 3
    assert choices[0] == driven().run(asked(picking=hot)).ids()
    assert set(got.ended()) == {0, 1, 2}
    assert got.finished().prompt_tokens == 5
    assert got.finished().completion_tokens == 72


def test_n_with_fewer_places_than_choices(driven: Drive) -> None:
    hot = EngineSamplingParams(temperature=1, seed=5)
    wide = driven().run(asked(picking=hot, n=5, best_of=5))
    narrow = driven(SchedulerConfig(max_sequences=2)).run(asked(picking=hot, n=5, best_of=5))
    assert [wide.ids(choice=i) for i in range(5)] == [narrow.ids(choice=i) for i in range(5)]
    assert narrow.engine.active_count == 0


def test_best_of_returns_the_likeliest(driven: Drive) -> None:
    hot = EngineSamplingParams(temperature=1, seed=5)
    every = driven().run(asked(picking=hot, n=4, best_of=4, logprobs=0))
    sums = {
        i: sum(t.logprob or 0 for p in every.select(TextEvent) if p.choice == i for t in p.tokens)
        for i in range(4)
    }
    best = sorted(sums, key=lambda i: -sums[i])[:2]
    got = driven().run(asked(picking=hot, n=2, best_of=4))
    assert [got.ids(choice=i) for i in range(2)] == [every.ids(choice=i) for i in best]
    assert got.finished().completion_tokens == 96


def test_several_prompts_have_their_own_choices(driven: Drive) -> None:
    spec = msgspec.structs.replace(
        asked(n=2, best_of=2), input=PromptInput(prompts=("ab", (99, 100)))
    )
    got = driven().run(spec)
    assert set(got.ended()) == {0, 1, 2, 3}
    assert got.ids(choice=0) == driven().run(asked("ab")).ids()
    assert got.ids(choice=2) == driven().run(asked("cd")).ids()
    assert got.finished().prompt_tokens == 4
    assert len(got.select(PrefillDoneEvent)) == 1


def test_penalties_and_bans_reach_the_tokens(driven: Drive) -> None:
    plain = driven().run(asked()).ids()
    once = (
        driven()
        .run(asked(picking=EngineSamplingParams(temperature=0, presence_penalty=100.0)))
        .ids()
    )
    assert len(set(once)) == len(once)
    barred = plain[0]
    none = EngineSamplingParams(temperature=0, logit_bias={barred: -1000.0})
    assert barred not in driven().run(asked(picking=none)).ids()
    few = EngineSamplingParams(temperature=1, allowed_token_ids=(65, 66))
    assert set(driven().run(asked(picking=few)).ids()) <= {65, 66}
    words = EngineSamplingParams(
        temperature=1, allowed_token_ids=(65, 66), bad_words=("AB",), seed=1
    )
    assert "AB" not in driven().run(asked(picking=words)).text()


# --- ends ---------------------------------------------------------------------------------------


def test_eos_ends_and_is_no_text(scripted: Drive) -> None:
    got, _ = scripted("hi")
    got.run(said(StopParams(max_tokens=9)))
    assert got.text() == "hi"
    assert got.ended() == {0: ChoiceEndEvent(1, 0, "eos")}
    assert got.finished().completion_tokens == 3


def test_ignore_eos_goes_on(scripted: Drive) -> None:
    got, _ = scripted("hi")
    got.run(said(StopParams(max_tokens=9, ignore_eos=True)))
    assert got.ended()[0].reason == "length"
    assert len(got.ids()) == 9
    assert got.text() == "hi"


def test_max_tokens(scripted: Drive) -> None:
    got, _ = scripted("hello")
    got.run(said(StopParams(max_tokens=3)))
    assert (got.text(), got.ended()[0].reason) == ("hel", "length")


def test_max_tokens_zero_makes_none(scripted: Drive) -> None:
    got, _ = scripted("hello")
    got.run(said(StopParams(max_tokens=0), echo=True))
    assert (got.text(), got.ended()[0].reason, got.echo().text) == ("", "length", "x")
    assert got.finished().completion_tokens == 0


def test_the_context_ends_a_choice(driven: Drive) -> None:
    got = driven().run(asked("x" * 100, max_tokens=1000))
    assert len(got.ids()) == 28
    assert got.ended()[0].reason == "length"


def test_a_stop_string_over_tokens_is_never_sent(scripted: Drive) -> None:
    got, _ = scripted("one, END and more")
    got.run(said(StopParams(stop=("never", "END"))))
    assert got.text() == "one, "
    assert got.ended() == {0: ChoiceEndEvent(1, 0, "stop", "END")}
    assert "".join(map(chr, got.ids())) == "one, "


def test_a_stop_string_is_kept_where_asked(scripted: Drive) -> None:
    got, _ = scripted("one, END and more")
    got.run(said(StopParams(stop=("END",), include_stop=True)))
    assert got.text() == "one, END"


def test_what_only_began_like_a_stop_string_is_sent(scripted: Drive) -> None:
    got, _ = scripted("an EN")
    got.run(said(StopParams(stop=("END",))))
    assert (got.text(), got.ended()[0].reason) == ("an EN", "eos")
    assert len(got.ids()) == 5


def test_stop_token_ids(scripted: Drive) -> None:
    got, _ = scripted("abc")
    got.run(said(StopParams(stop_token_ids=(98,))))
    assert (got.text(), got.ended()[0].stop) == ("a", 98)
    got, _ = scripted("abc")
    got.run(said(StopParams(stop_token_ids=(98,), include_stop=True)))
    assert got.text() == "ab"


def test_min_tokens_holds_eos_and_stop_back(scripted: Drive) -> None:
    got, _ = scripted("a")
    got.run(said(StopParams(min_tokens=4, max_tokens=10)))
    assert len(got.ids()) == 4
    assert got.ended()[0].reason == "eos"
    got, _ = scripted("a.b.c.")
    got.run(said(StopParams(min_tokens=3, stop=(".",))))
    assert got.text() == "a.b"


def test_characters_are_never_broken(scripted: Drive) -> None:
    got, _ = scripted("é€😀!")
    got.run(said(StopParams()))
    assert [piece.text for piece in got.select(TextEvent)] == ["é", "€", "😀", "!"]
    assert len(got.ids()) == 10


def test_half_a_character_at_the_end_is_left_out(scripted: Drive) -> None:
    got, _ = scripted("ab😀".encode()[:-1])
    got.run(said(StopParams()))
    assert got.text() == "ab"
    assert len(got.ids()) == 5


def test_bytes_that_are_no_character_do_not_hold_up_the_text(scripted: Drive) -> None:
    got, _ = scripted(b"a\xff\xffb")
    got.run(said(StopParams()))
    assert got.text() == "a\ufffd\ufffdb"


# --- prompts ------------------------------------------------------------------------------------


def test_a_conversation_goes_through_the_template(driven: Drive) -> None:
    turns = (ChatTurn("user", "hi"),)
    got = driven().run(msgspec.structs.replace(asked(), input=PromptInput(turns=turns)))
    assert got.ids() == driven().run(asked("<user>hi<assistant>")).ids()
    wrapped = driven().run(
        msgspec.structs.replace(asked(), input=PromptInput(prompts=("hi",), as_user_message=True))
    )
    assert wrapped.ids() == got.ids()


def test_a_template_of_the_request(driven: Drive) -> None:
    own = PromptInput(
        turns=(ChatTurn("user", "hi"),),
        template="{{ before }}{{ messages[0].content }}",
        template_arguments=b'{"before": "so: "}',
    )
    got = driven().run(msgspec.structs.replace(asked(), input=own))
    assert got.ids() == driven().run(asked("so: hi")).ids()


def test_continuing_the_last_turn(driven: Drive) -> None:
    own = PromptInput(
        turns=(ChatTurn("user", "hi"), ChatTurn("assistant", "well")), continue_final=True
    )
    got = driven().run(msgspec.structs.replace(asked(), input=own))
    assert got.ids() == driven().run(asked("<user>hi<assistant>well")).ids()


def test_a_prompt_too_long_fails_or_is_cut(driven: Drive) -> None:
    failed = driven().run(asked("x" * 200)).failed()
    assert (failed.kind, failed.tokens, failed.limit) == ("too_long", 200, 128)
    cut = msgspec.structs.replace(
        asked(), input=PromptInput(prompts=("y" * 150 + "Hello",), truncate_to=5)
    )
    assert driven().run(cut).ids() == driven().run(asked("Hello")).ids()
    fit = msgspec.structs.replace(asked(), input=PromptInput(prompts=("y" * 200,), truncate_to=-1))
    assert driven().run(fit).finished().prompt_tokens == 128 - 24


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (asked(""), "invalid"),
        (asked(picking=EngineSamplingParams(logit_bias={9999: 1.0})), "invalid"),
        (asked(picking=EngineSamplingParams(allowed_token_ids=())), "invalid"),
        (asked(picking=EngineSamplingParams(temperature=-1.0)), "invalid"),
        (asked(picking=EngineSamplingParams(temperature=float("nan"))), "invalid"),
        (asked(picking=EngineSamplingParams(presence_penalty=1e9)), "invalid"),
        (asked(picking=EngineSamplingParams(frequency_penalty=-1e9)), "invalid"),
        (asked(picking=EngineSamplingParams(logit_bias={65: 1e9})), "invalid"),
        (asked(picking=EngineSamplingParams(logit_bias={65: float("nan")})), "invalid"),
        (GenerateCommand(1, PromptInput(prompts=((1, 2, 999),))), "invalid"),
        (
            GenerateCommand(
                1, PromptInput(turns=(ChatTurn("user", "x"),), template="{{ nope() }}")
            ),
            "invalid",
        ),
        (
            GenerateCommand(
                1, PromptInput(turns=(ChatTurn("user", "x"),), template_arguments=b"[]")
            ),
            "invalid",
        ),
    ],
)
def test_what_is_wrong_is_told_and_takes_no_place(
    driven: Drive, spec: GenerateCommand, kind: str
) -> None:
    got = driven().run(spec)
    if spec.input.prompts == ("",):  # an empty prompt is the beginning of a text
        assert not got.select(RequestFailedEvent)
        return
    assert got.failed().kind == kind
    assert (got.engine.active_count, got.engine.waiting_count) == (0, 0)


# --- places, credit, cancellation ---------------------------------------------------------------


def test_cancelling_frees_the_row_before_the_next_step(scripted: Drive) -> None:
    got, forward = scripted("a" * 400)
    got.run(said(StopParams()), msgspec.structs.replace(said(StopParams()), request_id=2), steps=5)
    assert got.engine.active_count == 2
    told = len(got.select(TextEvent))
    got.engine.cancel(1)
    assert got.engine.active_count == 1
    got.engine.step()
    assert forward.batch_sizes[-1] == 1
    assert len(got.select(TextEvent)) == told
    got.engine.cancel(2)
    assert not got.engine.step()
    assert not got.select(RequestFinishedEvent) + got.select(RequestFinishedEvent, 2)


def test_cancelling_while_waiting_and_while_reading(driven: Drive) -> None:
    got = driven(SchedulerConfig(max_sequences=1, max_chunk_tokens=2))
    got.run(asked("a long prompt"), asked(job=2), asked(job=3), steps=2)
    assert got.engine.waiting_count == 2
    got.engine.cancel(2)
    got.engine.cancel(1)
    got.engine.cancel(99)
    got.run()
    assert got.finished(3).completion_tokens == 24
    assert not got.select(RequestFinishedEvent, 1) + got.select(RequestFinishedEvent, 2)


def test_without_credit_a_row_rests_and_others_go_on(scripted: Drive) -> None:
    got, _ = scripted("a" * 40)
    got.run(
        msgspec.structs.replace(said(StopParams()), initial_credit=10),
        msgspec.structs.replace(said(StopParams()), request_id=2),
    )
    assert len(got.ids(1)) == 10
    assert got.finished(2).completion_tokens == 41
    assert not got.engine.step()
    got.engine.credit(1, 500)
    got.run()
    assert got.text(1) == "a" * 40


def test_places_are_limited_and_priority_decides(scripted: Drive) -> None:
    got, forward = scripted("abc", SchedulerConfig(max_sequences=2))
    specs = [
        msgspec.structs.replace(said(StopParams()), request_id=i, priority=200 - i)
        for i in range(1, 6)
    ]
    got.run(*specs)
    assert max(forward.batch_sizes) == 2
    order = [one.request_id for one in got.events if isinstance(one, RequestFinishedEvent)]
    assert order == [5, 4, 3, 2, 1]


def test_the_queue_is_bounded(scripted: Drive) -> None:
    got, _ = scripted("abc", SchedulerConfig(max_sequences=1, max_waiting=2))
    got.run(*(msgspec.structs.replace(said(StopParams()), request_id=i) for i in range(1, 5)))
    assert [one.request_id for one in got.events if isinstance(one, RequestFailedEvent)] == [3, 4]
    assert got.failed(3).kind == "overloaded"
    assert got.finished(2).completion_tokens == 4


def test_a_deadline_ends_a_request(scripted: Drive) -> None:
    got, _ = scripted("a" * 100)
    got.run(msgspec.structs.replace(said(StopParams()), timeout=5.0), steps=3)
    got.now = 5.0
    got.run()
    assert got.failed().kind == "deadline"
    assert got.engine.active_count == 0


def test_a_failing_pass_fails_its_requests_and_no_more(scripted: Drive) -> None:
    got, forward = scripted("abc")
    got.run(said(StopParams()), steps=1)
    forward.max_tokens = 0
    got.run()
    assert got.failed().kind == "failed"
    forward.max_tokens = 100
    got.run(msgspec.structs.replace(said(StopParams()), request_id=2))
    assert got.text(2) == "abc"
