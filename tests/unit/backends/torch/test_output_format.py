"""Output formats are enforced, whatever the model prefers."""

import re
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from backends.torch.grammar_compiler import MAX_GRAMMAR_LENGTH
from backends.torch.ipc import (
    BeamSearchParams,
    ChoiceEndEvent,
    EngineSamplingParams,
    GenerateCommand,
    OutputRule,
    PromptInput,
    StopParams,
    TextEvent,
)
from backends.torch.scheduler import SchedulerConfig

Drive = Callable[..., Any]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "height": {"type": "number", "minimum": 0.5, "maximum": 2.5},
        "kind": {"enum": ["friend", "foe", None]},
        "at": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
        "contact": {
            "anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-z]{2,5}@x[.]org$"}]
        },
    },
    "required": ["name", "age", "height", "kind", "at", "tags", "contact"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}


def make_schema(what: Any, **fields: Any) -> OutputRule:
    return OutputRule("json", msgspec.json.encode(what).decode(), **fields)


def make_command(
    form: OutputRule, *, job: int = 1, seed: int = 1, **fields: Any
) -> GenerateCommand:
    picking = fields.pop("picking", None) or EngineSamplingParams(temperature=1, seed=seed)
    ending = fields.pop("ending", None) or StopParams(max_tokens=400)
    fields = {"token_ids": True, "output_format": form, **fields}
    return GenerateCommand(job, PromptInput(prompts=("x",)), picking, ending, **fields)


# --- results --------------------------------------------------------------------------------------


def test_structured_output_is_valid_for_any_model(noisy: Drive) -> None:
    seeds = range(50)
    form = make_schema(PERSON)
    driver = noisy().run(*(make_command(form, job=seed, seed=seed) for seed in seeds))
    for seed in seeds:
        assert driver.ended(seed) == {0: ChoiceEndEvent(seed, 0, "eos")}
        assert jsonschema_rs.is_valid(PERSON, msgspec.json.decode(driver.text(seed)))

    assert len({driver.text(seed) for seed in seeds}) == 50


@pytest.mark.parametrize(
    ("form", "right"),
    [
        (OutputRule("regex", "[a-c]{3,6}(x|y/z)?"), "[a-c]{3,6}(x|y/z)?"),
        (OutputRule("regex", "^ab+$"), "ab+"),
        (OutputRule("choice", '["yes","no","\u00e9\\n\\"/"]'), 'yes|no|\u00e9\n"/'),
        (OutputRule("grammar", 'root ::= "a"+ end\nend ::= "b" | "c"'), "a+[bc]"),
        (
            OutputRule("grammar", "start: word\nword: /[a-z]{2}/ | DIGIT\nDIGIT: /[0-9]/"),
            "[a-z]{2}|[0-9]",
        ),
        (make_schema({"type": "object"}), r"\{.*\}"),
    ],
)
def test_every_output_format_is_enforced(noisy: Drive, form: OutputRule, right: str) -> None:
    seeds = range(10)
    driver = noisy().run(*(make_command(form, job=seed, seed=seed) for seed in seeds))
    for seed in seeds:
        ended = driver.ended(seed)[0].reason
        assert ended == "eos" or (ended == "length" and right == r"\{.*\}")
        assert ended == "length" or re.fullmatch(right, driver.text(seed), re.DOTALL)


def test_json_output_has_one_whitespace_style(noisy: Drive) -> None:
    form = make_schema({"type": "array", "prefixItems": [{"const": 1}, {"const": {"a": 2}}],
                   "minItems": 2, "maxItems": 2})  # fmt: skip
    assert noisy().run(make_command(form)).text() == '[1, {"a": 2}]'


def test_structured_output_is_independent_of_the_batch(noisy: Drive) -> None:
    """Each row has its own grammar or none, and gives the same text alone."""
    forms = [make_schema(PERSON), OutputRule("regex", "[a-z]{20}"), None, make_schema(PERSON)]
    specs = [
        msgspec.structs.replace(make_command(make_schema({}), job=i, seed=i), output_format=form)
        for i, form in enumerate(forms, 1)
    ]
    together = noisy(SchedulerConfig(max_chunk_tokens=32))
    for spec in specs:
        together.engine.submit(spec)
    futures.wait(together.engine._grammar_manager._waiting.values(), timeout=30)

    together.run()

    for spec in specs:
        assert together.ids(spec.request_id) == noisy().run(spec).ids(spec.request_id)
    assert together.finished(1).max_batch == 4


