"""The contract: every value and protocol that the parts of a run share. Read this file first.

Nothing here computes. The loop (`runner.train`) passes these values between small parts that know
none of the others; a plugin needs this module and nothing else of the package.
Shapes use B sequences of a micro-batch, T tokens of a sequence, V vocabulary; `[]` is a 0-d tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from runner.events import (
    Event as Event,
)
from runner.events import (
    GpuState as GpuState,
)
from runner.events import (
    Note as Note,
)
from runner.events import (
    Ranks as Ranks,
)
from runner.events import (
    Removed as Removed,
)
from runner.events import (
    Sample as Sample,
)
from runner.events import (
    Saved as Saved,
)
from runner.events import (
    Score as Score,
)
from runner.events import (
    TrainStep as TrainStep,
)
from runner.events import (
    ValLoss as ValLoss,
)
from runner.events import (
    metrics as metrics,
)

# ---------------------------------------------------------------- state

State = dict[str, Any]
"""What a part needs to go on: None, bool, int, float, str, bytes, list, dict, numpy arrays, tensors."""


@runtime_checkable
class Stateful(Protocol):
    """A part that a checkpoint keeps. Nothing stateful may live outside of one."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


# ---------------------------------------------------------------- pure parts

Scheduler = Callable[[int], float]
"""0-based step -> learning rate (a float32 value); pure."""

Clip = Callable[[Tensor], Tensor]
"""Global gradient norm [] -> factor in (0, 1] [] fp32; pure."""


class Verdict(NamedTuple):
    """Whether a step's update may be applied, and why; device tensors, read by nobody in the loop."""

    apply: Tensor  # [] bool
    loss_z: Tensor  # [] float64, nan while the window fills
    norm_z: Tensor  # [] float64
    reason: Tensor  # [] int64, bits of REASONS; 0 = applied


REASONS: Mapping[int, str] = {
    1: "non-finite loss",
    2: "non-finite gradient norm",
    4: "loss z-score",
    8: "gradient norm z-score",
    16: "gradient norm over the running median",
}


class Outlier(Stateful, Protocol):
    """Judges each step from numbers that are the same on every rank."""

    def __call__(self, loss: Tensor, norm: Tensor) -> Verdict: ...


# ---------------------------------------------------------------- data


class Batch(NamedTuple):
    """One micro-batch on the engine's device; `targets` is `inputs` shifted by one token."""

    inputs: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64


