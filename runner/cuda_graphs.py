"""A micro-batch's forward and backward pass as one CUDA graph: the kernels of an eager pass, one launch.

A graph repeats device work alone. So everything that Python decides inside a pass must be decided alike
each time: a step's first micro-batch (which begins the gradient) and the further ones (which add to it) are
two graphs, and `runner.rules` refuses what else varies. The batch is copied to where the graphs read it.
Weights and gradients are views of flat buffers that never move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from runner.api import Batch

WARM_UPS = 3  # passes before capture: compilers, workspaces and lazily loaded kernels come first


class Run(Protocol):
    """A whole pass: begin the gradient if `first`, forward, backward; return the loss [], detached."""

    def __call__(self, batch: Batch, *, first: bool, last: bool) -> Tensor: ...


class Captured(NamedTuple):
    """A graph, and the place where each replay leaves its loss []."""

    replay: Callable[[], None]
    loss: Tensor


class Recorder(Protocol):
    """How device work is captured."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do `work` where it will be captured."""

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """Run the Python of `work` once; its device work is recorded, not done."""


class Graphs:
    """Replays a pass; the graphs are captured when the first micro-batch comes.

    `untouched` gives the generators back as they were after the passes of the warm-up, whose gradients
    the first replay overwrites: they leave no trace.
    """

    def __init__(
        self, *, accumulate: int, untouched: Callable[[], AbstractContextManager[None]], recorder: Recorder
    ) -> None:
        self._kinds = (True, False) if accumulate > 1 else (True,)  # first, further
        self._untouched, self._recorder = untouched, recorder
        self._graphs: dict[bool, Captured] = {}
        self._batch: Batch | None = None

    def __call__(self, run: Run, batch: Batch, *, first: bool) -> Tensor:
        """Do what `run` does with `batch`; return its loss [], which no later pass overwrites."""
        static = self._batch or self._prepare(run, batch)
        for place, given in zip(static, batch, strict=True):
            place.copy_(given)
        graph = self._graphs[first]
        graph.replay()
        return graph.loss.clone()

    def _prepare(self, run: Run, batch: Batch) -> Batch:
        self._batch = static = Batch(*(tokens.clone() for tokens in batch))
        passes = {first: functools.partial(run, static, first=first, last=True) for first in self._kinds}
        try:
            with self._untouched():
                self._recorder.warm_up(lambda: [work() for work in passes.values()])
                # In this order: what Python keeps of the gradient's state is then that after a first pass.
                self._graphs = {first: self._recorder.capture(work) for first, work in passes.items()}
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"run.cuda_graphs=true: the pass of this model cannot be captured ({error}); "
                "set run.cuda_graphs=false"
            ) from error
        return static


class CudaRecorder:
    """Captures on a stream of its own, which the warm-up uses too; all graphs share one pool of memory."""

    def __init__(self) -> None:
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
        current.wait_stream(self._stream)

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may pin memory and wait for events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            loss = work()
        return Captured(graph.replay, loss)


def graphs_of(
    device: torch.device,
    *,
    wanted: bool,
    accumulate: int,
    untouched: Callable[[], AbstractContextManager[None]],
) -> Graphs | None:
    """Return the graphs of a run's passes, or None where they are not `wanted`.

    Raises:
        ValueError: there is no GPU to capture on.
    """
    if not wanted:
        return None
    if device.type != "cuda":
        raise ValueError(
            f"run.cuda_graphs: true needs a CUDA device, and this run is on {device}; "
            "set run.device=cuda, or leave run.cuda_graphs=false"
        )
    return Graphs(accumulate=accumulate, untouched=untouched, recorder=CudaRecorder())
