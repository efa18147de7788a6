"""Layer norm, GELU and friends, as plain torch operations.

Legend: B sequences, T tokens, C channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

LAYER_NORM_EPS = 1e-5  # llm.c train_gpt2.c, layernorm_forward


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalise the last dimension of `x` [..., C] to mean 0 and variance 1, then scale and shift."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, LAYER_NORM_EPS)


def gelu(x: Tensor) -> Tensor:
    """Apply GPT-2's GELU, the tanh approximation (Hendrycks & Gimpel 2016, section 2)."""
    return F.gelu(x, approximate="tanh")