@runtime_checkable
class Stream(Stateful, Protocol):
    """An endless source of micro-batches; its state is the position of what was handed out."""

    def next(self) -> Batch: ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eot(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Data(Protocol):
    """A corpus with its splits. Importing or building one must not need torch to report bad input."""

    vocab_size: int
    tokenizer: Tokenizer | None

    def check(self, *, micro_batch: int, seq_len: int, world: int, vocab_size: int | None) -> list[str]:
        """Return every problem with the files, one line each; empty when all is well."""

    def train(self, **where: Any) -> Stream:
        """Open the training stream; `where`: micro_batch, seq_len, rank, world, device, seed."""

    def val(self, **where: Any) -> Stream:
        """Open the validation stream, in file order from its start; `where` as in `train`."""

    def fingerprint(self) -> dict[str, Any]:
        """Identify the tokens (paths, sizes, hashes) for the manifest and the check on resume."""


# ---------------------------------------------------------------- model and parameters


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model; an `nn.Module`."""

    max_seq_len: int
    vocab_size: int  # real tokens, without padding

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        reduction: Literal["mean", "none"] = "mean",
        cache: Any = None,
    ) -> Tensor:
        """Return logits [B, T, V] without targets; the mean loss [] or losses [B, T] fp32 with them."""

    def flops_per_token(self, seq_len: int) -> int: ...


class Slot(NamedTuple):
    """One tensor of the flat layout: `layers` stacked copies of `shape`, at `offset` elements."""

    name: str
    shape: tuple[int, ...]
    layers: int
    offset: int

    @property
    def layer_numel(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    @property
    def numel(self) -> int:
        return self.layers * self.layer_numel


Role = Literal["matrix", "embedding", "head", "vector"]


@dataclass(frozen=True)
class Segment:
    """This rank's part of one slot, as an optimizer sees it.

    `param` and `grad` are views [layers, n] of the flat buffers, n elements of each layer (all of
    them unless the state is sharded); `grad` is fp32. `offset` is where the part starts in a flat
    state buffer that holds this rank's segments one after the other. `start` is the index, inside a
    layer, of the first element of the part.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    param: Tensor
    grad: Tensor
    offset: int
    start: int = 0
    index: int = 0  # position of the slot in the layout

    @property
    def whole(self) -> bool:
        """Whether every element of the slot is here, as matrix-wise optimizers need."""
        n = 1
        for extent in self.shape:
            n *= extent
        return self.param.shape[1] == n


class Optimizer(Stateful, Protocol):
    """Applies one update to its segments, gated on the device.

    With `apply` false not one bit of weights or state changes, whatever the gradient holds.
    The gradient is read as `scale * grad` and never modified. `step` is the loop's 0-based step, so
    bias correction uses t = step + 1 also after skips, as llm.c does.
    """

    def update(self, *, step: int, lr: float, scale: Tensor, apply: Tensor) -> None: ...


class Engine(Protocol):
    """Where parameters live and how ranks combine; `single`, `ddp`, `zero1`, `fsdp`."""

    rank: int
    world: int
    device: torch.device
    layout: tuple[Slot, ...]
    gradient: Tensor  # flat, fp32: every slot in order, or where weights are sharded this rank's part
    draws_per_micro_step: int  # of llm.c's generator, so that its stream does not depend on the ranks

    def place(self, model: nn.Module) -> nn.Module:
        """Move the parameters into the flat buffers; return what the loop calls."""

    def optimizer(self, factory: Callable[[Sequence[Segment]], Optimizer]) -> Optimizer: ...

    def zero_grad(self) -> None: ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of one micro-batch; gradients travel only on the last."""

    def finish_gradient_sync(self) -> None:
        """Return once every gradient is complete."""

    def grad_norm(self) -> Tensor:
        """Return the global L2 norm [] fp32, the same on every rank and from run to run."""

    @property
    def sums(self) -> Tensor:
        """Return the sums of squares that the last `grad_norm` added, complete on every rank."""

    def slot_norms(self, sums: Tensor) -> dict[str, float]:
        """Return the gradient norm of each tensor by name; waits for the device."""

    def full_weights(self) -> Tensor:
        """Return the weights [numel] in the order of the layout; all ranks together.

        Only rank 0 needs the values: where weights are sharded, the others' are of the right size alone.
        """

    def load_weights(self, flat: Tensor) -> None:
        """Take over the weights [numel], which every rank was given whole."""

    def gather(self, value: Any) -> list[Any]:
        """Return a small host value of every rank in rank order; for rare moments, all together."""

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a 0-d value over the ranks, the same bits on each."""

    def any(self, flag: bool) -> bool:
        """Whether any rank raised `flag` (a stop request); agreed by all."""

    def barrier(self) -> None: ...

    def close(self) -> None: ...


# ---------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class Snapshot:
    """One rank's complete state at a step, as a checkpoint format writes and reads it."""

    step: int
    rank: int
    world: int
    layout: tuple[Slot, ...]
    model: dict[str, Any]  # kind ("gpt2", ...) and its shape integers
    weights: Tensor  # flat, every slot in order; fp32 or bf16
    optimizer: State  # flat state of this rank by name ("m", "v", "master"), or any other state
    stream: State
    rng: dict[str, int]  # state, last_update: llm.c's generator
    parts: dict[str, State] = field(default_factory=dict)  # outlier, generators, meter, loggers, ...
    env: dict[str, Any] = field(default_factory=dict)  # what the bits depend on: threads, versions


# ---------------------------------------------------------------- watchers


@dataclass(frozen=True)
class RunInfo:
    """What a logger may know about the run it watches."""

    name: str
    dir: Path
    config: dict[str, Any]  # resolved, plain containers
    manifest: dict[str, Any]
    start_step: int  # 0 on a fresh start, else the checkpoint's step
    resumed: bool
    steps: int
    group: str | None = None
    tags: tuple[str, ...] = ()


class Logger(Protocol):
    """Watches a run from rank 0. Also `Stateful` if it has something to keep in checkpoints."""

    def open(self, run: RunInfo) -> None: ...

    def log(self, event: Event) -> None: ...

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None: ...


@dataclass(frozen=True)
class View:
    """What an evaluator sees: a model in eval mode, and what it needs to feed it."""

    model: nn.Module
    engine: Engine
    data: Data
    autocast: Callable[[], AbstractContextManager[Any]]
    micro_batch: int
    seq_len: int
    seed: int
    steps: int


class Evaluator(Protocol):
    """Looks at the model every `every` steps and at the end; changes nothing of the training state."""

    every: int

    def __call__(self, view: View, step: int) -> Iterable[Event]: ...
