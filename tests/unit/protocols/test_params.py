"""Scalar parameters: what a row of the table accepts, rejects and encodes."""

from importlib import import_module
from typing import Any, get_args

import pytest
from msgspec import Raw, json

from protocols import PROTOCOLS
from protocols.core.errors import InvalidParameter
from protocols.core.request import (
    SECTIONS,
    AnyRequest,
    EmbeddingRequest,
    GenerationRequest,
    SamplingParams,
    StopConditions,
)
from protocols.openai.endpoints import OpenAI
from protocols.params import (
    Param,
    ParamTable,
    ParamTableProvider,
    ParamType,
    ParsedParams,
    build_limit_error,
    build_parameter_support,
    check_param,
    find_sent_param,
    map_field_names,
    read_param,
    read_params,
    write_params,
)

TAKEN: list[tuple[ParamType, Any, Any]] = [
    ("int", 5, 5),
    ("int", 5.0, 5),
    ("strict int", 5, 5),
    ("float", 5, 5.0),
    ("float", 0.5, 0.5),
    ("bool", True, True),
    ("str", "a", "a"),
    ("strings", "a", ("a",)),
    ("strings", ["a", "b"], ("a", "b")),
    ("string list", ["a"], ("a",)),
    ("ints", [1, 2], (1, 2)),
    ("ints", [1.0, 2], (1, 2)),
]
REFUSED: list[tuple[ParamType, Any, str]] = [
    ("int", 5.5, "'x' must be an integer, got 5.5"),
    ("int", True, "'x' must be an integer, got True"),
    ("int", "5", "'x' must be an integer, got a string"),
    ("strict int", 5.0, "'x' must be an integer, got 5.0"),
    ("float", "1", "'x' must be a number, got a string"),
    ("float", 10**400, "'x' must be a number, got 1"),
    ("bool", 1, "'x' must be true or false, got 1"),
    ("str", None, "'x' must be a string, got null"),
    ("strings", ["a", 1], "'x' must be a string or a list of strings, got a list"),
    ("string list", "a", "'x' must be a list of strings, got a string"),
    ("ints", [1, 1.5], "'x' must be a list of integers, got a list"),
    ("ints", [1, True], "'x' must be a list of integers, got a list"),
    ("ints", {}, "'x' must be a list of integers, got an object"),
]


@pytest.mark.parametrize(("kind", "received", "taken"), TAKEN)
def test_valid_value_of_each_type_is_accepted(kind: ParamType, received: Any, taken: Any) -> None:
    value = check_param(Param("x", "x", kind), received)

    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(("kind", "value", "message"), REFUSED)
def test_invalid_value_of_each_type_is_rejected(kind: ParamType, value: Any, message: str) -> None:
    row = Param("x", "x", kind)

    with pytest.raises(InvalidParameter) as excinfo:
        check_param(row, value)

    assert excinfo.value.message.startswith(message)
    assert (excinfo.value.problem, excinfo.value.expected) == ("type", row)


RANGES: list[tuple[dict[str, Any], Any, str, str]] = [
    ({"minimum": 1}, 0, "below", "'x' must be at least 1, got 0"),
    ({"minimum": 0, "exclusive_minimum": True}, 0, "below", "'x' must be greater than 0, got 0"),
    ({"maximum": 2}, 3, "above", "'x' must be at most 2, got 3"),
    ({"maximum": 2, "exclusive_maximum": True}, 2, "above", "'x' must be less than 2, got 2"),
    ({"type": "str", "choices": ("a", "b")}, "c", "value", "'x' must be one of 'a', 'b', got a st"),
    ({"type": "ints", "min_items": 1}, [], "empty", "'x' needs at least 1 items, got a list"),
    ({"type": "ints", "max_items": 1}, [1, 2], "too_long", "'x' takes at most 1 items, got a list"),
]


@pytest.mark.parametrize(("limits", "value", "problem", "message"), RANGES)
def test_value_out_of_range_is_rejected(
    limits: dict[str, Any], value: Any, problem: str, message: str
) -> None:
    row = Param(**{"wire": "x", "field": "x", "type": "int", **limits})

    with pytest.raises(InvalidParameter) as excinfo:
        check_param(row, value)

    assert excinfo.value.problem == problem
    assert excinfo.value.message.startswith(message)


TABLE = ParamTable(
    Param("top_k", "sampling.top_k", "int", minimum=1, maximum=50, disabled_values=(-1,)),
    Param("temp", "sampling.temperature", "float", minimum=0.1, maximum=2),
    Param("stop", "stopping.stop", "strings"),
    Param("n", "n", "int", nullable=False),
    Param("loud", "echo", "bool", disabled_values=(0,)),
)


def encode_fields(**fields: Any) -> dict[str, Raw]:
    return {name: Raw(json.encode(value)) for name, value in fields.items()}


