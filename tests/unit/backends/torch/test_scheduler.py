"""Scheduling order, preemption, and failed forward passes."""

import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import pytest

from backends.torch.fair_queue import TURN_TOKENS, FairQueue
from backends.torch.ipc import (
    ChatTurn,
    EngineSamplingParams,
    GenerateCommand,
    PromptInput,
    RequestFailedEvent,
    RequestFinishedEvent,
    StopParams,
    TextEvent,
    TokenizeCommand,
)
from backends.torch.model_files import ModelError
from backends.torch.sampling import SamplingRules, sample_tokens
from backends.torch.scheduler import SchedulerConfig
from backends.torch.sequence import EngineRequest, SequenceGroup
from tests.support.tiny_model import EngineDriver, ScriptedRunner

Drive = Callable[..., Any]
RunScript = Callable[..., tuple[EngineDriver, ScriptedRunner]]


def make_command(job: int, prompt: str = "x", **fields: Any) -> GenerateCommand:
    ending = StopParams(max_tokens=fields.pop("max_tokens", 24), ignore_eos=True)
    greedy = EngineSamplingParams(temperature=0)
    return GenerateCommand(
        job, PromptInput(prompts=(prompt,)), greedy, ending, token_ids=True, **fields
    )


def add_request(line: FairQueue, job: int, tokens: int = 1, **fields: Any) -> EngineRequest:
    one = EngineRequest(make_command(job, **fields), SamplingRules(), 0, 0.0)
    line.add(SequenceGroup(one, 0, [0] * tokens, None))  # type: ignore[arg-type]
    return one


def pop_all(line: FairQueue, served: AbstractSet[str] = frozenset()) -> list[int]:
    jobs = []
    while (group := line.head(served)) is not None:
        line.remove_head(group)
        jobs.append(group.request.command.request_id)
    return jobs


def get_start_order(driven: EngineDriver) -> list[int]:
    """Return the jobs in the order of their first pieces."""
    pieces = (one for one in driven.events if isinstance(one, TextEvent))
    return list(dict.fromkeys(piece.request_id for piece in pieces))


# --- order ----------------------------------------------------------------------------------------


def test_queue_is_ordered_by_priority_then_arrival() -> None:
    line = FairQueue()
    for job, priority in ((1, 128), (2, 5), (3, 128), (4, 5)):
        add_request(line, job, priority=priority)

    assert pop_all(line) == [2, 4, 1, 3]
    assert line.head() is None


