"""Copy weights into a model: from a flat buffer in layout order, or tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from runner.parallel.layout import layout_of


@torch.no_grad()
def assign_flat(model: nn.Module, weights: Tensor) -> None:
    layout = layout_of(model)
    assert weights.numel() == layout.numel, "the file's header gives the model's shape"
    for placed in layout.placed:
        flat = weights[placed.offset : placed.offset + placed.numel]
        placed.parameter.copy_(flat.view(placed.parameter.shape))


@torch.no_grad()
def assign(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy tensors by name; missing rows of an embedding are padding and stay zero."""
    own = dict(model.named_parameters())
    different = sorted(own.keys() ^ tensors.keys())
    if different:
        where = "missing" if different[0] in own else "unknown"
        raise ValueError(f"{path}: tensor {different[0]} is {where} ({len(different)} tensors differ)")
    for name, parameter in own.items():
        fill(parameter, tensors[name], rows=rows_of(model, name), name=name, path=path)


def rows_of(model: nn.Module, name: str) -> int | None:
    """Return how many rows of a tensor are real, where others are padding."""
    return int(model.vocab_size) if name == "embed.wte" else None  # type: ignore[arg-type]


def fill(parameter: Tensor, tensor: Tensor, *, rows: int | None, name: str, path: Path) -> None:
    wanted = tuple(parameter.shape)
    if rows is not None and tensor.shape[1:] == wanted[1:] and tensor.shape[0] >= rows:
        parameter.zero_()
        parameter[:rows].copy_(tensor[:rows])
    elif tuple(tensor.shape) == wanted:
        parameter.copy_(tensor)
    else:
        raise ValueError(f"{path}: {name} is {list(tensor.shape)}, the model needs {list(wanted)}")
