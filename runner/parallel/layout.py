"""Lay a model's parameters out in one flat buffer, the layers of each tensor stacked.

A parameter `<prefix>.<i>.<rest>` is layer i of the slot `<prefix>.*.<rest>`; anything else is a slot
of its own. Slots keep the order of first appearance in `named_parameters()`, so llm.c's GPT-2 gets
llm.c's 16 tensors in file order, without padding.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import nn

from runner.api import Slot

_LAYER = re.compile(r"^(.+?)\.(\d+)\.(.+)$")


class Placed(NamedTuple):
    """Where one parameter lives: layer `layer` of slot `slot`, elements `offset` to `offset + numel`."""

    name: str
    parameter: nn.Parameter
    slot: int
    layer: int
    offset: int

    @property
    def numel(self) -> int:
        return self.parameter.numel()


class Layout(NamedTuple):
    """Every slot in order, and every parameter in the model's own order."""

    slots: tuple[Slot, ...]
    placed: tuple[Placed, ...]
    numel: int
    dtype: torch.dtype


def layout_of(model: nn.Module) -> Layout:
    """Return the layout of `model`'s distinct parameters; a tied parameter appears once.

    Raises ValueError where the parameters cannot share one buffer (none, frozen, mixed types).
    """
    named = dict(model.named_parameters())
    dtype = _one_dtype(named)
    slots: list[Slot] = []
    placed: dict[str, Placed] = {}
    offset = 0
    for name, members in _stacks(named).items():
        first = named[members[0]]
        slot = Slot(name=name, shape=tuple(first.shape), layers=len(members), offset=offset)
        for layer, member in enumerate(members):
            at = offset + layer * slot.layer_numel
            placed[member] = Placed(member, named[member], len(slots), layer, at)
        slots.append(slot)
        offset += slot.numel
    return Layout(tuple(slots), tuple(placed[name] for name in named), offset, dtype)


def _one_dtype(named: dict[str, nn.Parameter]) -> torch.dtype:
    if not named:
        raise ValueError("model: it has no parameters, so there is nothing to train; choose another model")
    frozen = next((name for name, parameter in named.items() if not parameter.requires_grad), None)
    if frozen is not None:
        raise ValueError(
            f"model: {frozen!r} has requires_grad=False; every parameter is trained and decayed here: "
            "register what stays fixed as a buffer"
        )
    dtypes = {parameter.dtype for parameter in named.values()}
    allowed = {torch.float32, torch.bfloat16}
    if len(dtypes) != 1 or not dtypes <= allowed:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(
            f"model: parameters of type {found}; all must be torch.float32, or all torch.bfloat16: "
            "convert the model with .to(dtype)"
        )
    return dtypes.pop()


def _stacks(named: dict[str, nn.Parameter]) -> dict[str, list[str]]:
    """Group parameter names into slots; layers that are not alike stay slots of their own."""
    stacks: dict[str, list[tuple[int, str]]] = {}
    for name in named:
        match = _LAYER.match(name)
        key, layer = (f"{match[1]}.*.{match[3]}", int(match[2])) if match else (name, 0)
        stacks.setdefault(key, []).append((layer, name))
    grouped: dict[str, list[str]] = {}
    for key, members in stacks.items():
        alike = len({named[name].shape for _, name in members}) == 1
        if alike and [layer for layer, _ in members] == list(range(len(members))):
            grouped[key] = [name for _, name in members]
        else:
            grouped.update({name: [name] for _, name in members})
    return grouped
