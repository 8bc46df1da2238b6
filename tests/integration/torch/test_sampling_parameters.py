"""Every sampling parameter of every endpoint affects the generated tokens.

Each row of each client adapter's parameter tables is tested here, or listed as irrelevant for
sampling. A test sends the parameter as a client would and checks the engine's output, so that it
fails if the parameter is ignored.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import pytest
import torch
from tokenizers import processors

from backends.torch import commands, ipc
from backends.torch.ipc import ChoiceEndEvent, PrefillDoneEvent, PromptEchoEvent, TextEvent
from backends.torch.loaded_model import LoadedModel
from backends.torch.tokenization import InputProcessor
from protocols.core.request import GenerationRequest, LogprobsOptions
from protocols.params import Param
from tests.integration.torch.endpoint_cases import EndpointCase, list_endpoint_cases
from tests.support.tiny_model import EngineDriver

Json = dict[str, Any]
Drive = Callable[..., Any]
GREEDY_TEMPERATURE: Final = 1e-6
"""A temperature so low that sampling is greedy; every protocol accepts it."""
HOT: Final = 1.5
MANY: Final = 8


def _add_seed(command: ipc.GenerateCommand) -> ipc.GenerateCommand:
    """Add a seed, with which the first token is not the end token."""
    if command.sampling.seed is not None:
        return command
    return msgspec.structs.replace(
        command, sampling=msgspec.structs.replace(command.sampling, seed=1)
    )


_finished_runs: Final[dict[bytes, EngineDriver]] = {}
"""Engines that have run a command with the tiny model, by the command: endpoints share commands."""


class OptionTestBench:
    """Sends requests to one endpoint and returns their results."""

    def __init__(
        self, case: EndpointCase, tiny: LoadedModel, scripted: Drive, reference: Any
    ) -> None:
        self.case = case
        self.reference = reference
        self.model = tiny
        self._tiny = tiny
        self._own_runs: set[bytes] = set()
        self._scripted = scripted
        self.losses: tuple[str, ...] = ()
        """The wire names that the last request's loss report lists."""

    def request(self, options: Json) -> GenerationRequest:
        """Decode a request with these options, by field."""
        tokens = {"stopping.max_tokens": MANY, **options}
        wires = {self.case.get_wire_name(f) or f: v for f, v in tokens.items() if v is not None}
        request, names = self.case.decode(wires)
        self.losses = tuple(
            one.field for one in commands.find_unsupported_params(request, names, templates=False)
        )
        return request

    def build_command(self, options: Json) -> ipc.GenerateCommand:
        """Return the command that the request sends to the engine process."""
        command = commands.build_generate_command(self.request(options), 1, 60.0, templates=False)
        (received,) = ipc.decode_commands(ipc.encode_frame([command])[4:])
        assert isinstance(received, ipc.GenerateCommand)
        return received

    def run(self, **options: Any) -> Any:
        """Run the request in an engine; ``__`` in an option stands for a dot.

        No option may be lost. A command that another endpoint's test has run is not run again, but
        a second time in one test it is: its output must be the same.
        """
        values = {name.replace("__", "."): value for name, value in options.items()}
        command = _add_seed(self.build_command(values))
        assert self.losses == ()
        command = msgspec.structs.replace(command, token_ids=True)
        key = ipc.encode_frame([command])
        if self.model is not self._tiny or key in self._own_runs:
            return EngineDriver(self.model).run(command)
        self._own_runs.add(key)
        if key not in _finished_runs:
            _finished_runs[key] = EngineDriver(self.model).run(command)
        return _finished_runs[key]

    def ids(self, **options: Any) -> list[int]:
        """Return the tokens of the only choice."""
        token_ids: list[int] = self.run(**options).ids()
        return token_ids

    def greedy_ids(self, **options: Any) -> list[int]:
        """Return the tokens of the only choice, sampled greedily."""
        return self.ids(sampling__temperature=GREEDY_TEMPERATURE, **options)

    def run_script(self, script: list[int], **options: Any) -> Any:
        """Like ``run``, with a model that generates this script."""
        values = {name.replace("__", "."): value for name, value in options.items()}
        command = self.build_command(values)
        assert self.losses == ()
        driven, forward = self._scripted(script)
        prompts = driven.engine._input_processor.tokenize_prompts(command.input, command.stopping)
        forward._prompt = len(prompts[0])
        return driven.run(msgspec.structs.replace(command, token_ids=True))


