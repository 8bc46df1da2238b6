"""The engine step by step: commands and events."""

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


def make_command(
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


def make_script_command(script_ending: StopParams, **fields: Any) -> GenerateCommand:
    return GenerateCommand(
        1, PromptInput(prompts=("x",)), GREEDY, script_ending, token_ids=True, **fields
    )


# --- the model ----------------------------------------------------------------------------------


def test_greedy_decoding_matches_transformers(
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
            driver = driven(SchedulerConfig(max_chunk_tokens=chunk)).run(make_command(prompt))
            assert driver.ids() == whole[0, len(ids) :].tolist()


def test_output_is_independent_of_the_batch(driven: Drive) -> None:
    prompts = [f"prompt {i} " * (i + 1) for i in range(6)]
    hot = EngineSamplingParams(temperature=0.9, top_p=0.9, seed=7)
    alone = [driven().run(make_command(p, picking=hot)).ids() for p in prompts]
    specs = [make_command(p, job=i + 1, picking=hot) for i, p in enumerate(prompts)]

    together = driven(SchedulerConfig(max_chunk_tokens=5)).run(*specs)

    assert [together.ids(i + 1) for i in range(6)] == alone
    assert together.finished(6).max_batch > 1


def test_logprobs_are_computed_before_sampling_changes(
    driven: Drive, reference: Any, tokenizer: Any
) -> None:
    hot = EngineSamplingParams(temperature=3.0, seed=1, top_k=5, repetition_penalty=1.5)
    driver = driven().run(
        make_command("Hello", picking=hot, logprobs=3, echo=True, prompt_logprobs=2)
    )
    prompt, output = tokenizer.encode("Hello"), driver.ids()
    with torch.inference_mode():
        truth = reference(torch.tensor([prompt + output])).logits[0].log_softmax(-1)
    tokens = [token for piece in driver.select(TextEvent) for token in piece.tokens]

    assert [t.id for t in tokens] == output

    for at, token in enumerate(tokens):
        line = truth[len(prompt) - 1 + at]
        assert token.logprob == pytest.approx(float(line[token.id]), abs=1e-3)
        assert [a.id for a in token.top] == line.topk(3).indices.tolist()
        assert token.data == bytes([token.id]) or token.id >= 256
    echo = driver.echo()
    assert echo.text == "Hello"
    assert [t.id for t in echo.tokens] == prompt
    assert echo.tokens[0].logprob is None
    for at, token in enumerate(echo.tokens[1:]):
        assert token.logprob == pytest.approx(float(truth[at][token.id]), abs=1e-3)
        assert len(token.top) == 2


# --- sampling -----------------------------------------------------------------------------------


def test_seed_makes_sampling_reproducible(driven: Drive) -> None:
    def ids(seed: int) -> list[int]:
        token_ids: list[int] = (
            driven().run(make_command(picking=EngineSamplingParams(temperature=1, seed=seed))).ids()
        )
        return token_ids

    assert ids(5) == ids(5) != ids(6)
    assert ids(2**64 - 1) != ids(0)


def test_seeded_output_is_independent_of_cancelled_requests(driven: Drive) -> None:
    """A seed gives the same text whatever other requests come, go, and in which order."""
    hot = EngineSamplingParams(
        temperature=1.2, seed=9, top_p=0.95, typical_p=0.9, repetition_penalty=1.1
    )
    alone = driven().run(make_command(picking=hot)).ids()

    for order in ((1, 2, 3), (3, 1, 2), (2, 3, 1)):
        driver = driven()
        for job in order:
            driver.engine.submit(make_command(f"Hello{job}"[: 4 + job], job=job, picking=hot))
        for at in range(12):
            driver.engine.step()
            if at in (3, 7):
                driver.engine.cancel(2 + at // 4)
        driver.run()

        assert driver.ids() == alone


def test_unseeded_outputs_differ(driven: Drive) -> None:
    hot = EngineSamplingParams(temperature=2)
    assert (
        driven().run(make_command(picking=hot)).ids()
        != driven().run(make_command(picking=hot)).ids()
    )


def test_choices_differ_and_the_first_equals_a_single_choice(driven: Drive) -> None:
    hot = EngineSamplingParams(temperature=1, seed=5)
    driver = driven().run(make_command(picking=hot, n=3, best_of=3))

    choices = [driver.ids(choice=i) for i in range(3)]

    assert len({tuple(ids) for ids in choices}) == 3
    assert choices[0] == driven().run(make_command(picking=hot)).ids()
    assert set(driver.ended()) == {0, 1, 2}
    assert driver.finished().prompt_tokens == 5
    assert driver.finished().completion_tokens == 72


def test_more_choices_than_sequences_give_the_same_output(driven: Drive) -> None:
    hot = EngineSamplingParams(temperature=1, seed=5)
    wide = driven().run(make_command(picking=hot, n=5, best_of=5))

    narrow = driven(SchedulerConfig(max_sequences=2)).run(make_command(picking=hot, n=5, best_of=5))

    assert [wide.ids(choice=i) for i in range(5)] == [narrow.ids(choice=i) for i in range(5)]
    assert narrow.engine.active_count == 0


def test_best_of_returns_the_most_likely_choices(driven: Drive) -> None:
    hot = EngineSamplingParams(temperature=1, seed=5)
    every = driven().run(make_command(picking=hot, n=4, best_of=4, logprobs=0))
    sums = {
        i: sum(t.logprob or 0 for p in every.select(TextEvent) if p.choice == i for t in p.tokens)
        for i in range(4)
    }
    best = sorted(sums, key=lambda i: -sums[i])[:2]

    driver = driven().run(make_command(picking=hot, n=2, best_of=4))

    assert [driver.ids(choice=i) for i in range(2)] == [every.ids(choice=i) for i in best]
    assert driver.finished().completion_tokens == 96


def test_several_prompts_have_their_own_choices(driven: Drive) -> None:
    spec = msgspec.structs.replace(
        make_command(n=2, best_of=2), input=PromptInput(prompts=("ab", (99, 100)))
    )
    driver = driven().run(spec)

    assert set(driver.ended()) == {0, 1, 2, 3}
    assert driver.ids(choice=0) == driven().run(make_command("ab")).ids()
    assert driver.ids(choice=2) == driven().run(make_command("cd")).ids()
    assert driver.finished().prompt_tokens == 4
    assert len(driver.select(PrefillDoneEvent)) == 1


def test_penalties_and_token_restrictions_are_applied(driven: Drive) -> None:
    plain = driven().run(make_command()).ids()
    once = (
        driven()
        .run(make_command(picking=EngineSamplingParams(temperature=0, presence_penalty=100.0)))
        .ids()
    )
    assert len(set(once)) == len(once)

    barred = plain[0]
    none = EngineSamplingParams(temperature=0, logit_bias={barred: -1000.0})
    assert barred not in driven().run(make_command(picking=none)).ids()

    few = EngineSamplingParams(temperature=1, allowed_token_ids=(65, 66))
    assert set(driven().run(make_command(picking=few)).ids()) <= {65, 66}

    words = EngineSamplingParams(
        temperature=1, allowed_token_ids=(65, 66), bad_words=("AB",), seed=1
    )
    assert "AB" not in driven().run(make_command(picking=words)).text()


# --- ends ---------------------------------------------------------------------------------------


def test_eos_ends_the_choice_and_is_not_returned_as_text(scripted: Drive) -> None:
    driver, _ = scripted("hi")
    driver.run(make_script_command(StopParams(max_tokens=9)))

    assert driver.text() == "hi"
    assert driver.ended() == {0: ChoiceEndEvent(1, 0, "eos")}
    assert driver.finished().completion_tokens == 3


def test_ignore_eos_continues_after_eos(scripted: Drive) -> None:
    driver, _ = scripted("hi")
    driver.run(make_script_command(StopParams(max_tokens=9, ignore_eos=True)))

    assert driver.ended()[0].reason == "length"
    assert len(driver.ids()) == 9
    assert driver.text() == "hi"


def test_max_tokens_ends_the_choice(scripted: Drive) -> None:
    driver, _ = scripted("hello")
    driver.run(make_script_command(StopParams(max_tokens=3)))
    assert (driver.text(), driver.ended()[0].reason) == ("hel", "length")


def test_max_tokens_zero_generates_nothing(scripted: Drive) -> None:
    driver, _ = scripted("hello")
    driver.run(make_script_command(StopParams(max_tokens=0), echo=True))

    assert (driver.text(), driver.ended()[0].reason, driver.echo().text) == ("", "length", "x")
    assert driver.finished().completion_tokens == 0


def test_choice_ends_at_the_context_length(driven: Drive) -> None:
    driver = driven().run(make_command("x" * 100, max_tokens=1000))
    assert len(driver.ids()) == 28
    assert driver.ended()[0].reason == "length"


def test_stop_string_across_tokens_is_not_returned(scripted: Drive) -> None:
    driver, _ = scripted("one, END and more")
    driver.run(make_script_command(StopParams(stop=("never", "END"))))

    assert driver.text() == "one, "
    assert driver.ended() == {0: ChoiceEndEvent(1, 0, "stop", "END")}
    assert "".join(map(chr, driver.ids())) == "one, "


def test_include_stop_keeps_the_stop_string(scripted: Drive) -> None:
    driver, _ = scripted("one, END and more")
    driver.run(make_script_command(StopParams(stop=("END",), include_stop=True)))
    assert driver.text() == "one, END"


def test_partial_stop_string_is_returned(scripted: Drive) -> None:
    driver, _ = scripted("an EN")
    driver.run(make_script_command(StopParams(stop=("END",))))

    assert (driver.text(), driver.ended()[0].reason) == ("an EN", "eos")
    assert len(driver.ids()) == 5


def test_stop_token_id_ends_the_choice(scripted: Drive) -> None:
    driver, _ = scripted("abc")
    driver.run(make_script_command(StopParams(stop_token_ids=(98,))))
    assert (driver.text(), driver.ended()[0].stop) == ("a", 98)

    driver, _ = scripted("abc")
    driver.run(make_script_command(StopParams(stop_token_ids=(98,), include_stop=True)))
    assert driver.text() == "ab"


def test_min_tokens_delays_eos_and_stop_strings(scripted: Drive) -> None:
    driver, _ = scripted("a")
    driver.run(make_script_command(StopParams(min_tokens=4, max_tokens=10)))
    assert len(driver.ids()) == 4
    assert driver.ended()[0].reason == "eos"

    driver, _ = scripted("a.b.c.")
    driver.run(make_script_command(StopParams(min_tokens=3, stop=(".",))))
    assert driver.text() == "a.b"


def test_multibyte_characters_are_not_split(scripted: Drive) -> None:
    driver, _ = scripted("é€😀!")
    driver.run(make_script_command(StopParams()))

    assert [piece.text for piece in driver.select(TextEvent)] == ["é", "€", "😀", "!"]
    assert len(driver.ids()) == 10


def test_incomplete_character_at_the_end_is_omitted(scripted: Drive) -> None:
    driver, _ = scripted("ab😀".encode()[:-1])
    driver.run(make_script_command(StopParams()))

    assert driver.text() == "ab"
    assert len(driver.ids()) == 5


def test_invalid_bytes_are_returned_as_replacement_characters(scripted: Drive) -> None:
    driver, _ = scripted(b"a\xff\xffb")
    driver.run(make_script_command(StopParams()))
    assert driver.text() == "a\ufffd\ufffdb"


# --- prompts ------------------------------------------------------------------------------------


def test_chat_is_rendered_with_the_template(driven: Drive) -> None:
    turns = (ChatTurn("user", "hi"),)
    driver = driven().run(msgspec.structs.replace(make_command(), input=PromptInput(turns=turns)))
    assert driver.ids() == driven().run(make_command("<user>hi<assistant>")).ids()

    wrapped = driven().run(
        msgspec.structs.replace(
            make_command(), input=PromptInput(prompts=("hi",), as_user_message=True)
        )
    )
    assert wrapped.ids() == driver.ids()


def test_template_of_the_request_is_used(driven: Drive) -> None:
    own = PromptInput(
        turns=(ChatTurn("user", "hi"),),
        template="{{ before }}{{ messages[0].content }}",
        template_arguments=b'{"before": "so: "}',
    )
    driver = driven().run(msgspec.structs.replace(make_command(), input=own))

    assert driver.ids() == driven().run(make_command("so: hi")).ids()


def test_continue_final_continues_the_last_message(driven: Drive) -> None:
    own = PromptInput(
        turns=(ChatTurn("user", "hi"), ChatTurn("assistant", "well")), continue_final=True
    )
    driver = driven().run(msgspec.structs.replace(make_command(), input=own))
    assert driver.ids() == driven().run(make_command("<user>hi<assistant>well")).ids()


def test_prompt_over_the_context_is_rejected_or_truncated(driven: Drive) -> None:
    failed = driven().run(make_command("x" * 200)).failed()
    assert (failed.kind, failed.tokens, failed.limit) == ("too_long", 200, 128)

    cut = msgspec.structs.replace(
        make_command(), input=PromptInput(prompts=("y" * 150 + "Hello",), truncate_to=5)
    )
    assert driven().run(cut).ids() == driven().run(make_command("Hello")).ids()

    fit = msgspec.structs.replace(
        make_command(), input=PromptInput(prompts=("y" * 200,), truncate_to=-1)
    )
    assert driven().run(fit).finished().prompt_tokens == 128 - 24


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (make_command(""), "invalid"),
        (make_command(picking=EngineSamplingParams(logit_bias={9999: 1.0})), "invalid"),
        (make_command(picking=EngineSamplingParams(allowed_token_ids=())), "invalid"),
        (make_command(picking=EngineSamplingParams(temperature=-1.0)), "invalid"),
        (make_command(picking=EngineSamplingParams(temperature=float("nan"))), "invalid"),
        (make_command(picking=EngineSamplingParams(presence_penalty=1e9)), "invalid"),
        (make_command(picking=EngineSamplingParams(frequency_penalty=-1e9)), "invalid"),
        (make_command(picking=EngineSamplingParams(logit_bias={65: 1e9})), "invalid"),
        (make_command(picking=EngineSamplingParams(logit_bias={65: float("nan")})), "invalid"),
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
def test_invalid_request_is_rejected_and_not_queued(
    driven: Drive, spec: GenerateCommand, kind: str
) -> None:
    driver = driven().run(spec)
    if spec.input.prompts == ("",):  # an empty prompt is the start of a text
        assert not driver.select(RequestFailedEvent)
        return

    assert driver.failed().kind == kind
    assert (driver.engine.active_count, driver.engine.waiting_count) == (0, 0)


# --- slots, credit, cancellation ------------------------------------------------------------------


def test_cancellation_frees_the_sequence_before_the_next_step(scripted: Drive) -> None:
    driver, forward = scripted("a" * 400)
    driver.run(
        make_script_command(StopParams()),
        msgspec.structs.replace(make_script_command(StopParams()), request_id=2),
        steps=5,
    )
    assert driver.engine.active_count == 2

    event_count = len(driver.select(TextEvent))
    driver.engine.cancel(1)
    assert driver.engine.active_count == 1

    driver.engine.step()
    assert forward.batch_sizes[-1] == 1
    assert len(driver.select(TextEvent)) == event_count

    driver.engine.cancel(2)
    assert not driver.engine.step()
    assert not driver.select(RequestFinishedEvent) + driver.select(RequestFinishedEvent, 2)


def test_requests_can_be_cancelled_while_queued_and_during_prefill(driven: Drive) -> None:
    driver = driven(SchedulerConfig(max_sequences=1, max_chunk_tokens=2))
    driver.run(make_command("a long prompt"), make_command(job=2), make_command(job=3), steps=2)
    assert driver.engine.waiting_count == 2

    driver.engine.cancel(2)
    driver.engine.cancel(1)
    driver.engine.cancel(99)
    driver.run()

    assert driver.finished(3).completion_tokens == 24
    assert not driver.select(RequestFinishedEvent, 1) + driver.select(RequestFinishedEvent, 2)


def test_sequence_without_credit_pauses_while_others_continue(scripted: Drive) -> None:
    driver, _ = scripted("a" * 40)
    driver.run(
        msgspec.structs.replace(make_script_command(StopParams()), initial_credit=10),
        msgspec.structs.replace(make_script_command(StopParams()), request_id=2),
    )
    assert len(driver.ids(1)) == 10
    assert driver.finished(2).completion_tokens == 41
    assert not driver.engine.step()

    driver.engine.credit(1, 500)
    driver.run()
    assert driver.text(1) == "a" * 40


def test_sequences_are_limited_and_scheduled_by_priority(scripted: Drive) -> None:
    driver, forward = scripted("abc", SchedulerConfig(max_sequences=2))
    specs = [
        msgspec.structs.replace(make_script_command(StopParams()), request_id=i, priority=200 - i)
        for i in range(1, 6)
    ]
    driver.run(*specs)

    assert max(forward.batch_sizes) == 2

    order = [one.request_id for one in driver.events if isinstance(one, RequestFinishedEvent)]
    assert order == [5, 4, 3, 2, 1]


def test_full_queue_rejects_requests_as_overloaded(scripted: Drive) -> None:
    driver, _ = scripted("abc", SchedulerConfig(max_sequences=1, max_waiting=2))
    driver.run(
        *(
            msgspec.structs.replace(make_script_command(StopParams()), request_id=i)
            for i in range(1, 5)
        )
    )

    assert [one.request_id for one in driver.events if isinstance(one, RequestFailedEvent)] == [
        3,
        4,
    ]
    assert driver.failed(3).kind == "overloaded"
    assert driver.finished(2).completion_tokens == 4


def test_deadline_ends_the_request(scripted: Drive) -> None:
    driver, _ = scripted("a" * 100)
    driver.run(msgspec.structs.replace(make_script_command(StopParams()), timeout=5.0), steps=3)
    driver.now = 5.0

    driver.run()

    assert driver.failed().kind == "deadline"
    assert driver.engine.active_count == 0


def test_failed_forward_pass_fails_only_its_requests(scripted: Drive) -> None:
    driver, forward = scripted("abc")
    driver.run(make_script_command(StopParams()), steps=1)
    forward.max_tokens = 0
    driver.run()

    assert driver.failed().kind == "failed"

    forward.max_tokens = 100
    driver.run(msgspec.structs.replace(make_script_command(StopParams()), request_id=2))
    assert driver.text(2) == "abc"
