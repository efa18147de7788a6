"""Turn tokens into text as they come: whole characters only, and nothing of a text that ends it."""

from __future__ import annotations

from collections.abc import Sequence

from runner.api import Tokenizer

_UNFINISHED = "�"  # what decoding makes of a character whose last bytes are still to come
_MEMORY = 16  # tokens that are decoded again with each new one


class TextStream:
    """The text of one row of tokens; `done` once one of the `stop` texts has come."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(text for text in stop if text)
        self._tokens: list[int] = []
        self._settled = 0  # tokens whose characters are all in `_text`
        self._text = ""
        self._shown = 0
        self.done = False

    @property
    def text(self) -> str:
        """The whole text so far, up to the stop text."""
        return self._text

    def push(self, token: int) -> str:
        """Add a token; return the further text that is now certain, which may be none."""
        if self.done:
            return ""
        self._tokens.append(token)
        piece = self._tokenizer.decode(self._tokens[self._settled :])
        waiting = len(self._tokens) - self._settled
        if piece.endswith(_UNFINISHED) and waiting < _MEMORY:
            return ""
        self._settled = len(self._tokens)
        self._text += piece
        return self._show(self._end(len(piece)))

    def close(self) -> str:
        """Return the text that was held back in case it began a stop text, or a character never finished."""
        if not self.done:
            self._text += self._tokenizer.decode(self._tokens[self._settled :])
            self._settled = len(self._tokens)
            self._end(len(self._text))
        return self._show(len(self._text))

    def _end(self, new: int) -> int:
        """Cut at the first stop text; return how far the text is certain."""
        hold = max((len(text) for text in self._stop), default=1) - 1
        start = max(0, len(self._text) - new - hold)
        found = [at for text in self._stop if (at := self._text.find(text, start)) >= 0]
        if found:
            self._text, self.done = self._text[: min(found)], True
            return len(self._text)
        return len(self._text) - hold

    def _show(self, end: int) -> str:
        piece = self._text[self._shown : max(end, self._shown)]
        self._shown = max(end, self._shown)
        return piece
