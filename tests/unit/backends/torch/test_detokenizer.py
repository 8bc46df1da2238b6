"""Detokenization does not depend on how a text is split into tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from backends.torch.detokenizer import Detokenizer, OutputText, OutputToken, TokenBytes


def decode_bytes(ids: Any) -> str:
    return bytes(ids).decode(errors="replace")


def run_output_text(
    data: bytes, stops: tuple[str, ...], *, include: bool = False
) -> tuple[str, int, Any]:
    """Return the output with each byte as a token, the token count, and the matched stop."""
    script = OutputText(Detokenizer(decode_bytes, []), stops, include=include)
    text, tokens = "", 0
    for byte in data:
        script.add_token(OutputToken(byte, None), scan=True)
        if script.stopped is not None:
            break
        if release := script.pop_ready():
            assert release.text
            text, tokens = text + release.text, tokens + len(release.tokens)
    if release := script.close():
        text, tokens = text + release.text, tokens + len(release.tokens)
    return text, tokens, script.stopped


def find_expected_output(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the text before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(filter(None, stops), key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


TEXTS = st.text("abcé€😀 ", max_size=30)
STOPS = st.lists(st.text("abcé€ ", min_size=1, max_size=4), max_size=4).map(tuple)


@given(TEXTS, STOPS)
def test_output_text_ends_before_the_first_stop_string(text: str, stops: tuple[str, ...]) -> None:
    output, tokens, stopped = run_output_text(text.encode(), stops)
    want, stop = find_expected_output(text, stops)

    assert (output, stopped) == (want, stop)
    assert tokens <= len(text.encode())
    if stop is None:
        assert tokens == len(text.encode())
    else:
        assert run_output_text(text.encode(), stops, include=True)[0] == want + stop


@given(st.binary(max_size=40))
def test_streamed_text_equals_the_decoded_bytes(data: bytes) -> None:
    text, tokens, _ = run_output_text(data, ())
    whole = decode_bytes(data)

    assert text.rstrip("\ufffd") == whole.rstrip("\ufffd")
    assert tokens == len(data)


@given(TEXTS)
def test_detokenizer_returns_complete_characters(text: str) -> None:
    detokenizer = Detokenizer(decode_bytes, [])
    pieces = [detokenizer.add(byte) for byte in text.encode()]
    assert [piece for piece in pieces if piece] == list(text)


def test_possible_stop_string_is_held_back() -> None:
    script = OutputText(Detokenizer(decode_bytes, []), ("STOP",), include=False)
    for byte in b"abST":
        script.add_token(OutputToken(byte, None), scan=True)
    release = script.pop_ready()

    assert release is not None
    assert (release.text, [t.id for t in release.tokens]) == ("ab", [97, 98])
    assert script.pop_ready() is None

    rest = script.close()
    assert rest is not None
    assert (rest.text, len(rest.tokens)) == ("ST", 2)
    assert script.close() is None


def test_detokenizer_does_not_return_the_prompt() -> None:
    detokenizer = Detokenizer(decode_bytes, list(b"prompt"))
    assert [detokenizer.add(byte) for byte in b"!?"] == ["!", "?"]


def test_token_bytes_of_a_byte_level_tokenizer(tokenizer: Any) -> None:
    token_bytes = TokenBytes(tokenizer)
    assert [token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert token_bytes(tokenizer.eos_token_id) == b"<eos>"
    assert token_bytes(100_000) == b""


@pytest.mark.parametrize(
    ("token", "data"), [("\u2581cat", b" cat"), ("<0x0A>", b"\n"), ("dog", b"dog")]
)
def test_token_bytes_of_a_sentencepiece_tokenizer(token: str, data: bytes) -> None:
    inner = Tokenizer(models.BPE({token: 0}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer: Any = PreTrainedTokenizerFast

    assert TokenBytes(tokenizer(tokenizer_object=inner))(0) == data
