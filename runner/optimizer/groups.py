"""Say what each parameter is for, so that weight decay and matrix optimizers pick theirs by name.

Decay follows the role, never the number of dimensions: the layers of a bias are stacked to a 2-D
slot here, and "decay what is 2-D" would decay it.
"""

from __future__ import annotations

from typing import get_args

from torch import nn

from runner.api import Role

DECAYED: frozenset[Role] = frozenset({"matrix", "embedding", "head"})
"""Roles that weight decay applies to (llm.c: wte, wpe, qkvw, attprojw, fcw, fcprojw)."""

_LLMC: dict[str, Role] = {
    "wte": "embedding",
    "wpe": "embedding",
    "qkvw": "matrix",
    "attprojw": "matrix",
    "fcw": "matrix",
    "fcprojw": "matrix",
}
_EMBEDDING_NAMES = ("embed", "embedding", "embeddings", "wte", "wpe", "tok_emb", "pos_emb", "embed_tokens")
_HEAD_NAMES = ("head", "lm_head", "output", "unembed")


def roles_of(model: nn.Module) -> dict[str, Role]:
    """Return the role of every distinct parameter by name.

    A model's own `roles` mapping (parameter name, or its last part, to role) wins over the rules.
    Raises ValueError for an entry that names no role.
    """
    declared = dict(getattr(model, "roles", None) or {})
    allowed = get_args(Role)
    for name, role in declared.items():
        if role not in allowed:
            raise ValueError(
                f"model.roles[{name!r}]: {role!r} is not a role; use one of {', '.join(allowed)}"
            )
    modules = dict(model.named_modules())
    roles: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        if name in declared or leaf in declared:
            roles[name] = declared[name] if name in declared else declared[leaf]
        else:
            roles[name] = _role(modules[path], path=path, leaf=leaf, ndim=parameter.ndim)
    return roles


def _role(owner: nn.Module, *, path: str, leaf: str, ndim: int) -> Role:
    if leaf in _LLMC:
        return _LLMC[leaf]
    if ndim < 2:
        return "vector"
    names = {path.rpartition(".")[2], leaf}
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or names & set(_EMBEDDING_NAMES):
        return "embedding"
    if names & set(_HEAD_NAMES):
        return "head"
    return "matrix"