# --- sampling -------------------------------------------------------------------------------------


def check_temperature(bench: OptionTestBench) -> None:
    assert bench.greedy_ids(sampling__seed=1) == bench.greedy_ids(sampling__seed=2)
    hot = [bench.ids(sampling__temperature=HOT, sampling__seed=seed) for seed in (1, 2)]
    assert hot[0] != hot[1]


def _check_greedy(bench: OptionTestBench, **options: Any) -> None:
    """Assert that the likeliest tokens are sampled at any temperature."""
    hot = bench.ids(sampling__temperature=HOT, sampling__seed=1, **options)
    assert hot == bench.greedy_ids()


def check_top_p(bench: OptionTestBench) -> None:
    _check_greedy(bench, sampling__top_p=1e-3)


def check_top_k(bench: OptionTestBench) -> None:
    _check_greedy(bench, sampling__top_k=1)


def check_min_p(bench: OptionTestBench) -> None:
    _check_greedy(bench, sampling__min_p=0.999)


def check_do_sample(bench: OptionTestBench) -> None:
    _check_greedy(bench, sampling__do_sample=False)


def check_typical_p(bench: OptionTestBench) -> None:
    """Only the most typical token, which is not the likeliest, remains to be sampled."""
    ids = [
        bench.ids(sampling__temperature=HOT, sampling__seed=seed, sampling__typical_p=1e-3)
        for seed in (1, 2)
    ]
    assert ids[0] == ids[1] != bench.greedy_ids()


def check_seed(bench: OptionTestBench) -> None:
    ids = [bench.ids(sampling__temperature=HOT, sampling__seed=s) for s in (3, 3, 4)]
    assert ids[0] == ids[1] != ids[2]


def check_repetition_penalty(bench: OptionTestBench) -> None:
    """A penalty far below 1 is a reward: only earlier tokens are sampled again."""
    driver = bench.run(sampling__temperature=GREEDY_TEMPERATURE, sampling__repetition_penalty=1e-3)
    command = bench.build_command({})
    (prompt,) = driver.engine._input_processor.tokenize_prompts(command.input, command.stopping)
    assert set(driver.ids()) <= set(prompt)


def _check_repetition(bench: OptionTestBench, name: str) -> None:
    """A negative penalty is a reward, a positive one the opposite."""
    plain = bench.greedy_ids(stopping__max_tokens=40)
    many = bench.greedy_ids(stopping__max_tokens=40, **{name: -2.0})
    few = bench.greedy_ids(stopping__max_tokens=40, **{name: 2.0})
    assert len(set(many)) < len(set(plain)) < len(set(few))


def check_presence_penalty(bench: OptionTestBench) -> None:
    _check_repetition(bench, "sampling__presence_penalty")


def check_frequency_penalty(bench: OptionTestBench) -> None:
    _check_repetition(bench, "sampling__frequency_penalty")


def check_logit_bias(bench: OptionTestBench) -> None:
    assert set(bench.greedy_ids(logit_bias={"65": 100})) == {65}


def check_allowed_token_ids(bench: OptionTestBench) -> None:
    ids = bench.ids(sampling__allowed_token_ids=[65, 66], sampling__seed=1)
    assert set(ids) == {65, 66}


def check_bad_words(bench: OptionTestBench) -> None:
    letter = _pick_letter(bench)
    assert letter.encode()[0] not in bench.greedy_ids(sampling__bad_words=[letter])


def check_watermark(bench: OptionTestBench) -> None:
    """Nearly all tokens are green, as transformers' detector finds; a quarter would be chance."""
    from transformers import WatermarkLogitsProcessor  # noqa: PLC0415

    judge: Any = WatermarkLogitsProcessor(259, "cpu")

    def green(ids: list[int]) -> int:
        pairs = itertools.pairwise(ids)
        return sum(
            after in judge._get_greenlist_ids(torch.tensor([before])) for before, after in pairs
        )

    tokens = {"sampling__temperature": HOT, "sampling__seed": 1, "stopping__max_tokens": 60}
    marked = bench.ids(sampling__watermark=True, **tokens)
    assert green(marked) > 2 * green(bench.ids(**tokens))


