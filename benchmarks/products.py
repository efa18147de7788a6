"""The matrix products of a training step and nothing else: less no trainer can do with this library.

N tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.workloads import Workload

ROWS = 256  # of the head's products at a time, whose logits then stay in the cache


def products_loop(w: Workload, after_step: Callable[[], None]) -> None:
    """Multiply for ever what a GPT-2 of this shape multiplies in bf16, forward and backward.

    In its favour: no products within attention, and activations are at hand, the same for each layer.
    """
    count, c = w.batch * w.seq_len, w.width
    inner = [(c, 3 * c), (c, c), (c, 4 * c), (4 * c, c)] * w.layers
    weights = [torch.randn(outputs, inputs).bfloat16() for inputs, outputs in inner]
    head = torch.randn(w.vocab, c).bfloat16()
    values = {width: torch.randn(count, width).bfloat16() for width in (c, 3 * c, 4 * c)}
    logits = torch.randn(min(ROWS, count), w.vocab).bfloat16()
    while True:
        for weight in weights:
            _multiply(values[weight.shape[1]], weight, values[weight.shape[0]])
        for rows in torch.split(values[c], ROWS):
            _multiply(rows, head, logits[: len(rows)])
        after_step()


def _multiply(x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """Do the three products of a layer for x [N, inputs], weight [outputs, inputs], gradient [N, outputs]."""
    x @ weight.t()
    gradient @ weight
    gradient.t() @ x
