"""Text as it comes: the pieces are the text, whole characters, and nothing of a stop text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.tokenizer import tokenizer
from runner.text_stream import TextStream

BYTE = tokenizer("byte")


def streamed(tokens: list[int], *, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(BYTE, stop=stop)
    pieces = [stream.push(token) for token in tokens]
    return [*pieces, stream.close()], stream


@given(st.text(max_size=40))
def test_the_pieces_are_the_text(text: str) -> None:
    pieces, stream = streamed(BYTE.encode(text))
    assert "".join(pieces) == stream.text == text
    assert not any("�" in piece for piece in pieces if "�" not in text)


@given(
    st.text(alphabet="abé", max_size=30),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=300)
def test_a_text_ends_before_the_first_stop_text(text: str, stops: list[str]) -> None:
    pieces, stream = streamed(BYTE.encode(text), stop=tuple(stops))
    ends = [text.find(stop) for stop in stops if stop in text]
    assert stream.done == bool(ends)
    assert "".join(pieces) == stream.text
    if ends:
        # Which of two overlapping stop texts is met first depends on where it ends, not on where it begins.
        first = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        met = {text.find(stop) for stop in stops if stop in text and text.find(stop) + len(stop) == first}
        assert stream.text in {text[:at] for at in met}
    else:
        assert stream.text == text


@given(st.binary(max_size=30))
def test_bytes_that_are_no_text_come_through_in_the_end(raw: bytes) -> None:
    pieces, _ = streamed(list(raw))
    assert "".join(pieces).replace("�", "") == raw.decode("utf-8", "replace").replace("�", "")