def test_tenants_share_the_queue_by_tokens() -> None:
    line = FairQueue()
    for job in range(1, 7):
        add_request(line, job, TURN_TOKENS, tenant="greedy")
    add_request(line, 11, TURN_TOKENS, tenant="modest")
    add_request(line, 12, TURN_TOKENS // 2, tenant="small")

    add_request(line, 13, TURN_TOKENS // 2, tenant="small")

    assert pop_all(line) == [1, 11, 12, 13, 2, 3, 4, 5, 6]


def test_long_prompt_waits_for_its_share_of_tokens() -> None:
    line = FairQueue()
    add_request(line, 1, 10 * TURN_TOKENS, tenant="long")

    for job in range(2, 22):
        add_request(line, job, TURN_TOKENS, tenant="short")

    assert pop_all(line).index(1) in range(8, 11)


def test_tenant_without_a_slot_comes_first_and_later_waits_for_its_turns() -> None:
    line = FairQueue()
    for job in range(1, 4):
        add_request(line, job, TURN_TOKENS, tenant="served")
    for job in range(11, 14):
        add_request(line, job, TURN_TOKENS, tenant="new")

    early = line.head({"served"})

    assert early is not None
    assert early.request.command.request_id == 11
    line.remove_head(early)
    assert pop_all(line) == [1, 2, 12, 3, 13]


def test_tenants_without_a_slot_take_turns() -> None:
    line = FairQueue()
    add_request(line, 1, tenant="served")
    for job in range(11, 15):
        add_request(line, job, tenant="many")
    add_request(line, 21, tenant="one")

    assert pop_all(line, served={"served"}) == [11, 21, 12, 13, 14, 1]


def test_many_early_turns_do_not_delay_a_tenant_by_as_many_turns_of_others() -> None:
    line = FairQueue()
    add_request(line, 1, tenant="served")
    for job in range(100, 202):
        add_request(line, job, TURN_TOKENS, tenant="early")
    for _ in range(100):
        early = line.head({"served"})
        assert early is not None
        line.remove_head(early)

    for job in range(300, 400):
        add_request(line, job, TURN_TOKENS, tenant=f"new {job}")
        add_request(line, job + 100, TURN_TOKENS, tenant=f"new {job}")

    assert pop_all(line).index(200) < 200


def test_cancelled_request_does_not_block_the_queue() -> None:
    line = FairQueue()
    jobs = [add_request(line, job, tenant=str(job % 2)) for job in range(1, 6)]
    line.remove(jobs[0])
    line.remove(jobs[1])

    line.remove(EngineRequest(make_command(9, priority=3), SamplingRules(), 0, 0.0))

    assert len(line) == 3
    assert sorted(pop_all(line)) == [3, 4, 5]


def test_busy_tenant_does_not_delay_another_tenant(scripted: RunScript) -> None:
    driver, _ = scripted("abc", SchedulerConfig(max_sequences=1))
    crowd = [make_command(job, "y" * 200, tenant="crowd", max_tokens=2) for job in range(1, 9)]

    driver.run(*crowd, make_command(20, tenant="other", max_tokens=2))

    assert get_start_order(driver).index(20) <= 2


# --- memory -------------------------------------------------------------------------------------


def test_preemption_on_full_memory_does_not_change_the_output(driven: Drive) -> None:
    specs = [make_command(job, chr(96 + job) * 30, max_tokens=90) for job in range(1, 5)]
    alone = [driven().run(spec).ids(spec.request_id) for spec in specs]

    driver = driven(SchedulerConfig(cache_bytes=0)).run(*specs)

    assert [driver.ids(spec.request_id) for spec in specs] == alone
    assert driver.engine.stats.preemptions > 0
    assert driver.engine.block_pool.used_blocks == 0
    # The last request is preempted: no request overtakes another.
    assert [one.request_id for one in driver.events if isinstance(one, RequestFinishedEvent)] == [
        1,
        2,
        3,
        4,
    ]


def test_lower_priority_sequence_is_preempted_first(driven: Drive) -> None:
    early = [make_command(job, chr(96 + job) * 30, max_tokens=90) for job in (1, 2)]
    driver = driven(SchedulerConfig(cache_bytes=0)).run(*early, steps=20)

    driver.run(make_command(3, "c" * 30, max_tokens=90, priority=1))

    assert (
        next(one.request_id for one in driver.events if isinstance(one, RequestFinishedEvent)) != 2
    )
    assert driver.engine.stats.preemptions > 0


def test_sequence_without_memory_preempts_itself(driven: Drive) -> None:
    specs = [make_command(1, "a" * 30, max_tokens=60), make_command(2, "b" * 60, max_tokens=60)]
    alone = [driven().run(spec).ids(spec.request_id) for spec in specs]

    driver = driven(SchedulerConfig(cache_bytes=0)).run(*specs)

    assert [driver.ids(spec.request_id) for spec in specs] == alone
    assert driver.engine.stats.preemptions == 1


def test_higher_priority_request_preempts_slots_and_memory(driven: Drive) -> None:
    low = make_command(1, "a" * 31, n=4, best_of=4, max_tokens=40)
    high = make_command(2, "c" * 120, priority=1, max_tokens=8)
    alone = driven().run(low), driven().run(high)
    for limits in (
        SchedulerConfig(cache_bytes=0),
        SchedulerConfig(cache_bytes=11 * 32 * 512, max_chunk_tokens=32),
        SchedulerConfig(max_sequences=4),
    ):
        driver = driven(limits).run(low, steps=1)
        driver.run(high)
        assert [driver.ids(1, choice) for choice in range(4)] == [
            alone[0].ids(1, choice) for choice in range(4)
        ]
        assert driver.ids(2) == alone[1].ids(2)
        assert [
            one.request_id for one in driver.events if isinstance(one, RequestFinishedEvent)
        ] == [
            2,
            1,
        ]
        assert driver.engine.stats.preemptions > 0


def test_request_in_prefill_is_preempted_by_earlier_requests(driven: Drive) -> None:
    specs = [
        make_command(1, "a" * 31, n=4, best_of=4, max_tokens=40),
        make_command(2, "c" * 120, max_tokens=8),
        make_command(3, "b" * 20, max_tokens=8),
    ]
    alone = [driven().run(spec).ids(spec.request_id) for spec in specs]
    driver = driven(SchedulerConfig(cache_bytes=10 * 32 * 512, max_chunk_tokens=32)).run(
        specs[0], steps=1
    )

    driver.run(*specs[1:])

    assert [driver.ids(spec.request_id) for spec in specs] == alone
    assert driver.engine.stats.preemptions > 0


def test_too_many_choices_are_rejected(driven: Drive) -> None:
    failed = (
        driven(SchedulerConfig(max_batch_tokens=4)).run(make_command(1, n=5, best_of=5)).failed(1)
    )
    assert (failed.kind, failed.param) == ("invalid", "n")


def test_choices_wait_for_credit(scripted: RunScript) -> None:
    driver, _ = scripted("a" * 20, SchedulerConfig(max_sequences=1))
    driver.run(make_command(1, n=2, best_of=2, initial_credit=8, max_tokens=8))
    assert (driver.text(1, 0), driver.text(1, 1)) == ("a" * 8, "")

    driver.run(make_command(2, max_tokens=3))
    assert driver.text(2) == "aaa"

    driver.engine.credit(1, 8)
    driver.run()
    assert driver.text(1, 1) == "a" * 8


def test_sequence_without_credit_is_preempted_by_waiting_requests(scripted: RunScript) -> None:
    driver, _ = scripted("a" * 100, SchedulerConfig(max_sequences=1))
    driver.run(make_command(1, initial_credit=10, max_tokens=60))
    assert len(driver.ids(1)) == 10

    driver.run(make_command(2))
    assert len(driver.ids(2)) == 24

    driver.engine.credit(1, 100)
    driver.run()
    assert driver.text(1) == "a" * 60


def test_choices_share_the_blocks_of_their_prompt(driven: Drive) -> None:
    spec = make_command(1, "p" * 70, n=8, best_of=8, max_tokens=10)
    driver = driven(SchedulerConfig(cache_bytes=14 * 32 * 512)).run(spec, steps=3)
    assert driver.engine.active_count == 8
    # They share two full blocks and have one each; no block is free.
    assert 2 + 8 <= driver.engine.block_pool.used_blocks <= 2 + 8 + 2

    driver.run()
    assert driver.engine.block_pool.used_blocks == 0

    wide = driven().run(spec)
    assert [wide.ids(1, choice) for choice in range(8)] == [
        driver.ids(1, choice) for choice in range(8)
    ]


def test_cached_prefix_is_not_recomputed(driven: Drive) -> None:
    driver = driven().run(make_command(1, "s" * 80 + "one"))
    assert driver.finished(1).cached_tokens == 0

    driver.run(make_command(2, "s" * 80 + "two"))
    assert driver.finished(2).cached_tokens == 64
    assert driver.ids(2) == driven().run(make_command(2, "s" * 80 + "two")).ids(2)

    figures = driver.engine.stats
    assert (figures.prompt_tokens, figures.cached_tokens, figures.completion_tokens) == (
        83 + 19,
        64,
        48,
    )

    scored = make_command(3, "s" * 80, logprobs=0, prompt_logprobs=0, echo=True)
    driver.run(scored)
    assert driver.finished(3).cached_tokens == 0
    assert len(driver.echo(3).tokens) == 80


def test_prefix_cache_is_separate_for_each_tenant(driven: Drive) -> None:
    prompt = "s" * 80
    driver = driven().run(make_command(1, prompt, tenant="a"))
    driver.run(make_command(2, prompt, tenant="b"), make_command(3, prompt))

    driver.run(make_command(4, prompt, tenant="a"))

    assert [driver.finished(job).cached_tokens for job in (1, 2, 3, 4)] == [0, 0, 0, 64]


def test_prefix_cache_can_be_shared_between_tenants(driven: Drive) -> None:
    driver = driven(SchedulerConfig(share_prefix_cache=True)).run(
        make_command(1, "s" * 80, tenant="a")
    )
    driver.run(make_command(2, "s" * 80, tenant="b"))
    assert driver.finished(2).cached_tokens == 64


# --- fairness between tenants -------------------------------------------------------------------


def test_many_choices_do_not_delay_another_tenant(driven: Drive) -> None:
    choices = {"n": 32, "best_of": 32, "initial_credit": 2000}
    many = make_command(1, "a" * 30, max_tokens=40, tenant="many", **choices)
    one = make_command(2, "b" * 30, max_tokens=1, tenant="one")
    alone = driven().run(many)
    driver = driven(SchedulerConfig(max_sequences=4)).run(many, steps=20)
    driver.run(one, steps=8)

    assert driver.finished(2).completion_tokens == 1

    driver.run()
    assert [driver.ids(1, choice) for choice in range(32)] == [
        alone.ids(1, choice) for choice in range(32)
    ]
    assert driver.engine.stats.preemptions == 1


def test_first_token_of_each_new_tenant_waits_for_no_other_request(driven: Drive) -> None:
    many = make_command(
        1, "a" * 30, max_tokens=100, tenant="many", n=32, best_of=32, initial_credit=4000
    )
    driver = driven(SchedulerConfig(max_sequences=8)).run(many, steps=20)

    for job in range(2, 6):
        driver.run(make_command(job, "b", max_tokens=1, tenant=f"tenant {job}"), steps=3)
        assert driver.finished(job).completion_tokens == 1


def test_first_token_waits_for_none_of_200_requests_that_another_tenant_has_queued(
    driven: Drive,
) -> None:
    """Of four choices each: the step that runs ends, and the prompt is processed."""
    queued = [
        make_command(job, "a" * 30, max_tokens=40, tenant="many", n=4, initial_credit=2000)
        for job in range(1, 201)
    ]
    driver = driven(SchedulerConfig(max_sequences=8)).run(*queued, steps=20)

    driver.run(make_command(1000, "b", max_tokens=1, tenant="one"), steps=3)

    assert driver.finished(1000).completion_tokens == 1


def test_short_prompt_waits_for_no_long_prompts_of_another_tenant(driven: Drive) -> None:
    """Whose prefill takes many steps. In turn, they go on beside many short ones."""
    long = [
        make_command(job, letter * 100, max_tokens=2, tenant="many")
        for job, letter in enumerate("cdefghij", 1)
    ]
    driver = driven(SchedulerConfig(max_sequences=10, max_chunk_tokens=32)).run(*long, steps=1)

    for job in range(100, 130):
        driver.run(make_command(job, "b", max_tokens=1, tenant="one"), steps=1)
        assert driver.finished(job).completion_tokens == 1

    assert driver.finished(1).completion_tokens == 2


def test_tenant_without_a_slot_waits_for_one_request_of_another_such_tenant(
    scripted: RunScript,
) -> None:
    """While others, which have requests in the queue too, have all the other slots."""
    driver, _ = scripted("abc", SchedulerConfig(max_sequences=3))
    long: dict[str, Any] = {"max_tokens": 400, "initial_credit": 5000}
    driver.run(*[make_command(job, tenant=str(job % 2), **long) for job in range(1, 5)], steps=4)

    many = [make_command(job, tenant="many", max_tokens=1) for job in range(100, 120)]
    driver.run(*many, make_command(1000, tenant="one", max_tokens=1), steps=60)

    order = [job for job in get_start_order(driver) if job >= 100]
    assert order.index(1000) == 1


def test_only_a_tenant_without_slots_preempts_another_tenant(driven: Drive) -> None:
    driver = driven(SchedulerConfig(max_sequences=2))
    driver.run(
        make_command(1, tenant="a", max_tokens=30),
        make_command(2, tenant="b", max_tokens=30),
        steps=3,
    )

    driver.run(
        make_command(3, tenant="a", max_tokens=30), make_command(4, tenant="c", max_tokens=30)
    )

    assert driver.engine.stats.preemptions == 0
    assert get_start_order(driver)[:2] == [1, 2]


def test_continuously_sending_tenant_does_not_starve_another(driven: Drive) -> None:
    driver = driven(SchedulerConfig(max_sequences=2))
    driver.run(make_command(1, "a" * 30, n=2, best_of=2, max_tokens=60, tenant="a"), steps=2)
    job = 2

    while not driver.select(RequestFinishedEvent, 1):
        driver.run(make_command(job, max_tokens=1, tenant="b"), steps=2)
        job += 1
        assert job < 500

    assert driver.finished(1).completion_tokens == 120


def test_requests_without_a_tenant_do_not_preempt_each_other(driven: Drive) -> None:
    driver = driven(SchedulerConfig(max_sequences=2))
    driver.run(make_command(1, n=4, best_of=4, max_tokens=20), steps=3)

    driver.run(make_command(2, max_tokens=1))

    assert driver.engine.stats.preemptions == 0


# --- long inputs --------------------------------------------------------------------------------


def test_long_input_is_tokenized_while_other_requests_run(
    driven: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driven().run(make_command(1, max_tokens=24), steps=2)
    may_tokenize = threading.Event()
    tokenize = driver.engine._input_processor.tokenize_prompts

    def wait_and_tokenize(*arguments: Any) -> Any:
        assert may_tokenize.wait(30)
        return tokenize(*arguments)

    monkeypatch.setattr(driver.engine._input_processor, "tokenize_prompts", wait_and_tokenize)
    long = make_command(2, max_tokens=2)
    cut = msgspec.structs.replace(long.input, prompts=("y" * 100_000,), truncate_to=8)
    driver.engine.submit(msgspec.structs.replace(long, input=cut))
    while not driver.select(RequestFinishedEvent, 1):
        driver.engine.step()

    assert (driver.engine.waiting_count, driver.select(RequestFinishedEvent, 2)) == (1, [])

    may_tokenize.set()
    driver.run()
    assert driver.finished(2).prompt_tokens == 8


def test_long_input_can_be_cancelled_during_tokenization(
    driven: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, tokenized = driven(), threading.Event()
    monkeypatch.setattr(
        driver.engine._input_processor,
        "tokenize_prompts",
        lambda *_: [[7]] if tokenized.wait(30) else [],
    )
    long = make_command(1)
    cut = msgspec.structs.replace(long.input, prompts=("y" * 100_000,), truncate_to=8)
    driver.engine.submit(msgspec.structs.replace(long, input=cut))
    driver.engine.cancel(1)
    tokenized.set()

    driver.run()

    assert driver.events == []
    assert driver.engine.waiting_count == 0


def test_oversized_input_is_rejected_without_tokenization(
    driven: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driven()
    monkeypatch.setattr(driver.engine._input_processor, "_tokenizer", None)
    driver.run(make_command(1, "y" * 4_000_000))
    failed = driver.failed(1)

    assert (failed.kind, failed.param, failed.limit) == ("too_long", "prompt", 128)

    turns = PromptInput(turns=(ChatTurn("user", "y" * 4_000_000),))
    driver.run(msgspec.structs.replace(make_command(2), input=turns))
    assert (driver.failed(2).kind, driver.failed(2).param) == ("too_long", "messages")

    ids = PromptInput(prompts=((7,) * 200,))
    driver.run(msgspec.structs.replace(make_command(3), input=ids))
    assert (driver.failed(3).kind, driver.failed(3).tokens) == ("too_long", 200)

    for number, prompt in ((4, PromptInput(prompts=("y" * 4_000_000,))), (5, turns)):
        driver.engine.tokenize(TokenizeCommand(number, prompt))
        assert (driver.failed(number).kind, driver.failed(number).limit) == ("too_long", 128)


@pytest.mark.parametrize(
    ("section", "field", "values"),
    [
        ("sampling", "bad_words", tuple(map(str, range(100_000)))),
        ("sampling", "bad_words", ("y" * 70_000,)),
        ("sampling", "allowed_token_ids", (1,) * 300),
        ("stopping", "stop", tuple(map(str, range(2_000)))),
        ("stopping", "stop_token_ids", (1,) * 300),
    ],
)
def test_oversized_parameter_list_is_rejected_without_tokenization(
    driven: Drive, monkeypatch: pytest.MonkeyPatch, section: str, field: str, values: Any
) -> None:
    driver = driven()
    monkeypatch.setattr(driver.engine._input_processor, "_tokenizer", None)
    spec = make_command(1)
    part = msgspec.structs.replace(getattr(spec, section), **{field: values})

    driver.run(msgspec.structs.replace(spec, **{section: part}))

    assert (driver.failed(1).kind, driver.failed(1).param) == ("invalid", field)


def test_cancelled_request_frees_its_blocks(driven: Drive) -> None:
    driver = driven(SchedulerConfig(max_sequences=2, max_chunk_tokens=32))
    driver.run(make_command(1, "p" * 100, n=4, best_of=4), make_command(2, "q" * 100), steps=2)
    assert driver.engine.block_pool.used_blocks > 0

    driver.engine.cancel(1)
    driver.engine.cancel(2)
    assert driver.engine.block_pool.used_blocks == 0
    assert (driver.engine.active_count, driver.engine.waiting_count) == (0, 0)


# --- failures -------------------------------------------------------------------------------------


def test_prompt_that_exceeds_memory_fails_alone(scripted: RunScript) -> None:
    driver, forward = scripted("abcdef")
    driver.run(make_command(1, max_tokens=6), steps=2)
    forward.max_tokens = 40

    driver.run(make_command(2, "y" * 100), make_command(3, max_tokens=6))

    assert driver.failed(2).kind == "failed"
    assert driver.text(1) == "abcdef"
    assert driver.finished(3).completion_tokens == 6
    assert driver.engine.block_pool.used_blocks == 0


def test_failed_batch_drops_the_newest_sequence(scripted: RunScript) -> None:
    driver, forward = scripted("abcdef")
    driver.run(*(make_command(job, max_tokens=6) for job in (1, 2, 3)), steps=2)
    forward.max_tokens = 2

    driver.run()

    assert [one.request_id for one in driver.events if isinstance(one, RequestFailedEvent)] == [3]
    assert (driver.text(1), driver.text(2)) == ("abcdef", "abcdef")


def test_sampling_error_fails_only_its_request(
    driven: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [make_command(job, "abc"[job - 1], max_tokens=8) for job in (1, 2, 3)]
    alone = [driven().run(spec).ids(spec.request_id) for spec in specs]

    def failing(logits: Any, rows: Any) -> list[int]:
        logits.zero_()  # fails halfway through the pass
        if any(
            drawn.history.prompt == [ord("b")] and len(drawn.history.output) == 4 for drawn in rows
        ):
            raise MemoryError
        return []

    def injected(logits: Any, rows: Any) -> list[int]:
        original = logits.clone()
        failing(logits, rows)
        return sample_tokens(original, rows)

    monkeypatch.setattr("backends.torch.token_selection.sample_tokens", injected)
    driver = driven().run(*specs)

    assert driver.failed(2).message == "the local model failed: MemoryError"
    assert (driver.ids(1), driver.ids(3)) == (alone[0], alone[2])
    assert driver.engine.block_pool.used_blocks == 0


def test_insufficient_kv_cache_memory_is_reported_at_start(scripted: RunScript) -> None:
    with pytest.raises(ModelError, match="KV cache"):
        scripted("abc", SchedulerConfig(), max_tokens=0)


def test_step_stats_are_counted(scripted: RunScript) -> None:
    driver, _ = scripted("abc")
    driver.run(make_command(1), msgspec.structs.replace(make_command(2), initial_credit=5), steps=3)
    figures = driver.engine.stats

    assert driver.engine.cache_bytes == 0
    assert (
        figures.steps,
        figures.batched_sequences,
        figures.prompt_tokens,
        figures.completion_tokens,
    ) == (3, 2, 2, 6)
    assert (figures.used_blocks, figures.blocks) == (2, 16 * 16)
