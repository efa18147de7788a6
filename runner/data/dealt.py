"""One source's batches dealt to all ranks in turn, so that what they read together depends on no count."""

from __future__ import annotations

from runner.data.stream import Pair, Position, Source, State


class DealtSource:
    """Batches r, r + P, r + 2P, ... of a `source` that is cut as for one rank, for rank r of P.

    All ranks are dealt as many; the batches of the others are read and dropped, which for a validation's
    few costs less than to know how to skip them.
    """

    def __init__(self, source: Source, *, rank: int, world: int) -> None:
        assert 0 <= rank < world
        self._source, self._rank, self._world = source, rank, world
        self._position = source.position

    @property
    def position(self) -> Position:
        return self._position

    def take(self) -> Pair:
        for _ in range(self._rank):
            self._source.take()
        pair = self._source.take()
        self._position = self._source.position
        for _ in range(self._rank + 1, self._world):
            self._source.take()
        return pair

    def state_dict(self) -> State:
        return self._source.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._source.load_state_dict(state)
        self._position = self._source.position

    def close(self) -> None:
        self._source.close()
