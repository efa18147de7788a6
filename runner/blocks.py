"""How a model's blocks run in training: compiled, and with their activations kept or computed again.

Evaluation and generation run the blocks as they are: lengths vary there, and compiling anew for each
would cost more than it saves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

Forward = Callable[..., Any]


def settle_blocks(model: nn.Module, *, compile: Literal[False, "blocks"], checkpoint: bool) -> None:
    """Let every block of `model.blocks` run compiled, or keep only its input for the backward pass; in place.

    Neither changes a parameter's name. Raises ValueError for a model without `blocks`.
    """
    if not compile and not checkpoint:
        return
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        key = "run.compile=blocks" if compile else "train.checkpoint_blocks=true"
        raise ValueError(
            f"{key}: {type(model).__name__} has no ModuleList named `blocks`; leave the option off"
        )
    for block in blocks:
        plain: Forward = block.forward
        # One shape per run, and the same one in every block: one compilation for all of them. A break in
        # the graph is an error, since it would cost what compiling is to gain without a word.
        trained: Forward = torch.compile(plain, dynamic=False, fullgraph=True) if compile else plain
        if checkpoint:
            trained = functools.partial(_checkpointed, trained)
        block.forward = functools.partial(_run, block, trained, plain)


def _run(block: nn.Module, trained: Forward, plain: Forward, *inputs: Any, **named: Any) -> Any:
    chosen = trained if block.training and torch.is_grad_enabled() else plain
    return chosen(*inputs, **named)


def _checkpointed(forward: Forward, *inputs: Any, **named: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(forward, *inputs, use_reentrant=False, **named)