def test_structured_output_with_greedy_decoding(driven: Drive) -> None:
    form = make_schema({"type": "object", "properties": {"a": {"type": "integer", "maximum": 999}},
                   "required": ["a"], "additionalProperties": False})  # fmt: skip
    driver = driven().run(make_command(form, picking=EngineSamplingParams(temperature=0)))
    assert re.fullmatch(r'\{"a": -?[0-9]+\}', driver.text())


def test_preempted_structured_output_resumes_unchanged(driven: Drive) -> None:
    form = OutputRule("regex", "([a-z]{10} ){9}")
    specs = [
        msgspec.structs.replace(
            make_command(form, job=i, seed=i), input=PromptInput(prompts=("x" * 20 * i,))
        )
        for i in (1, 2, 3)
    ]

    together = driven(SchedulerConfig(cache_bytes=1)).run(*specs)

    assert together.engine._scheduler.preemption_count > 0
    for spec in specs:
        assert together.ids(spec.request_id) == driven().run(spec).ids(spec.request_id)


# --- combinations ---------------------------------------------------------------------------------


def test_truncated_structured_output_ends_with_length(noisy: Drive) -> None:
    driver = noisy().run(make_command(make_schema(PERSON), ending=StopParams(max_tokens=9)))
    assert driver.ended() == {0: ChoiceEndEvent(1, 0, "length")}
    assert len(driver.ids()) == 9
    assert PERSON["type"] == "object"
    assert driver.text().startswith('{"name": ')


def test_stop_string_ends_structured_output(noisy: Drive) -> None:
    driver = noisy().run(
        make_command(make_schema(PERSON), ending=StopParams(max_tokens=400, stop=('"age"',)))
    )
    assert driver.ended() == {0: ChoiceEndEvent(1, 0, "stop", '"age"')}
    assert '"age"' not in driver.text()


def test_min_tokens_extends_structured_output(noisy: Drive) -> None:
    letters = OutputRule("regex", "a*")
    short = noisy().run(make_command(letters, seed=2))
    assert len(short.ids()) < 30

    long = noisy().run(
        make_command(letters, seed=2, ending=StopParams(max_tokens=90, min_tokens=30))
    )
    assert len(long.text()) >= 30
    assert long.ended()[0].reason == "eos"


def test_complete_structured_output_ends_despite_min_tokens_and_ignore_eos(noisy: Drive) -> None:
    for ending in (
        StopParams(max_tokens=90, min_tokens=30),
        StopParams(max_tokens=90, ignore_eos=True),
    ):
        driver = noisy().run(make_command(OutputRule("regex", "abc"), ending=ending))
        assert (driver.text(), driver.ended()[0].reason) == ("abc", "eos")


def test_ignore_eos_extends_structured_output_as_allowed(noisy: Drive) -> None:
    ending = StopParams(max_tokens=90, ignore_eos=True)
    assert noisy().run(make_command(OutputRule("regex", "a*"), ending=ending)).text() == "a" * 90

    late = noisy().run(make_command(OutputRule("regex", "a{5}|a{7}"), ending=ending))
    assert (late.text(), late.ended()[0].reason) == ("a" * 7, "eos")


def test_each_choice_has_its_own_grammar_state(noisy: Drive) -> None:
    form = OutputRule("regex", "[a-z]{3,9}")
    driver = noisy().run(make_command(form, n=4, best_of=4, seed=3))
    texts = [driver.text(choice=i) for i in range(4)]

    assert all(re.fullmatch("[a-z]{3,9}", text) for text in texts)
    assert len(set(texts)) == 4

    best = noisy().run(make_command(form, n=1, best_of=4, seed=3))
    assert best.text() in texts


def test_logprobs_ignore_the_grammar_mask(noisy: Drive) -> None:
    driver = noisy().run(make_command(OutputRule("choice", '["yes"]'), logprobs=2))
    tokens = [token for piece in driver.select(TextEvent) for token in piece.tokens]

    assert [token.data for token in tokens] == [b"y", b"e", b"s"]
    assert all(token.logprob < -1 and len(token.top) == 2 for token in tokens)
    assert all(token.top[0].logprob > token.logprob for token in tokens)


