"""The runner's kernels in a bare loop: what a step costs without the runner around it."""

from __future__ import annotations

import contextlib

import torch

from benchmarks.gate import Gate
from benchmarks.workloads import Workload, token_file
from runner.data.shard import ShardReader, read_header
from runner.data.stream import Shape, ShardSource
from runner.job import keep_freed_memory
from runner.model.gpt2 import GPT2
from runner.model.llama import Llama
from runner.optimizer.adamw import AdamW
from runner.parallel.flat import Flat
from runner.precision import Precision
from runner.rng import ModelRng


def build(w: Workload) -> torch.nn.Module:
    """Return the runner's model of a workload."""
    shape = {"layers": w.layers, "heads": w.heads, "width": w.width}
    sizes = {"max_seq_len": w.seq_len, "vocab_size": w.vocab}
    if w.kind == "gpt2":
        return GPT2(**shape, **sizes)
    return Llama(**shape, **sizes, kv_heads=w.heads, feed_forward=w.feed_forward)


def kernels_loop(w: Workload, *, threads: int, bf16: bool) -> None:
    """Train for ever: batch, forward, backward, norm, clip, update, a line."""
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False
    keep_freed_memory()
    cpu = torch.device("cpu")
    Precision(mode="bf16" if bf16 else "fp32").apply(cpu)
    gate = Gate()
    engine = Flat(rank=0, world=1, device=cpu)
    model = engine.place(build(w))
    optimizer = AdamW(engine.segments(), lr=3e-4, rng=ModelRng())
    source = ShardSource(
        ShardReader([read_header(token_file(w.vocab))]), Shape(w.batch, w.seq_len), shuffle=True
    )
    one, apply = torch.ones(()), torch.tensor(True)
    step = 0
    while True:
        inputs, targets = torch.from_numpy(source.take())
        engine.zero_grad()
        with engine.micro_batch(last=True):
            with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else contextlib.nullcontext():
                loss = model(inputs, targets)
            loss.backward()
        norm = engine.grad_norm()
        optimizer.update(step=step, lr=3e-4, scale=one / norm if norm > 1 else one, apply=apply)
        print(f"{step} {loss.item():.4f} {norm.item():.4f}")
        step += 1
        gate()
