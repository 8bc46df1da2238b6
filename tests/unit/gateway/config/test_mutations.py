"""Any mutation of a valid file loads or gives errors with positions, never a traceback."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text
from gateway.config.schema import Config
from gateway.config.yaml_reader import decode_utf8

GOOD = sorted((Path(__file__).parents[3] / "golden" / "config" / "good").glob("*.yaml"))
ENV = {"PORT": "8000", "NUMBER": "4096", "WORD": "tea", "EMPTY": "", "SECRET": "s"}
PIECES = (
    *("&a ", "*a", "!x ", "? ", "- ", ": ", "<<: ", "${", "}", "[", "]", "{", "|\n", "---\n", "%"),
    *("'", '"', "\t", "~", "1e999", "\u2028", "\ud800", "\x00", "\ufeff", "٣", "#", "9" * 400),
)
Mutation = Callable[[random.Random, bytes], bytes]


def split_lines(text: bytes) -> list[bytes]:
    return text.splitlines(keepends=True)


def delete_line(draw: random.Random, text: bytes) -> bytes:
    rows = split_lines(text)
    del rows[draw.randrange(len(rows))]
    return b"".join(rows)


def duplicate_line(draw: random.Random, text: bytes) -> bytes:
    rows = split_lines(text)
    rows.insert(draw.randrange(len(rows)), draw.choice(rows))
    return b"".join(rows)


def change_indent(draw: random.Random, text: bytes) -> bytes:
    rows = split_lines(text)
    n = draw.randrange(len(rows))
    rows[n] = draw.choice([b"  " + rows[n], rows[n].lstrip(b" "), b"- " + rows[n]])
    return b"".join(rows)


def change_value(draw: random.Random, text: bytes) -> bytes:
    rows = split_lines(text)
    n = draw.randrange(len(rows))
    key, colon, _ = rows[n].partition(b":")
    value = draw.choice([b"5", b"[]", b"{}", b"", b"~", b"'x'", b"true", b"1.5", b"[[a], {b: c}]"])
    rows[n] = key + colon + b" " + value + b"\n"
    return b"".join(rows)


def swap_words(draw: random.Random, text: bytes) -> bytes:
    words = text.split(b" ")
    n, m = draw.randrange(len(words)), draw.randrange(len(words))
    words[n], words[m] = words[m], words[n]
    return b" ".join(words)


def replace_bytes(draw: random.Random, text: bytes) -> bytes:
    n = draw.randrange(len(text))
    return text[:n] + draw.randbytes(draw.randint(1, 3)) + text[n + draw.randint(0, 3) :]


def insert_fragment(draw: random.Random, text: bytes) -> bytes:
    n = draw.randrange(len(text))
    return text[:n] + draw.choice(PIECES).encode("utf-8", "surrogatepass") + text[n:]


def truncate(draw: random.Random, text: bytes) -> bytes:
    return text[: draw.randrange(len(text)) + 1]


MUTATIONS: tuple[Mutation, ...] = (
    delete_line,
    duplicate_line,
    change_indent,
    change_value,
    swap_words,
    replace_bytes,
    insert_fragment,
    truncate,
)


def load_or_get_error(data: bytes, name: str) -> ConfigError | None:
    """Return the errors of a file. Any other exception fails the test."""
    try:
        assert isinstance(load_text(decode_utf8(data, name), name, env=ENV), Config)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("seed", range(10))
def test_mutated_file_loads_or_raises_config_error(seed: int) -> None:
    draw = random.Random(seed)
    refused = 0

    for _ in range(200):
        path = draw.choice(GOOD)
        data = path.read_bytes()
        for mutate in draw.choices(MUTATIONS, k=draw.randint(1, 3)):
            data = mutate(draw, data) or b"\n"
        error = load_or_get_error(data, str(path))
        if error is not None:
            refused += 1
            rows = data.count(b"\n") + data.count(b"\r") + data.count(b"\xe2\x80\xa8") + 2
            assert error.issues
            assert all(1 <= one.line <= rows for one in error.issues)
            assert all(one.column >= 1 and one.message for one in error.issues)
            assert all(line.startswith(f"{path}:") for line in str(error).splitlines())

    assert 100 < refused < 200


@pytest.mark.parametrize("text", [*PIECES, "", "\n", "a", "5", "[]", "{}", '""', "null", "- - - a"])
def test_fragment_alone_raises_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^g:\d+:\d+: "):
        load_text(text, "g", env={})