def test_each_beam_has_its_own_grammar_state(noisy: Drive) -> None:
    form = OutputRule("regex", "[a-c]{4}(x|yy)")
    driver = noisy().run(make_command(form, n=3, beams=BeamSearchParams(3)))

    texts = [driver.text(choice=i) for i in range(3)]

    assert all(re.fullmatch("[a-c]{4}(x|yy)", text) for text in texts)
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    "picking",
    [
        EngineSamplingParams(temperature=0),
        EngineSamplingParams(temperature=0, repetition_penalty=1.9, frequency_penalty=1.0),
        EngineSamplingParams(temperature=2, top_k=3, seed=1),
        EngineSamplingParams(temperature=1, top_p=0.1, seed=1),
        EngineSamplingParams(temperature=1, min_p=0.9, seed=1),
        EngineSamplingParams(temperature=1, typical_p=0.2, seed=1),
        EngineSamplingParams(temperature=1, seed=1, logit_bias={120: 100.0}),
        EngineSamplingParams(temperature=1, seed=1, bad_words=("a", "b", "0")),
    ],
)
def test_structured_output_is_enforced_with_all_sampling_parameters(
    noisy: Drive, picking: EngineSamplingParams
) -> None:
    driver = noisy().run(make_command(OutputRule("regex", "([a-c]|[0-2]){20}"), picking=picking))
    assert re.fullmatch("([a-c]|[0-2]){20}", driver.text())


def test_grammar_that_allows_no_token_fails_the_request(noisy: Drive) -> None:
    form = OutputRule("regex", "[a-c]{20}")
    picking = EngineSamplingParams(allowed_token_ids=(120, 121))
    driver = noisy().run(
        make_command(form, n=3, best_of=3, picking=picking), make_command(form, job=2)
    )

    failed = driver.failed()

    assert (failed.kind, failed.param) == ("invalid", "response_format")
    assert "no token is allowed" in failed.message
    assert driver.select(ChoiceEndEvent) == []
    assert driver.ended(2)[0].reason == "eos"
    assert driver.engine.active_count == 0


def test_beam_search_without_an_allowed_token_fails(noisy: Drive) -> None:
    picking = EngineSamplingParams(allowed_token_ids=(120, 121))
    driver = noisy().run(
        make_command(
            OutputRule("regex", "[a-c]{20}"), n=2, beams=BeamSearchParams(2), picking=picking
        )
    )

    assert (driver.failed().kind, driver.failed().param) == ("invalid", "response_format")
    assert "no token is allowed" in driver.failed().message


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "kind", "message"),
    [
        (make_schema({"not": {"type": "string"}}), "unsupported", "unsupported keys: not"),
        (
            make_schema({"type": "array", "uniqueItems": True}),
            "unsupported",
            "unsupported keys: uniqueItems",
        ),
        (make_schema({"if": {}, "then": {}}), "unsupported", "unsupported keys: if, then"),
        (make_schema({"oneOf": [{"type": "object"}, {"type": "object"}]}), "unsupported", "oneOf"),
        (
            make_schema({"type": "string", "format": "colour"}),
            "unsupported",
            "unsupported format: colour",
        ),
        (make_schema({"type": "integer", "multipleOf": 982451653}), "unsupported", "too complex"),
        (make_schema({"type": "colour"}), "invalid", "Invalid type: colour"),
        (make_schema({"$ref": "#/$defs/no"}), "invalid", "does not exist"),
        (make_schema({"$ref": "http://127.0.0.1/x"}), "invalid", "does not fetch"),
        (make_schema({"type": "integer", "minimum": 3, "maximum": 2}), "invalid", "Unsatisfiable"),
        (make_schema([1]), "invalid", "must be a JSON object"),
        (make_schema(False), "invalid", "must be a JSON object"),
        (OutputRule("json", '{"a":' * 2000 + "1" + "}" * 2000), "invalid", "recursion"),
        (OutputRule("regex", "a(?=b)"), "invalid", "look-around"),
        (OutputRule("regex", "("), "invalid", "unclosed group"),
        (OutputRule("grammar", "start: other"), "invalid", "other"),
        (OutputRule("grammar", "nonsense"), "invalid", "::="),
        (OutputRule("grammar", 'start: "a" start'), "invalid", "no token is allowed"),
        (OutputRule("grammar", 'start: start "a"'), "unsupported", "too complex"),
        (OutputRule("choice", "[]"), "invalid", "choices is empty"),
        (OutputRule("regex", "a" * (MAX_GRAMMAR_LENGTH + 1)), "invalid", "characters"),
    ],
)
def test_unsupported_output_format_is_rejected(
    noisy: Drive, form: OutputRule, kind: str, message: str
) -> None:
    driver = noisy().run(make_command(msgspec.structs.replace(form, param="guided_json")))
    failed = driver.failed()

    assert (failed.kind, failed.param) == (kind, "guided_json")
    assert message in failed.message
    assert len(failed.message) < 300
    assert driver.select(TextEvent) == []
    assert driver.engine.waiting_count == 0


def test_lenient_schema_ignores_unsupported_keywords(noisy: Drive) -> None:
    what = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 4}
    driver = noisy().run(make_command(make_schema(what, lenient=True)))
    assert set(msgspec.json.decode(driver.text())) <= {1, 2}