def test_params_are_read_into_request_sections() -> None:
    values = read_params(TABLE, encode_fields(other=1, stop="a", top_k=5, temp=None, loud=False))

    assert values.provided_fields == {"stop", "top_k", "loud"}
    assert values.build_request_arguments() == {
        "sampling": SamplingParams(top_k=5),
        "stopping": StopConditions(stop=("a",)),
        "echo": False,
        "provided_fields": frozenset({"stop", "top_k", "loud"}),
    }


def test_first_invalid_param_in_table_order_is_reported() -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        read_params(TABLE, encode_fields(n="x", stop=1, temp="x"))

    assert excinfo.value.param == "temp"


@pytest.mark.parametrize("sent", [{"n": 1, "many": 2}, {"many": 2, "n": 1}])
def test_last_param_in_table_order_wins(sent: dict[str, int]) -> None:
    twice = ParamTable(TABLE[3], Param("many", "n", "int"))

    assert read_params(twice, encode_fields(**sent)) == {"n": 2}


def test_values_outside_the_request_fields_are_no_request_arguments() -> None:
    values = ParsedParams()
    values |= {"request.logprobs": True, "labels.user": "a", "labels.session": "b", "adapter": "c"}

    assert values.build_request_arguments() == {"adapter": "c", "provided_fields": frozenset()}
    assert values.get_section("labels") == {"user": "a", "session": "b"}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_param_maps_to_a_request_field(name: str) -> None:
    module, _, kind = PROTOCOLS[name].partition(":")
    adapter = getattr(import_module(module), kind)()
    tables = adapter.param_tables if isinstance(adapter, ParamTableProvider) else {}
    apart = ("request", "extra", "labels")
    own = {field for kind in get_args(AnyRequest) for field in kind.__struct_fields__}

    for row in (row for table in tables.values() for row in table):
        section, _, field = row.field.rpartition(".")
        struct_fields = SECTIONS[section].__struct_fields__ if section in SECTIONS else own
        assert section in apart or field in struct_fields, row


def test_disabling_value_is_provided_and_not_set() -> None:
    values = read_params(TABLE, encode_fields(top_k=-1))

    assert values.provided_fields == {"top_k"}
    assert values.get("sampling.top_k") is None
    assert values.get_section("sampling") == {}


def test_null_is_rejected_if_not_nullable() -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        read_params(TABLE, encode_fields(n=None), at="parameters.")

    assert excinfo.value.param == "parameters.n"
    assert excinfo.value.message == "'parameters.n' must be an integer, got null"


def test_read_param_adds_to_existing_params() -> None:
    into = ParsedParams()

    read_param(TABLE[0], Raw(b"5"), into)
    read_param(TABLE[3], Raw(b"2"), into)

    assert (into.get("sampling.top_k"), into.get("n"), into.get("echo", 7)) == (5, 2, 7)


def test_written_params_are_clamped_to_their_range() -> None:
    sampling = SamplingParams(top_k=99, temperature=0.0)
    request = GenerationRequest(
        model="m",
        kind="completion",
        sampling=sampling,
        stopping=StopConditions(stop=("a",)),
        echo=True,
    )

    written = write_params(TABLE, request.set_fields)

    assert written == {"top_k": 50, "temp": 0.1, "stop": ["a"], "loud": True}
    assert [*written] == ["top_k", "temp", "stop", "loud"]


def test_dropped_params_are_not_written() -> None:
    dropped = Param("n", "n", "int", loss_reason="dropped")

    assert (
        write_params(ParamTable(dropped), GenerationRequest(model="m", kind="chat", n=2).set_fields)
        == {}
    )
    assert build_parameter_support((dropped,))["n"].reason == "dropped"
    assert map_field_names(TABLE)["stopping.stop"] == "stop"


def test_all_params_of_one_field_are_written() -> None:
    twice = ParamTable(TABLE[3], Param("many", "n", "int"))

    request = EmbeddingRequest(model="m", inputs=("a",))

    assert write_params(twice, {"n": 2}) == {"n": 2, "many": 2}
    assert write_params(twice, request.set_fields) == {}


def test_the_row_of_the_field_that_the_client_sent_is_found() -> None:
    path = "stopping.max_tokens"
    param = find_sent_param(OpenAI(), "chat", path, {"max_tokens", "n"})
    assert param is not None
    assert param.wire == "max_tokens"

    both = find_sent_param(OpenAI(), "chat", path, {"max_tokens", "max_completion_tokens"})
    assert both is not None
    assert both.wire == "max_completion_tokens"
    assert find_sent_param(OpenAI(), "chat", path, {"n"}) is None
    assert find_sent_param(object(), "chat", path, {"max_tokens"}) is None


def test_an_error_above_a_limit_names_the_limit() -> None:
    error = build_limit_error(Param("x", "n", "int", 1, 9), 5, 7)
    assert (error.message, error.param, error.value) == ("'x' must be at most 5, got 7", "x", 7)
    assert error.problem == "above"
    assert error.expected == Param("x", "n", "int", 1, 5)
