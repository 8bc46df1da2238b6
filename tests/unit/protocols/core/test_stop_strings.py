"""No character of a stop string is sent, however the text is split."""

from hypothesis import given
from hypothesis import strategies as st

from protocols.core.stop_strings import StopStringFilter

LETTERS = st.text("ab ", max_size=12)


def filter_text(
    stops: list[str], pieces: list[str], *, include: bool = False
) -> tuple[str, str | None]:
    """Filter pieces of text; return the text sent and the stop string found."""
    stop_filter = StopStringFilter(stops, include=include)
    sent = ""
    for piece in pieces:
        text, matched = stop_filter.feed(piece)
        sent += text
        if matched is not None:
            return sent, matched
    return sent + stop_filter.flush(), None


def test_text_without_stop_strings_is_sent_at_once() -> None:
    assert StopStringFilter([]).feed("hello") == ("hello", None)


def test_stop_string_over_two_deltas_is_never_partly_sent() -> None:
    stop_filter = StopStringFilter(["lo wor"])

    assert stop_filter.feed("Hello") == ("Hel", None)
    assert stop_filter.feed(" world") == ("", "lo wor")


def test_partial_stop_string_match_is_sent_if_not_completed() -> None:
    assert filter_text(["lo wor"], ["Hello", " there"]) == ("Hello there", None)
    assert filter_text(["lo wor"], ["Hello"]) == ("Hello", None)


def test_include_option_keeps_the_stop_string() -> None:
    assert filter_text(["b"], ["abc"], include=True) == ("ab", "b")


def test_empty_stop_string_is_ignored() -> None:
    assert filter_text([""], ["abc"]) == ("abc", None)


@given(
    text=LETTERS,
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
    size=st.integers(1, 12),
)
def test_stop_string_is_matched_for_any_delta_boundaries(
    text: str, stops: list[str], size: int
) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}

    sent, matched = filter_text(stops, pieces)

    assert (matched is None) == (not ends)
    if matched is None:
        assert sent == text
    else:  # it ends before the first complete stop string and contains none
        assert text.startswith(sent + matched)
        assert not any(stop in sent for stop in stops)
