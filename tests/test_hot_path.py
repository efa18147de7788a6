"""A step on a GPU waits for nothing: run on tensors without values, where any look at one would show.

The meta device takes the paths of a GPU, and an audit of every tensor operation sees what a GPU would pay
for: values read by the host, results whose size depends on values, constants copied to the device.
"""

from __future__ import annotations

import ast
import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner import native
from runner.clip import clip_by_norm
from runner.model.gpt2 import GPT2
from runner.model.llama import Llama
from runner.optimizer.adamw import AdamW
from runner.outlier import Finite, Median, Off, ZScore
from runner.parallel.single import Single
from runner.rng import ModelRng

RUNNER = Path(native.__file__).parent
META = torch.device("meta")
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave"}
SCALARS = ("optimizer/adamw.py", "_scalars")  # a step's 24 bytes of learning rate and corrections


class Audit(TorchDispatchMode):
    """Notes every operation that reads a value, depends on one, or touches host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        mask = name.startswith("index") and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1])
        )
        if name in WAITS or mask or _on_host(args, kwargs):
            self._note(name)
        out = func(*args, **(kwargs or {}))
        if _on_host(out):
            self._note(name)
        return out

    def _note(self, name: str) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(RUNNER))]
        where = (str(Path(frames[-1].filename).relative_to(RUNNER)), frames[-1].name) if frames else ("", "")
        self.found.append((*where, name))


def _on_host(*values: Any) -> bool:
    return any(isinstance(x, Tensor) and x.device.type != "meta" for x in tree_leaves(values))


def gpt2() -> nn.Module:
    return GPT2(layers=2, heads=2, width=64, max_seq_len=16, vocab_size=1000, init_from="nothing")


def llama() -> nn.Module:
    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 64, "feed_forward": 96, "max_seq_len": 16}
    return Llama(**shape, vocab_size=1000, init_from="nothing", z_loss=1e-4, qk_norm=True)


class Step:
    """What the loop does in one step of two micro-batches, from engine to update."""

    def __init__(self, make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
        torch.set_default_dtype(dtype)
        try:
            with META:
                self.model = make()
        finally:
            torch.set_default_dtype(torch.float32)
        self.engine = Single(device=META)
        self.engine.place(self.model)
        self.rng = ModelRng()
        self.rng._on_device = torch.zeros(2, dtype=torch.int64, device=META)
        self.optimizer = self.engine.optimizer(lambda parts: AdamW(parts, lr=1e-3, rng=self.rng))
        robust = ZScore(max_loss_z=3.0, robust=True, window=100)
        self.guards = [ZScore(max_loss_z=3.0, max_norm_z=3.0), robust, Median(), Finite(), Off()]
        self.tokens = torch.zeros(2, 16, dtype=torch.int64, device=META)

    def __call__(self, step: int) -> None:
        losses = []
        for i in range(2):
            if i == 0:
                self.engine.zero_grad()
            self.rng.micro_step()
            with self.engine.micro_batch(last=i == 1):
                loss = self.model(self.tokens, self.tokens)
                (loss / 2).backward()
            losses.append(loss.detach())
        self.engine.finish_gradient_sync()
        loss = self.engine.mean(torch.stack(losses).double().mean()).float()
        norm = self.engine.grad_norm()
        scale = clip_by_norm(norm, max_norm=1.0)
        verdicts = [guard(loss, norm) for guard in self.guards]
        self.optimizer.update(step=step, lr=1e-3, scale=scale, apply=verdicts[0].apply)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_step_reads_no_value_and_copies_nothing_from_the_host(
    make: Callable[[], nn.Module], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "triton_kernels", lambda: None)  # the definitions, which any device runs
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # no such question of meta
    step = Step(make, dtype)
    step(0)  # plans and states come to the device once
    with Audit() as audit:
        step(1)
    assert {found for found in audit.found if found[:2] != SCALARS} == set()


@pytest.mark.parametrize(
    "look",
    [
        lambda x: float(x[0]),
        lambda x: bool(x[0] > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.ones(3).to(META),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_the_audit_sees_what_it_looks_for(look: Callable[[Tensor], Any]) -> None:
    x = torch.zeros(3, device=META)
    with Audit() as audit, contextlib.suppress(RuntimeError, NotImplementedError):
        look(x)
    assert audit.found


# ---------------------------------------------------------------- the source

READS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "synchronize"}
CONSTANTS = {"tensor", "from_numpy", "as_tensor", "pin_memory"}
EACH_STEP = {
    "train.py": {"train", "accumulate_gradients", "micro_batch", "forward_backward", "estimate_curvature"},
    "update.py": {"update"},
    "clip.py": {"clip_by_norm"},
    "outlier.py": {"__call__", "_on_device", "_by_triton", "_non_finite"},
    "zscore_device.py": {"running_z", "two_pass_z", "_mean", "_z", "square_root"},
    "norm.py": {"_sum_by_torch", "_sum_by_triton", "fold", "square_sums"},
    "cuda_graphs.py": {"__call__", "warm_up", "capture"},
    "triton_kernels.py": {"adamw", "block_sums", "draws"},
    "triton_guard.py": {"row_sums", "norm", "clip_factor", "judge_finite", "judge_by_z", "_empty_verdict"},
    "readback.py": {"push"},
    "forensics.py": {"saw", "stepped"},
    "parallel/flat.py": {
        "zero_grad",
        "micro_batch",
        "finish_gradient_sync",
        "grad_norm",
        "_all_sums",
        "mean",
    },
    "parallel/gradient.py": {"clear", "settle", "collect"},
    "parallel/collective.py": {"all_gather", "mean"},
    "rng.py": {"micro_step", "update_on_device", "_draw_by_torch", "_xorshift_on_device"},
}


@pytest.mark.parametrize("name", EACH_STEP)
def test_the_source_of_a_step_reads_nothing_and_makes_no_constant(name: str) -> None:
    functions = [
        node
        for node in ast.walk(ast.parse((RUNNER / name).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name in EACH_STEP[name]
    ]
    assert {function.name for function in functions} == EACH_STEP[name], "renamed: name it here too"
    for function in functions:
        calls = {
            node.func.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        assert not calls & (READS | CONSTANTS), function.name
