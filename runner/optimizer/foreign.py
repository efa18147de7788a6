"""Drive an optimizer written for torch (`torch.optim`, or a library with its interface) from segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from runner.api import Segment, State
from runner.optimizer.groups import DECAYED

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD"}
)
"""Optimizers of torch.optim that treat each number alone, so that a shard of a tensor is as good as all."""


class Named(NamedTuple):
    """One layer of a segment as torch knows it: a parameter on top of the run's own memory."""

    name: str
    parameter: nn.Parameter
    grad: Tensor  # fp32, of the parameter's shape


class Foreign:
    """An optimizer of `torch.optim`'s interface as the loop's optimizer; its segments are fp32.

    `build` gets torch's parameter groups. Weight decay of any kind stays off vectors. The gate is a branch
    on the host, which on a GPU waits for the verdict once per update. Where the state counts
    steps, it is told the loop's count, so that bias correction uses t = step + 1 also after skips.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        build: Callable[[list[dict[str, Any]]], Any],
        decays: bool,
    ) -> None:
        self._named = tuple(named for segment in segments for named in _layers(segment))
        decayed = {segment.name for segment in segments if segment.role in DECAYED}
        names = [segment.name for segment in segments for _ in range(segment.param.shape[0])]
        split = [(n.parameter, name in decayed) for n, name in zip(self._named, names, strict=True)]
        groups: list[dict[str, Any]] = [{"params": [p for p, with_decay in split if with_decay]}]
        groups.append({"params": [p for p, with_decay in split if not with_decay]})
        if decays:
            groups[1]["weight_decay"] = 0.0
        whole = all(segment.whole for segment in segments)
        self._optimizer: Any = None
        try:
            self._optimizer = build([group for group in groups if group["params"]])
        except (ValueError, RuntimeError) as error:  # torch's own checks raise either
            if whole:
                text = str(error)
                raise ValueError(text if text.startswith("optimizer") else f"optimizer: {text}") from error
        kind = type(self._optimizer).__name__
        if not whole and kind not in ELEMENTWISE:
            raise ValueError(
                "optimizer: this one needs whole tensors, parallel=zero1 and fsdp give each rank a part; "
                "use parallel=ddp or single"
            )

    def update(self, *, step: int, lr: float, scale: Tensor, apply: Tensor) -> None:
        """Apply one update unless `apply` [] is false; reading that waits for a GPU."""
        if not bool(apply):
            return
        self._set(step=step, lr=lr)
        for named in self._named:
            named.parameter.grad = named.grad * scale
        self._optimizer.step()
        for named in self._named:
            named.parameter.grad = None

    def state_dict(self) -> State:
        """Return the state of each tensor by name, and what the groups count."""
        state = {n.name: dict(self._optimizer.state.get(n.parameter, {})) for n in self._named}
        for name, entries in state.items():
            for key, value in entries.items():
                if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
                    raise ValueError(
                        f"optimizer: its state {key!r} of {name} is a {type(value).__name__}, which no "
                        "checkpoint can hold; choose an optimizer with plain tensors"
                    )
        return {"tensors": state, "groups": [_counts(group) for group in self._optimizer.param_groups]}

    def load_state_dict(self, state: State) -> None:
        """Restore a state of the same tensors; raises ValueError where the names differ."""
        saved = state.get("tensors", {})
        names = [named.name for named in self._named]
        if set(saved) != set(names):
            lacking = sorted(set(names) ^ set(saved))[0]
            raise ValueError(f"optimizer state: it is not of these tensors, first at {lacking}")
        for group, counts in zip(self._optimizer.param_groups, state["groups"], strict=True):
            group.update(counts)
        for named in self._named:
            entries = {key: _placed(key, value, named) for key, value in saved[named.name].items()}
            if entries:
                self._optimizer.state[named.parameter] = entries

    def _set(self, *, step: int, lr: float) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            if "step" in group:
                group["step"] = step
        for entries in self._optimizer.state.values():
            counted = entries.get("step")
            if isinstance(counted, Tensor):
                counted.fill_(step)
            elif counted is not None:
                entries["step"] = step


def _layers(segment: Segment) -> Iterator[Named]:
    for layer in range(segment.param.shape[0]):
        param, grad = segment.param[layer], segment.grad[layer]
        if segment.whole:
            param, grad = param.view(segment.shape), grad.view(segment.shape)
        yield Named(segment.name.replace("*", str(layer)), nn.Parameter(param.detach()), grad)


def _counts(group: dict[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str)
    return {k: v for k, v in group.items() if k not in ("params", "lr") and isinstance(v, plain)}


def _placed(key: str, value: Any, named: Named) -> Any:
    if not isinstance(value, Tensor):
        return value
    # torch keeps its step counters on the host, where only they are 0-d.
    return value.clone() if key == "step" else value.to(named.parameter.device, copy=True)
