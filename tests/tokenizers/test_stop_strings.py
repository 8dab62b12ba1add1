"""Stop strings in a text that arrives in pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import InvalidOption
from jaxinfer.tokenizers.stop_strings import StopStrings


def run(stop, pieces):
    """Feed the pieces; return the text let through and whether a stop string was completed."""
    stop_strings = StopStrings(stop)
    text = ""
    for piece in pieces:
        scan = stop_strings.feed(piece)
        text += scan.text
        if scan.overshoot is not None:
            return text, True
    return text + stop_strings.flush(), False


def cut(stop, text):
    """Cut a whole text, one character at a time, by the definition."""
    for end in range(len(text) + 1):
        starts = [end - len(one) for one in stop if text[:end].endswith(one)]
        if starts:
            return text[: min(starts)], True
    return text, False


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_cut_text_does_not_depend_on_the_pieces(stop, pieces):
    assert run(stop, pieces) == cut(stop, "".join(pieces))


def test_text_is_held_only_while_it_may_begin_a_stop_string():
    stop = StopStrings(["</s>", "\n\n"])
    assert stop.feed("a<").text == "a"
    assert stop.feed("/").text == ""
    assert stop.feed("x\n").text == "</x"
    assert stop.feed("\nrest").overshoot == len("rest")


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stop):
    with pytest.raises(InvalidOption, match="stop must be a list of non-empty strings"):
        StopStrings(stop)
