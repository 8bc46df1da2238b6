"""No character that belongs to a stop string is ever sent, however the text is cut."""

from hypothesis import given
from hypothesis import strategies as st

from protocols.core.stop_strings import StopStringFilter

LETTERS = st.text("ab ", max_size=12)


def play(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """The text sent and the stop string met, for pieces fed one after the other."""
    stop_filter = StopStringFilter(stops, include=include)
    sent = ""
    for piece in pieces:
        text, matched = stop_filter.feed(piece)
        sent += text
        if matched is not None:
            return sent, matched
    return sent + stop_filter.flush(), None


def test_without_stops_text_passes_at_once() -> None:
    assert StopStringFilter([]).feed("hello") == ("hello", None)


def test_a_stop_over_two_pieces_is_never_sent_in_part() -> None:
    stop_filter = StopStringFilter(["lo wor"])

    assert stop_filter.feed("Hello") == ("Hel", None)
    assert stop_filter.feed(" world") == ("", "lo wor")


def test_what_only_looked_like_a_stop_is_sent_after_all() -> None:
    assert play(["lo wor"], ["Hello", " there"]) == ("Hello there", None)
    assert play(["lo wor"], ["Hello"]) == ("Hello", None)


def test_the_stop_stays_where_it_was_asked_for() -> None:
    assert play(["b"], ["abc"], include=True) == ("ab", "b")


def test_an_empty_stop_is_no_stop() -> None:
    assert play([""], ["abc"]) == ("abc", None)


@given(
    text=LETTERS,
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
    size=st.integers(1, 12),
)
def test_any_cut_of_the_text_gives_the_same(text: str, stops: list[str], size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}

    sent, matched = play(stops, pieces)

    assert (matched is None) == (not ends)
    if matched is None:
        assert sent == text
    else:  # it ends no later than the first stop that was complete, and holds none
        assert text.startswith(sent + matched)
        assert not any(stop in sent for stop in stops)