# --- number and selection of choices --------------------------------------------------------------


def check_n(bench: OptionTestBench) -> None:
    """OVMS returns several choices only for a beam search."""
    searched = bench.case.name.startswith("ovms")
    drawn: Json = {"sampling__temperature": HOT, "sampling__seed": 1}
    driver = bench.run(n=3, **(_beam_options(bench, 3) if searched else drawn))
    assert set(driver.ended()) == {0, 1, 2}
    assert len({tuple(driver.ids(choice=i)) for i in range(3)}) == 3


def check_best_of(bench: OptionTestBench) -> None:
    """The likeliest of four is returned; MindIE returns all four."""
    values = {"best_of": 4, "sampling.temperature": HOT, "sampling.seed": 1}
    request = bench.request(values)
    every = msgspec.structs.replace(request, n=4, best_of=None, logprobs=LogprobsOptions(0))
    command = commands.build_generate_command(every, 1, 60.0, templates=False)
    all_four = EngineDriver(bench.model).run(msgspec.structs.replace(command, token_ids=True))
    ids = {
        sum(
            t.logprob or 0.0 for p in all_four.select(TextEvent) if p.choice == i for t in p.tokens
        ): i
        for i in range(4)
    }
    driver = bench.run(**{name.replace(".", "__"): value for name, value in values.items()})
    wanted = range(4) if bench.case.name.startswith("mindie") else [ids[max(ids)]]
    assert [driver.ids(choice=i) for i in driver.ended()] == [
        all_four.ids(choice=i) for i in wanted
    ]


def _beam_options(bench: OptionTestBench, width: int) -> Json:
    """Return the options that request this many beams."""
    if bench.case.supports("sampling.beam_width"):
        return {"sampling__beam_width": width}
    if bench.case.supports("request.beam_search"):
        return {"request__beam_search": True, "n": width}
    return {"request__beams": True, "n": width}


def check_beam_search(bench: OptionTestBench) -> None:
    """The text is likelier than the greedy one and equals transformers' result."""
    driver = bench.run(**_beam_options(bench, 4))
    command = bench.build_command({})
    (prompt,) = driver.engine._input_processor.tokenize_prompts(command.input, command.stopping)
    with torch.inference_mode():
        whole = bench.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=MANY,
            num_beams=4,
            do_sample=False,
            eos_token_id=[256, 257],
            pad_token_id=258,
        )
    assert driver.ids() == whole[0, len(prompt) :].tolist()
    assert driver.ids() != bench.greedy_ids()


def check_length_penalty(bench: OptionTestBench) -> None:
    """The penalty ranks texts of several lengths: a short text wins or loses by it."""
    end = bench.run(**_beam_options(bench, 4)).ids()[2]
    bench.model = bench.model._replace(end_tokens=frozenset({end}))
    short, long = (
        bench.run(**_beam_options(bench, 4), sampling__length_penalty=penalty).ended()[0].reason
        for penalty in (-6.0, 6.0)
    )
    assert (short, long) == ("eos", "length")


def check_diversity_penalty(bench: OptionTestBench) -> None:
    outputs = [
        bench.run(**_beam_options(bench, 4), n=4, sampling__diversity_penalty=penalty)
        for penalty in (0.0, 50.0)
    ]
    close, far = ([one.ids(choice=i) for i in range(4)] for one in outputs)
    assert len({ids[0] for ids in close}) < 4
    assert all(len(set(column)) == 4 for column in zip(*far, strict=True))


# --- the end of a text ----------------------------------------------------------------------------


def _pick_letter(bench: OptionTestBench) -> str:
    """Return a letter of the greedy text that is not its first."""
    text: str = bench.run(sampling__temperature=GREEDY_TEMPERATURE).text()
    return next(one for at, one in enumerate(text) if at > 1 and " " < one < "\x7f")


def check_max_tokens(bench: OptionTestBench) -> None:
    for most in (3, 7):
        driver = bench.run(stopping__max_tokens=most, sampling__temperature=GREEDY_TEMPERATURE)
        assert (len(driver.ids()), driver.ended()[0].reason) == (most, "length")


