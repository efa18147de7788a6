"""Keep what a refused update was made of, so that the batch behind a spike can be found and studied.

Each refused step leaves `skips/step_%08d.json`: its numbers, the place in the data of every micro-batch of
every rank, and the gradient norms of the worst tensors. Per step this only keeps references: the positions,
which the host knows, and the chunk sums that the global norm was made of. So it is all still there
when a GPU's verdict arrives a step late, and nothing waits for the device but a refused step itself.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from runner.api import Engine, Note, TrainStep

FOLDER = "skips"
MOST_FILES = 200  # of a run; further refused steps are only logged
MOST_TENSORS = 16
MOST_BATCHES = 256  # positions in one file
_FILE = re.compile(r"step_(\d+)\.json")
_LATE = 2  # steps that may be under way: one running, one whose verdict is on its way


class _Step(NamedTuple):
    step: int
    places: tuple[Any, ...]
    sums: Tensor


class Forensics:
    """Remembers the last steps; writes down those that were refused (rank 0)."""

    def __init__(self, folder: Path, *, engine: Engine, rank_tokens: int) -> None:
        self._folder, self._engine = folder / FOLDER, engine
        self._sample_tokens = rank_tokens * engine.world
        self._places: list[Any] = []
        self._recent: deque[_Step] = deque(maxlen=_LATE)

    def rewind(self, start_step: int) -> None:
        """Remove what tells of steps from `start_step` on, which this session has yet to do (rank 0)."""
        if self._engine.rank != 0 or not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            if (match := _FILE.fullmatch(path.name)) and int(match[1]) >= start_step:
                path.unlink()

    def saw(self, stream: Any) -> None:
        """Remember where the micro-batch came from that `stream` just handed out."""
        place = getattr(stream, "position", None)
        if place is not None:
            self._places.append(place)

    def stepped(self, step: int) -> None:
        """Close the books of `step`, whose gradient norm the engine has just computed."""
        self._recent.append(_Step(step, tuple(self._places), self._engine.sums))
        self._places = []

    def keep(self, event: TrainStep) -> Iterator[Note]:
        """Write down a refused step; all ranks together."""
        kept = next((k for k in self._recent if k.step == event.step), None)
        if kept is None:
            return
        places = self._engine.gather([self._place(place) for place in kept.places])
        if self._engine.rank != 0:
            return
        norms = self._engine.slot_norms(kept.sums)
        text = f"step {event.step} refused: {event.reason} (loss {event.loss:.4f}, norm {event.norm:.4f})"
        broken = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
        if broken is not None:
            text += f"; first non-finite gradient: {broken}"
        yield Note(event.step, text + self._write(event, places, norms), "warning")

    def _write(self, event: TrainStep, places: list[Any], norms: dict[str, float]) -> str:
        path = self._folder / f"step_{event.step:08d}.json"
        record = {
            "step": event.step,
            "reason": event.reason,
            "loss": _number(event.loss),
            "norm": _number(event.norm),
            "loss_z": _number(event.loss_z),
            "norm_z": _number(event.norm_z),
            "lr": event.lr,
            "tensors": _worst(norms),
            "batches": _capped(places),
        }
        try:
            self._folder.mkdir(exist_ok=True)
            if not path.exists() and sum(1 for _ in self._folder.iterdir()) >= MOST_FILES:
                return f"; {self._folder} is full ({MOST_FILES} files), nothing kept"
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            return f"; {path} not written: {error.strerror}"
        return f"; kept in {path}"

    def _place(self, place: Any) -> dict[str, Any]:
        """Return a micro-batch's place: its shard, llm.c's sample number and the first token's index."""
        shard = place.path.name if place.path is not None else None
        sample = place.start // self._sample_tokens
        return {"shard": shard, "sample": sample, "start": place.start, "epoch": place.epoch}


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)  # JSON has no nan


def _worst(norms: dict[str, float]) -> dict[str, float | str]:
    """Return the tensors with the largest norms, those that are not finite first."""

    def badness(item: tuple[str, float]) -> float:
        return -item[1] if math.isfinite(item[1]) else -math.inf

    return {name: _number(norm) for name, norm in sorted(norms.items(), key=badness)[:MOST_TENSORS]}


def _capped(places: list[Any]) -> list[dict[str, Any]]:
    flat = [
        {"rank": rank, "micro_step": i, **place}
        for rank, of_rank in enumerate(places)
        for i, place in enumerate(of_rank)
    ]
    return flat[:MOST_BATCHES]
