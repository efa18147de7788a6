"""What every optimizer's config node may also say: rates by role, and by the size of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, get_args

from annotated_types import Ge
from torch import Tensor

from runner.api import Optimizer, Role, Segment, State
from runner.optimizer.foreign import Foreign
from runner.optimizer.mastered import Mastered
from runner.rng import ModelRng

Make = Callable[..., Any]
"""Builds the config node it is given; keywords fill what the program supplies."""


@dataclass(frozen=True)
class Options:
    """Scale the learning rate with the size of a step, and rate and weight decay by role.

    `lr_scaling` multiplies `optimizer.lr` by k = tokens per step / reference_tokens (linear; Goyal et al.
    2017), by its root (sqrt; better above k = 8), or not at all. `lr_scale` and `decay_scale` map a
    role (matrix, embedding, head, vector) to a factor, 1 where none is given.
    """

    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    reference_tokens: Annotated[int, Ge(1)] | None = None
    lr_scale: dict[str, float] | None = None
    decay_scale: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if self.lr_scaling != "none" and self.reference_tokens is None:
            raise ValueError(
                f"optimizer.lr_scaling={self.lr_scaling} needs optimizer.reference_tokens: "
                "the tokens per step that optimizer.lr was tuned for"
            )
        for key in ("lr_scale", "decay_scale"):
            for role, factor in (getattr(self, key) or {}).items():
                if role not in get_args(Role):
                    roles = ", ".join(get_args(Role))
                    raise ValueError(f"optimizer.{key}.{role}: no such role; use one of {roles}")
                if not (isinstance(factor, int | float) and 0 <= factor < math.inf):
                    raise ValueError(f"optimizer.{key}.{role}: {factor} must be a number of at least 0")

    def lr_factor(self, tokens: int) -> float:
        """Return what multiplies the schedule in a run of `tokens` per step."""
        if self.lr_scaling == "none" or self.reference_tokens is None:
            return 1.0
        times = tokens / self.reference_tokens
        return times if self.lr_scaling == "linear" else math.sqrt(times)

    def scales(self, role: Role) -> tuple[float, float]:
        """Return the factors of the learning rate and of the weight decay of a role."""
        return (self.lr_scale or {}).get(role, 1.0), (self.decay_scale or {}).get(role, 1.0)


NAMES = frozenset(Options.__dataclass_fields__)


def assemble(
    segments: Sequence[Segment],
    *,
    node: dict[str, Any],
    make: Make,
    takes: frozenset[str],
    rng: ModelRng,
) -> Optimizer:
    """Build the optimizer of a config node whose target takes the arguments `takes`.

    A target that takes `rng` rounds its own weights, one that takes `segments` is this package's kind,
    and any other is torch's kind. Raises ValueError for what the node's options or the target refuse.
    """
    options = Options(**{name: value for name, value in node.items() if name in NAMES})
    rest = {name: value for name, value in node.items() if name not in NAMES}
    by_scales: dict[tuple[float, float], list[Segment]] = {}
    for segment in segments:
        by_scales.setdefault(options.scales(segment.role), []).append(segment)
    if options.decay_scale and "weight_decay" not in rest:
        raise ValueError("optimizer.decay_scale needs optimizer.weight_decay, which it multiplies")
    parts = []
    for (lr_scale, decay_scale), members in by_scales.items():
        scaled = {**rest, "weight_decay": rest["weight_decay"] * decay_scale} if decay_scale != 1 else rest
        own = moved_together(members) if len(by_scales) > 1 else members
        parts.append(Part(lr_scale, _one(own, node=scaled, make=make, takes=takes, rng=rng)))
    return parts[0].optimizer if len(parts) == 1 and parts[0].lr_scale == 1 else Grouped(parts)


def _one(
    segments: Sequence[Segment], *, node: dict[str, Any], make: Make, takes: frozenset[str], rng: ModelRng
) -> Optimizer:
    def plain(exact: Sequence[Segment]) -> Optimizer:
        if "segments" in takes:
            built: Optimizer = make(node, segments=exact)
            return built
        return Foreign(exact, build=lambda p: make(node, params=p), decays="weight_decay" in takes)

    if "rng" in takes:
        own: Optimizer = make(node, segments=segments, rng=rng)
        return own
    return Mastered(segments, build=plain, rng=rng)


def moved_together(segments: Sequence[Segment]) -> list[Segment]:
    """Return some of a rank's segments as if they were all: their state starts at 0 and has no gaps."""
    moved, offset = [], 0
    for segment in segments:
        moved.append(replace(segment, offset=offset))
        offset += segment.param.numel()
    return moved


class Part(NamedTuple):
    """An optimizer of the segments that share a factor on the learning rate."""

    lr_scale: float
    optimizer: Optimizer


class Grouped:
    """Several optimizers as one, each at its own multiple of the learning rate."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    def update(self, *, step: int, lr: float, scale: Tensor, apply: Tensor) -> None:
        for part in self.parts:
            part.optimizer.update(step=step, lr=lr * part.lr_scale, scale=scale, apply=apply)

    def state_dict(self) -> State:
        return {f"part{i}": part.optimizer.state_dict() for i, part in enumerate(self.parts)}

    def load_state_dict(self, state: State) -> None:
        """Restore each part; raises ValueError where their number differs."""
        names = [f"part{i}" for i in range(len(self.parts))]
        if sorted(state) != names:
            raise ValueError(f"optimizer state: it has the parts {sorted(state)}, this run {names}")
        for name, part in zip(names, self.parts, strict=True):
            part.optimizer.load_state_dict(state[name])
