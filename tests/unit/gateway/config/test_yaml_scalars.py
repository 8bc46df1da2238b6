import pytest

from gateway.config import yaml_scalars


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("FALSE", False),
        ("017", 17),
        ("-5", -5),
        ("0o17", 15),
        ("0x1F", 31),
        ("1.5", 1.5),
        (".5e3", 500.0),
        ("-.inf", float("-inf")),
        ("no", "no"),
        ("on", "on"),
        ("12:30:45", "12:30:45"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("2026-11-21", "2026-11-21"),
    ],
)
def test_scalars_have_yaml_1_2_types(text: str, value: object) -> None:
    scalar = yaml_scalars.parse_scalar(text)
    assert scalar == value
    assert type(scalar) is type(value)


def test_number_of_more_than_18_digits_is_rejected() -> None:
    with pytest.raises(ValueError, match="at most 18 digits"):
        yaml_scalars.parse_scalar("9" * 5000)


ENV = {"NAME": "value", "EMPTY": "", "TRICK": "${NAME} $$ {a: b}"}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("plain", "plain"),
        ("${NAME}", "value"),
        ("a ${NAME} b ${NAME}", "a value b value"),
        ("${NAME:-other}", "value"),
        ("${GONE:-other}", "other"),
        ("${GONE:-}", ""),
        ("${EMPTY}", ""),
        ("${EMPTY:-other}", "other"),
        ("${NAME:?it has to be there}", "value"),
        ("$$", "$"),
        ("$${NAME}", "${NAME}"),
        ("$5 and $NAME", "$5 and $NAME"),
        ("${TRICK}", "${NAME} $$ {a: b}"),
    ],
)
def test_environment_variables_are_expanded_once(text: str, result: str) -> None:
    assert yaml_scalars.expand_env(text, ENV) == result


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("${GONE}", "GONE is not set in the environment; set it, or write ${GONE:-default}"),
        ("${GONE:?ask the team}", "GONE is not set in the environment: ask the team"),
        ("${EMPTY:?}", "EMPTY is not set in the environment: set it"),
        ("${}", "'${}' is not an environment variable"),
        ("${1A}", "'${1A}' is not an environment variable"),
        ("${A", "'${' is not an environment variable"),
        ("${A:-${B}}", "'${' is not an environment variable"),
        ("${A:+b}", "'${A:+b}' is not an environment variable"),
    ],
)
def test_missing_or_malformed_environment_variable_is_reported(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="environment") as excinfo:
        yaml_scalars.expand_env(text, ENV)
    assert str(excinfo.value).startswith(complaint)