def check_min_tokens(bench: OptionTestBench) -> None:
    driver = bench.run_script(list(b"abcdef"), stopping__stop="b", stopping__min_tokens=4)
    assert len(driver.ids()) > 4
    assert len(bench.run_script([], stopping__min_tokens=4, stopping__max_tokens=9).ids()) >= 4


def check_stop(bench: OptionTestBench) -> None:
    script, options = list(b"one END two"), {"sampling__temperature": GREEDY_TEMPERATURE}
    driver = bench.run_script(script, stopping__stop="END", **options)
    assert driver.ended()[0] == ChoiceEndEvent(1, 0, "stop", "END")
    assert driver.text() in ("one ", "one END")


def check_include_stop(bench: OptionTestBench) -> None:
    texts = [
        bench.run_script(
            list(b"one END"), stopping__stop="END", stopping__include_stop=included
        ).text()
        for included in (True, False)
    ]
    assert texts == ["one END", "one "]


def check_stop_token_ids(bench: OptionTestBench) -> None:
    driver = bench.run_script(list(b"abc"), stopping__stop_token_ids=[ord("c")])
    assert (driver.text(), driver.ended()[0]) == ("ab", ChoiceEndEvent(1, 0, "stop", ord("c")))


def check_ignore_eos(bench: OptionTestBench) -> None:
    for on, reason, tokens in ((True, "length", 9), (False, "eos", 3)):
        driver = bench.run_script(list(b"hi"), stopping__ignore_eos=on, stopping__max_tokens=9)
        assert (driver.ended()[0].reason, driver.finished().completion_tokens) == (reason, tokens)


def check_skip_special_tokens(bench: OptionTestBench) -> None:
    script = [ord("a"), 258, ord("b")]
    texts = [
        bench.run_script(script, stopping__skip_special_tokens=on).text() for on in (True, False)
    ]
    assert texts == ["ab", "a<pad>b"]


# --- the prompt, and details of the response ------------------------------------------------------


def check_truncate_prompt(bench: OptionTestBench) -> None:
    (started,) = bench.run(stopping__truncate_prompt=3).select(PrefillDoneEvent)
    assert started.prompt_tokens == 3


def check_add_special_tokens(bench: OptionTestBench) -> None:
    tokenizer = copy.deepcopy(bench.model.tokenizer)
    begin = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    tokenizer._tokenizer.post_processor = begin
    reader = InputProcessor(tokenizer, context=128, vocabulary=259, defaults={})
    bench.model = bench.model._replace(tokenizer=tokenizer, input_processor=reader)
    with_, without = (
        bench.run(templating__add_special_tokens=on).select(PrefillDoneEvent)[0].prompt_tokens
        for on in (True, False)
    )
    assert with_ == without + 1


def check_overflow(bench: OptionTestBench) -> None:
    long = {"prompt": "x" * 500}
    command = bench.build_command({**long, "stopping.overflow": "truncate"})
    assert EngineDriver(bench.model).run(command).finished().prompt_tokens == 128 - MANY
    command = bench.build_command({**long, "stopping.overflow": "error"})
    assert EngineDriver(bench.model).run(command).failed().kind == "too_long"


def check_echo(bench: OptionTestBench) -> None:
    assert bench.run(echo=True).echo().text == "Hello"


def check_logprobs(bench: OptionTestBench) -> None:
    """OVMS returns no alternatives."""
    row = next(row for row in bench.case.rows if row.field == "logprobs.top")
    wanted = 0 if row.type == "bool" or bench.case.name.startswith("ovms") else 3
    value = True if row.type == "bool" else min(3, int(row.maximum or 3))
    _check_top_logprobs(bench, wanted, logprobs__top=value)


def check_chat_logprobs(bench: OptionTestBench) -> None:
    alone = {} if not bench.case.supports("request.logprobs") else {"request__logprobs": True}
    if alone:
        _check_top_logprobs(bench, 0, **alone)
    if bench.case.supports("request.top_logprobs"):
        _check_top_logprobs(bench, 2, **alone, request__top_logprobs=2)


