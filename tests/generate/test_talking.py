"""What a conversation needs: text that stops in time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drumline.data.tokenizer import Tokenizer
from drumline.generate.stops import StoppingText

BYTES = Tokenizer.train(["aab ab aab 鼓 " * 20], vocab_size=270)


@given(st.text("ab \n鼓", max_size=30), st.lists(st.text("ab \n", min_size=1, max_size=4), max_size=3))
def test_pieces_joined_are_the_text_before_the_stop_string_that_is_complete_first(text: str, stops: list[str]) -> None:
    writing, pieces = StoppingText(BYTES, stops), []
    for token in BYTES.encode(text):
        pieces.append(writing.push(token))
        assert text.startswith("".join(pieces))
        if writing.stopped:
            break
    pieces.append(writing.flush())
    ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    assert "".join(pieces) == (text[: min(ends)[1]] if ends else text)
    assert writing.stopped == bool(ends)
