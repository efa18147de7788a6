"""Matrix products in fp8 with one scale per row, by torchao.

Legend: [..., I] inputs, [O, I] weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

MULTIPLE = 16  # of both sides of a weight, as the hardware wants
_HEADS = ("head", "lm_head", "output")


def convert(model: nn.Module, *, emulate: bool) -> int:
    """Let the blocks of `model` multiply in fp8, and swap its `nn.Linear` layers; return how many."""
    swap = _swapper(emulate=emulate)
    found = 0
    for module in model.modules():
        if "linear" in vars(module):
            module.linear = Fp8Linear(swap)  # type: ignore[assignment]
            found += 1

    def chosen(module: nn.Module, name: str) -> bool:
        sides = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
        return not any(side % MULTIPLE for side in sides) and name.rpartition(".")[2] not in _HEADS

    before = sum(type(module) is nn.Linear for module in model.modules())
    if before:
        swap(model, chosen)
        found += before - sum(type(module) is nn.Linear for module in model.modules())
    return found


class Fp8Linear:
    """`F.linear` in fp8: torchao's layer, called with the weights of the block that it multiplies for."""

    def __init__(self, swap: Callable[..., nn.Module]) -> None:
        shell = nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta"))
        swap(shell, None)
        self._layer = shell[0]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if any(side % MULTIPLE for side in weight.shape):
            raise ValueError(
                f"precision.mode=fp8: a weight of shape {list(weight.shape)} is not a multiple of {MULTIPLE} "
                "on both sides; change model.width, or use precision=bf16"
            )
        kind, rows = x.device.type, x.shape[:-1].numel()
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):
            x2, w = x.reshape(rows, -1).to(dtype), weight.to(dtype)
            y: Tensor = torch.func.functional_call(self._layer, {"weight": w}, (x2,))
            y = y.view(*x.shape[:-1], -1)
            return y if bias is None else y + bias.to(dtype)


def _swapper(*, emulate: bool) -> Callable[..., nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao warns of extensions that a build does not have
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config: Any = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)

    def swap(model: nn.Module, chosen: Callable[[nn.Module, str], bool] | None) -> nn.Module:
        swapped: nn.Module = convert_to_float8_training(model, module_filter_fn=chosen, config=config)
        return swapped

    return swap