def _check_top_logprobs(bench: OptionTestBench, wanted: int, **options: Any) -> None:
    driver = bench.run(**options)
    tokens = [token for piece in driver.select(TextEvent) for token in piece.tokens]
    assert [token.id for token in tokens] == driver.ids() != []
    assert {len(token.top) for token in tokens} == {wanted}


def check_prompt_logprobs(bench: OptionTestBench) -> None:
    first, *others = bench.run(logprobs__prompt=2, logprobs__top=0).echo().tokens
    assert first.logprob is None
    assert {len(token.top) for token in others} == {2}


def check_token_ids(bench: OptionTestBench) -> None:
    for wanted in (True, False):
        driver = EngineDriver(bench.model).run(
            _add_seed(bench.build_command({"response_options.token_ids": wanted}))
        )
        assert bool(driver.ids()) == wanted


CASES: Final[Mapping[str, Callable[[OptionTestBench], None]]] = {
    "sampling.temperature": check_temperature,
    "sampling.top_p": check_top_p,
    "sampling.top_k": check_top_k,
    "sampling.min_p": check_min_p,
    "sampling.do_sample": check_do_sample,
    "sampling.typical_p": check_typical_p,
    "sampling.seed": check_seed,
    "sampling.repetition_penalty": check_repetition_penalty,
    "sampling.presence_penalty": check_presence_penalty,
    "sampling.frequency_penalty": check_frequency_penalty,
    "sampling.allowed_token_ids": check_allowed_token_ids,
    "sampling.bad_words": check_bad_words,
    "sampling.watermark": check_watermark,
    "sampling.beam_width": check_beam_search,
    "request.beam_search": check_beam_search,
    "request.beams": check_beam_search,
    "sampling.length_penalty": check_length_penalty,
    "sampling.diversity_penalty": check_diversity_penalty,
    "n": check_n,
    "best_of": check_best_of,
    "stopping.max_tokens": check_max_tokens,
    "stopping.min_tokens": check_min_tokens,
    "stopping.stop": check_stop,
    "stopping.stop_token_ids": check_stop_token_ids,
    "stopping.include_stop": check_include_stop,
    "stopping.ignore_eos": check_ignore_eos,
    "stopping.skip_special_tokens": check_skip_special_tokens,
    "stopping.truncate_prompt": check_truncate_prompt,
    "stopping.overflow": check_overflow,
    "echo": check_echo,
    "logprobs.top": check_logprobs,
    "logprobs.prompt": check_prompt_logprobs,
    "request.logprobs": check_chat_logprobs,
    "request.top_logprobs": check_chat_logprobs,
    "response_options.token_ids": check_token_ids,
    "templating.add_special_tokens": check_add_special_tokens,
}
UNSUPPORTED: Final[Mapping[str, tuple[Any, str]]] = {
    "adapter": ("x", "the engine has no adapters"),
    "insert_before": ("x", "the engine fills in nothing"),
    "reasoning.effort": ("low", "a model thinks as its template says"),
    "reasoning.budget": (5, "a model thinks as its template says"),
    "templating.template": ("x", "it is a program, and needs the trust of who runs the gateway"),
    "stopping.spaces_between_special_tokens": (True, "a tokenizer writes them or does not"),
}
"""Unsupported parameters and the reasons; the loss report lists each."""

ELSEWHERE: Final[Mapping[str, str]] = {
    "stream": "how an answer is framed: the tests of the protocols",
    "timeout": "when, not what: test_engine",
    "priority": "when, not what: test_scheduler",
    "client_id": "a name",
    "parallel_tools": "calls: test_calls",
    "reasoning.include": "which part is returned: test_earlier_reasoning",
    "suffix": "put behind the text by the gateway: test_emulation",
    "request.raw_prompt": "how the prompt is made: test_engine",
    "request.details": "how an answer is framed: the tests of the protocol",
    "request.prefill": "how an answer is framed: the tests of the protocol",
    "extra.batch_size": "MindIE reads it and makes nothing of it",
    "extra.return_full_text": "MindIE reads it and makes nothing of it",
    "templating.add_generation_prompt": "how the prompt is made: test_engine",
    "templating.continue_final": "how the prompt is made: test_engine",
    **dict.fromkeys(
        ("labels.user", "labels.session_id", "labels.safety_identifier", "labels.prompt_cache_key",
         "labels.prompt_cache_retention"),
        "a name",
    ),
}  # fmt: skip
"""Parameters that affect neither sampling nor the details of the response."""

