"""Choose the next token from logits: pure functions, B sequences over V tokens, best candidate first.

Ties are broken towards the lower token id everywhere, so every filter keeps a defined set.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_sampling(*, temperature: float, top_k: int | None, top_p: float) -> None:
    """Raise one line for a setting that no distribution belongs to."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(
            f"temperature={temperature} must be finite and not negative; 0 always takes the best token"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1; null keeps every token")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must lie in (0, 1]; 1 keeps every token")


def keep_top_k(logits: Tensor, *, k: int) -> Tensor:
    """Keep exactly the k largest logits (all of them if there are fewer than k)."""
    if k >= logits.shape[-1]:
        return logits
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return logits.scatter(-1, order[..., k:], -torch.inf)


def keep_top_p(logits: Tensor, *, p: float) -> Tensor:
    """Keep the smallest set of best tokens whose probability reaches p (nucleus, Holtzman et al. 2020).

    The token that crosses p belongs to the set; p = 1 changes nothing.
    """
    if p >= 1:
        return logits
    order = logits.argsort(dim=-1, descending=True, stable=True)
    mass = logits.gather(-1, order).double().softmax(-1).cumsum(-1)
    # A token is kept while the ones before it have not reached p, so the best one always is.
    reached = torch.zeros_like(mass, dtype=torch.bool)
    reached[..., 1:] = mass[..., :-1] >= p
    return logits.masked_fill(torch.zeros_like(reached).scatter(-1, order, reached), -torch.inf)


def sample(
    logits: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a token id [B] for each row of logits [B, V]; temperature 0 takes the best and draws nothing.

    Ids from `vocab_size` on are padding that no tokenizer can decode: they are never drawn. ValueError
    for logits that are not numbers.
    """
    check_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = logits[..., :vocab_size].double()
    best = logits.amax(dim=-1, keepdim=True)
    if not bool(best.isfinite().all()):
        raise ValueError("the model's logits are not finite numbers: its weights are damaged or diverged")
    if temperature == 0:
        return logits.argmax(dim=-1)  # the first of equals
    logits = (logits - best) / temperature  # shifted first: a tiny temperature gives -inf, never inf - inf
    if top_k is not None:
        logits = keep_top_k(logits, k=top_k)
    logits = keep_top_p(logits, p=top_p)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
