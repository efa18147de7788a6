"""Fully sharded data parallel: each rank keeps 1/P of the weights, the gradient and the optimizer state.

torch's `fully_shard` (FSDP2) gathers a block's weights when it runs and scatters its gradient. What the
loop relies on is made here: gradients in one flat buffer, a norm that is the same on every rank and from
run to run, updates gated on the device, and whole weights for checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import Tensor, nn

from runner import arena, norm
from runner.api import Optimizer, Segment, Slot, State
from runner.optimizer.groups import roles_of
from runner.parallel import collective
from runner.parallel.ddp import check_started
from runner.parallel.layout import Layout, Placed, layout_of


class _Part:
    """This rank's rows of one parameter: `start` elements come before them, `at` is their place here."""

    def __init__(self, placed: Placed, *, at: int, start: int) -> None:
        self.placed, self.at, self.start = placed, at, start

    @property
    def local(self) -> Tensor:
        """The rows [n] of the weights; never an empty view of nothing, also where this rank has none."""
        sharded: Any = self.placed.parameter
        local: Tensor = sharded.to_local().detach()
        return local.reshape(-1)


class Fsdp:
    """The fully sharded engine; `rank`, `world` and `device` are supplied.

    A parameter is cut along its first dimension. `gradient` is this rank's part, in the model's order.
    """

    draws_per_micro_step = 1
    layout: tuple[Slot, ...]
    gradient: Tensor

    def __init__(
        self,
        *,
        processes: Annotated[int, Ge(1)] | None = None,
        reshard_after_forward: bool = True,
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
    ) -> None:
        check_started(processes, world=world)
        if not dist.is_initialized():
            raise ValueError("parallel: fsdp needs ranks; set parallel.processes=2 or more, or use torchrun")
        self.rank, self.world = rank, world
        self.device = device if device is not None else torch.device("cpu")
        self.layout = ()
        self._reshard = reshard_after_forward
        self._messages = collective.Messages(world=world, device=self.device)
        self._last_sums = torch.empty(0)

    def place(self, model: nn.Module) -> nn.Module:
        """Shard the blocks and then the rest of the model; rank 0's weights are everybody's."""
        model.to(self.device)
        roles, layout = roles_of(model), layout_of(model)
        self.layout = layout.slots
        collective.broadcast([*model.parameters(), *model.buffers()], world=self.world)
        self._model: Any = _shard(model, device=self.device, reshard=self._reshard)
        self._parts = _parts(model, layout, rank=self.rank, world=self.world)
        self._numel, self._dtype = layout.numel, layout.dtype
        count = sum(part.local.numel() for part in self._parts)
        self.gradient = arena.zeros(max(count, 1), device=self.device)
        self._segments = tuple(
            self._segment(i, part, roles[part.placed.name]) for i, part in enumerate(self._parts)
        )
        self._sums = norm.ChunkSums(self._chunks(), gradient=self.gradient)
        return model

    def segments(self) -> tuple[Segment, ...]:
        """Return this rank's rows of every parameter, in the model's order."""
        return self._segments

    def optimizer(self, factory: Callable[[Sequence[Segment]], Optimizer]) -> Optimizer:
        """Return the factory's optimizer of this rank's rows."""
        return Local(factory(self._segments))

    def zero_grad(self) -> None:
        """Start a step's gradient."""
        for part in self._parts:
            part.placed.parameter.grad = None

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Wrap forward and backward of one micro-batch; gradients travel only on the last."""
        self._model.set_requires_gradient_sync(last)
        self._model.set_is_last_backward(last)
        yield

    def finish_gradient_sync(self) -> None:
        """Bring the mean gradient's rows of this rank into the flat buffer."""
        for segment, part in zip(self._segments, self._parts, strict=True):
            grad: Any = part.placed.parameter.grad
            if grad is None:
                segment.grad.zero_()
            elif segment.grad.numel():
                segment.grad.copy_(grad.to_local().view(1, -1))

    def grad_norm(self) -> Tensor:
        """Return the global L2 norm [] fp32: per parameter, the ranks' sums are added in rank order."""
        rows = self._messages.all_gather(self._sums())
        self._last_sums = rows.t().reshape(-1)
        return norm.norm_of(self._last_sums)

    @property
    def sums(self) -> Tensor:
        """The sums of squares [parameters x ranks] that the last `grad_norm` added."""
        return self._last_sums

    def slot_norms(self, sums: Tensor) -> dict[str, float]:
        """Return the gradient norm of each parameter by name; waits for the device."""
        rows = sums.cpu().view(-1, self.world)
        return {p.placed.name: float(norm.norm_of(row)) for p, row in zip(self._parts, rows, strict=True)}

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a 0-d value over the ranks, added in rank order in float64 on each."""
        return collective.mean(value, agreement=self._messages, world=self.world, device=self.device)

    def any(self, flag: bool) -> bool:
        """Whether any rank raised `flag`; agreed by all."""
        return self._messages.any_flag(flag)

    def gather(self, value: Any) -> list[Any]:
        """Return a small host value of every rank, in rank order."""
        return collective.gather_objects(value, world=self.world, group=self._messages.group)

    def full_weights(self) -> Tensor:
        """Return all weights [numel] in host memory on rank 0; elsewhere zeros that take no memory."""
        zero = torch.zeros(1, dtype=self._dtype)
        flat = arena.zeros(self._numel, dtype=self._dtype, device=zero.device) if self.rank == 0 else None
        for part in self._parts:
            placed, parameter = part.placed, part.placed.parameter
            whole: Any = parameter.full_tensor()  # type: ignore[attr-defined]
            if flat is not None:
                flat[placed.offset : placed.offset + whole.numel()] = whole.detach().reshape(-1).cpu()
        return zero.expand(self._numel) if flat is None else flat

    def load_weights(self, flat: Tensor) -> None:
        for part in self._parts:
            first = part.placed.offset + part.start
            part.local.copy_(flat[first : first + part.local.numel()])

    def barrier(self) -> None:
        self._messages.barrier()

    def close(self) -> None:
        """Nothing to take off: the sharded model ends with the process."""

    def _segment(self, index: int, part: _Part, role: Any) -> Segment:
        local = part.local
        grad = self.gradient[part.at : part.at + local.numel()]
        shape = self.layout[part.placed.slot].shape
        name = part.placed.name
        return Segment(name, role, shape, local.view(1, -1), grad.view(1, -1), part.at, part.start, index)

    def _chunks(self) -> list[norm.Chunk]:
        return [
            norm.Chunk(part.at, part.local.numel(), i, 0, self.rank) for i, part in enumerate(self._parts)
        ]


class Local:
    """An optimizer of a rank's own rows, whose state no other number of ranks can read."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def update(self, *, step: int, lr: float, scale: Tensor, apply: Tensor) -> None:
        self.inner.update(step=step, lr=lr, scale=scale, apply=apply)

    def state_dict(self) -> State:
        """Return the state in host memory, apart from the names that llm.c's files hold."""
        state = self.inner.state_dict()
        return {"rows": {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}}

    def load_state_dict(self, state: State) -> None:
        if "rows" not in state:
            raise ValueError("optimizer state: not of parallel=fsdp; resume with the parallel that wrote it")
        self.inner.load_state_dict(state["rows"])


def _shard(model: nn.Module, *, device: torch.device, reshard: bool) -> nn.Module:
    """Apply `fully_shard` to the members of every module list, and to the model for what is left."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in (block for blocks in lists for block in blocks):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _parts(model: nn.Module, layout: Layout, *, rank: int, world: int) -> list[_Part]:
    """Return this rank's part of every parameter; `layout` was made before they were sharded."""
    sharded = dict(model.named_parameters())
    parts: list[_Part] = []
    at = 0
    for placed in layout.placed:
        part = _Part(placed._replace(parameter=sharded[placed.name]), at=at, start=0)
        shape = layout.slots[placed.slot].shape
        rows = -(-shape[0] // world) if shape else 1  # torch.chunk's cut
        part.start = min(rank * rows, shape[0]) * (placed.numel // shape[0])
        at += part.local.numel()
        parts.append(part)
    return parts
