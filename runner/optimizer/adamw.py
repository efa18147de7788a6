"""AdamW with llm.c's arithmetic: clipped by a factor, gated on the device, near memory speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from runner import arena, native
from runner.api import Segment, State
from runner.optimizer import compiled, reference
from runner.optimizer.groups import DECAYED
from runner.optimizer.master import initial_master, view_of
from runner.optimizer.reference import Part, Step
from runner.rng import ModelRng


class AdamW:
    """Adam with decoupled weight decay by role (Loshchilov and Hutter 2019), as llmc/adamw.cuh has it.

    `segments` and `rng` are supplied. State is flat, fp32, in the order of the segments. bfloat16
    weights are rounded stochastically, from an fp32 master copy unless `master` is false.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        lr: Annotated[float, Ge(0)],
        betas: tuple[float, float] = (0.9, 0.95),
        eps: Annotated[float, Gt(0)] = 1e-8,
        weight_decay: Annotated[float, Ge(0)] = 0.1,
        master: bool = True,
        rng: ModelRng | None = None,
    ) -> None:
        for index, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(
                    f"optimizer.betas[{index}]: {beta} is outside [0, 1); llm.c uses 0.9 and 0.95"
                )
        self.lr = lr  # the peak, for the scheduler; the update is told its own
        self.segments = tuple(segments)
        self.weight_decay, self._eps = weight_decay, eps
        self._betas = (np.float32(betas[0]), np.float32(betas[1]))
        first = self.segments[0].param
        self._device = first.device
        self._rng = rng if rng is not None else ModelRng(device=self._device)
        numel = sum(segment.param.numel() for segment in self.segments)
        self._m, self._v = (arena.zeros(numel, device=self._device) for _ in range(2))
        self._keep_master = master and first.dtype == torch.bfloat16
        self._master: Tensor | None = None
        self._parts: tuple[Part, ...] = ()
        self._compiled: compiled.Compiled | None = None

    def update(self, *, step: int, lr: float, scale: Tensor, apply: Tensor) -> None:
        """Apply one update; with `apply` [] false no bit of weights, state or generator changes."""
        self._bind()
        scalars = self._scalars(step, lr=lr)
        if self._device.type == "cpu":
            if bool(apply):
                self._update_on_cpu(Step(scale, *scalars.unbind()))
            return
        seeds = self._rng.update_on_device(len(self._parts), apply=apply)
        kernels = native.triton_kernels()
        if kernels is None:
            update = Step(scale, *scalars.unbind())
            reference.update(self._parts, step=update, seeds=list(seeds.unbind()), apply=apply)
        else:
            kernels.adamw(self._parts, scalars=scalars, scale=scale, seeds=seeds, apply=apply)

    def state_dict(self) -> State:
        """Return the live flat buffers: "m", "v" and, with a master copy, "master"."""
        self._bind()
        state: State = {"m": self._m, "v": self._v}
        return state if self._master is None else state | {"master": self._master}

    def load_state_dict(self, state: State) -> None:
        """Copy a state of the same layout; raises ValueError where a buffer is missing or too long."""
        for name, target in self.state_dict().items():
            if name not in state:
                hint = ": set optimizer.master=false to go on without" if name == "master" else ""
                raise ValueError(f"optimizer state: {name!r} is missing from the checkpoint{hint}")
            source = torch.as_tensor(state[name])
            if source.numel() != target.numel():
                raise ValueError(
                    f"optimizer state: {name!r} holds {source.numel()} values, "
                    f"this rank needs {target.numel()}; resume with the model and world size that wrote it"
                )
            target.copy_(source.view(-1))

    def _bind(self) -> None:
        """Copy the master from the weights at first use: by then a model file has been read into them."""
        if self._parts:
            return
        self._master = initial_master(self.segments) if self._keep_master else None
        self._parts = tuple(self._part(segment) for segment in self.segments)
        self._compiled = compiled.bind(self._parts)

    def _part(self, segment: Segment) -> Part:
        master = None if self._master is None else view_of(self._master, segment)
        decay = self.weight_decay if segment.role in DECAYED else 0.0
        return Part(segment, view_of(self._m, segment), view_of(self._v, segment), master, decay)

    def _update_on_cpu(self, step: Step) -> None:
        seeds = self._rng.update(len(self._parts))
        if self._compiled is not None:
            self._compiled.update(step=step, seeds=seeds)
        else:
            reference.update(self._parts, step=step, seeds=seeds)

    def _scalars(self, step: int, *, lr: float) -> Tensor:
        """Return lr, both betas, their corrections 1 - beta^t in fp32 and eps on the device, as [6]."""
        one, t = np.float32(1), step + 1
        corrections = (one - np.float32(float(beta) ** t) for beta in self._betas)
        values = torch.from_numpy(np.array([lr, *self._betas, *corrections, self._eps], dtype=np.float32))
        if self._device.type == "cuda":
            values = values.pin_memory()  # a copy from elsewhere may wait for the device
        return values.to(self._device, non_blocking=True)