SEARCHES: Final = ("sampling.beam_width", "request.beam_search", "request.beams")
ALL: Final = tuple(list_endpoint_cases())


def iterate_rows() -> Iterator[tuple[EndpointCase, Param]]:
    for case in ALL:
        yield from ((case, row) for row in case.rows)


def parametrize_rows(cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize with each parameter row of these fields, without equal rows of one protocol."""
    rows, names = [], []
    for case, row in iterate_rows():
        key = (case.name.split()[0], case.body, row)
        if row.field in cases and not _is_irrelevant(case, row) and key not in names:
            names.append(key)
            rows.append(pytest.param(case, row, id=f"{case.name}: {row.wire}"))
    return pytest.mark.parametrize(("case", "row"), rows)


def _is_irrelevant(case: EndpointCase, row: Param) -> bool:
    """Return whether this is a penalty at an endpoint without the search that it belongs to."""
    penalty = row.field in ("sampling.length_penalty", "sampling.diversity_penalty")
    return penalty and not any(case.supports(field) for field in SEARCHES)


def test_every_endpoint_parameter_has_a_test_case() -> None:
    tested = {*CASES, *UNSUPPORTED, *ELSEWHERE}
    assert {
        f"{case.name}: {row.wire}" for case, row in iterate_rows() if row.field not in tested
    } == set()
    assert tested == {row.field for _, row in iterate_rows()}


@parametrize_rows(CASES)
def test_parameter_affects_the_generated_tokens(
    case: EndpointCase, row: Param, tiny: LoadedModel, scripted: Drive, reference: Any
) -> None:
    alone = msgspec.structs.replace(
        case, rows=(row, *(other for other in case.rows if other.field != row.field))
    )
    CASES[row.field](OptionTestBench(alone, tiny, scripted, reference))


@parametrize_rows(UNSUPPORTED)
def test_unsupported_parameter_is_reported_as_loss(
    case: EndpointCase, row: Param, tiny: LoadedModel, scripted: Drive
) -> None:
    bench = OptionTestBench(case, tiny, scripted, None)
    bench.request({row.field: UNSUPPORTED[row.field][0]})
    assert bench.losses == (row.wire,)


def parametrize_endpoints(*begins: str) -> pytest.MarkDecorator:
    """Parametrize a test with each endpoint whose name has one of these prefixes."""
    params = [pytest.param(case, id=case.name) for case in ALL if case.name.startswith(begins)]
    return pytest.mark.parametrize("case", params)


@parametrize_endpoints("openai", "databricks 2026 chat", "databricks 2026 completion")
def test_logit_bias_affects_the_tokens_without_a_parameter_table_row(
    case: EndpointCase, tiny: LoadedModel, scripted: Drive
) -> None:
    """The parameter tables have only scalar parameters."""
    check_logit_bias(OptionTestBench(case, tiny, scripted, None))


@parametrize_endpoints("triton vllm", "triton trtllm", "triton llmapi")
def test_triton_flags_select_logprobs_and_prompt_echo(
    case: EndpointCase, tiny: LoadedModel, scripted: Drive
) -> None:
    """The flags are tensors of their own, beside the parameters."""
    inputs = case.adapter._profile.inputs
    body = msgspec.structs.replace(case, body=lambda options: {"text_input": "Hello", **options})
    bench = OptionTestBench(body, tiny, scripted, None)
    logs = {"return_logprobs", "return_log_probs", "return_cumulative_logprob"} & set(inputs)
    exclude = next(
        name for name in inputs if name.startswith(case.adapter._profile.exclude_prompt_flags)
    )

    assert logs

    for flag in logs:
        driver = bench.run(**{flag: True})
        assert all(token.logprob for piece in driver.select(TextEvent) for token in piece.tokens)
        assert sum(len(piece.tokens) for piece in driver.select(TextEvent)) == len(driver.ids()) > 0
    assert bench.run(**{exclude: False}).echo().text == "Hello"
    assert bench.run(**{exclude: True}).select(PromptEchoEvent) == []
