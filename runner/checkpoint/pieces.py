"""Hand a checkpoint's bytes to its writer: from live memory, or from copies once training must go on."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Iterator, Sequence

from runner.checkpoint import disk
from runner.checkpoint.disk import Bytes, Chunk
from runner.checkpoint.spare import Spare


class Pieces:
    """The bytes of `chunks` in order, as they are now, whatever happens to them after `detach`.

    The writer's thread takes them from the front with `of`. `detach`, called by the thread that is about
    to change live memory, copies them from the back until the two meet: it waits no longer than the
    writer would take, and usually far less. Each rank of `ranks` on the machine may do so at once.
    """

    def __init__(self, chunks: Sequence[Chunk], *, spare: Spare, ranks: int) -> None:
        self._pieces = [piece for chunk in chunks for piece in disk.cut(chunk)]
        whole_pages = (len(piece) + -len(piece) % mmap.PAGESIZE for piece in self._pieces)
        self._starts = list(itertools.accumulate(whole_pages, initial=0))  # of the copies
        self._spare, self._ranks = spare, ranks
        self._next = 0  # what the writer takes next
        self._end = len(self._pieces)  # copies from here on
        self._copying: int | None = None
        self._reading_live = False
        self._changed = threading.Condition()

    def of(self, chunk: Chunk) -> Iterator[Bytes]:
        """Yield the pieces of `chunk`, the next in order; each may be read until the next is asked for."""
        for _ in disk.cut(chunk):
            try:
                yield self._take()
            finally:
                self._give_back()

    def close(self) -> None:
        """Need no more pieces, whether or not all were read; called by the writer."""
        with self._changed:
            self._next = len(self._pieces)
        self._give_back()

    def detach(self) -> None:
        """Return once live memory is no longer needed: what the writer has not read is copied.

        Without memory to spare, waits for the writer to read it.
        """
        with self._changed:
            if self._next >= self._end and not self._reading_live:
                return
        spare_from = self._spare.open(self._starts[-1], ranks=self._ranks)
        while (i := self._claim(spare_from)) is not None:
            self._pieces[i] = self._spare.copy(self._pieces[i], at=self._starts[i])
        with self._changed:
            self._changed.wait_for(lambda: self._next >= self._end and not self._reading_live)

    def _claim(self, spare_from: int) -> int | None:
        """Declare the last copy done; return which piece to copy now, None if there is none or no room."""
        with self._changed:
            last = self._end - 1
            go_on = self._next <= last and self._starts[last] >= spare_from
            self._copying = last if go_on else None
            self._end = last if go_on else self._end
            self._changed.notify_all()
            return self._copying

    def _take(self) -> Bytes:
        with self._changed:
            i, self._next = self._next, self._next + 1
            self._changed.wait_for(lambda: self._copying != i)
            self._reading_live = i < self._end
            return self._pieces[i]

    def _give_back(self) -> None:
        with self._changed:
            self._reading_live = False
            self._changed.notify_all()
