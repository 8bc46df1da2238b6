"""Vectors of a large response are found wherever they are, and nothing else is."""

import json

import pytest

from protocols.core.vectors import (
    LARGE_RESPONSE,
    MAX_ENCODED,
    MAX_VECTOR,
    decode_array,
    encode_array,
    find_vectors,
    remove_vectors,
)

LONG = "x" * LARGE_RESPONSE


def list_vectors(text: str) -> list[str]:
    data = text.encode()
    return [data[start:end].decode() for start, end in find_vectors(data)]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ('{"embedding":[1,2]', ["[1,2]"]),
        ('{"data":[{"embedding" :\n [ 1.5 ]},{"embedding":[]}]', ["[ 1.5 ]", "[]"]),
        ('{"embedding":[[1],[2]]', []),
        ('{"embedding":["a"]', []),
        ('{"embedding":[{"a":1}]', []),
        ('{"embedding":"AAAA"', []),
        ('{"embeddings":[1]', []),
        ('{"a":"\\"embedding\\":[1]"', []),
        ('{"a":["embedding",[1]]', []),
    ],
)
def test_arrays_of_plain_values_are_found(start: str, expected: list[str]) -> None:
    text = f'{start},"long":"{LONG}"}}'

    assert json.loads(text)
    assert list_vectors(text) == expected
    assert list_vectors(start) == [], "a small response is decoded at once"


def test_vector_that_is_too_long_is_a_part_of_the_rest() -> None:
    numbers = "1," * (MAX_VECTOR // 2)

    assert list_vectors(f'{{"embedding":[{numbers}1]}}') == []


def test_rest_of_a_response_has_an_empty_array_for_each_vector() -> None:
    text = f'{{"a":[{{"embedding":[1,2]}},{{"embedding":[3]}}],"b":"{LONG}"}}'.encode()

    rest = remove_vectors(text, find_vectors(text))

    assert json.loads(rest) == {"a": [{"embedding": []}, {"embedding": []}], "b": LONG}


@pytest.mark.parametrize("count", [0, 1, MAX_ENCODED, MAX_ENCODED + 1, 2 * MAX_ENCODED])
def test_numbers_encoded_in_steps_are_the_same_array(count: int) -> None:
    numbers = list(range(count))

    assert json.loads(bytes(encode_array(numbers))) == numbers


@pytest.mark.parametrize("size", [0, 1, 7, 1000])
def test_array_that_is_decoded_in_steps_is_the_same(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("protocols.core.vectors.MAX_DECODED", 16)
    values = [number / 8 for number in range(size)]
    text = b'{"data": %b}' % json.dumps(values).encode()

    assert decode_array(text, (9, len(text) - 1)) == values


def test_last_value_of_an_array_may_be_longer_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.core.vectors.MAX_DECODED", 2)

    assert decode_array(b"[1,123456]", (0, 10)) == [1, 123456]
