"""The models, batches and tokens that every contender trains on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runner.data.shard import layout_for, write_shard

FOLDER = Path(__file__).parent / "scratch"  # tokens and run folders; not kept in git
RUNS = Path(os.environ.get("BENCHMARK_RUNS", FOLDER))  # where a contender may leave what it writes
TOKENS = 4_000_000


class Workload(NamedTuple):
    """A model's shape, and how many tokens it sees in a step."""

    layers: int
    heads: int
    width: int
    seq_len: int
    batch: int
    vocab: int
    kind: str = "gpt2"

    @property
    def parameters(self) -> int:
        """Parameters of the GPT-2 kind, biases left out."""
        matrices = 12 * self.layers * self.width**2
        return matrices + (self.vocab + self.seq_len) * self.width

    @property
    def flops(self) -> float:
        """Floating-point operations of a step: (6N + 6LCT) per token, as llm.c counts them."""
        per_token = 6 * self.parameters + 6 * self.layers * self.width * self.seq_len
        return per_token * self.batch * self.seq_len

    @property
    def feed_forward(self) -> int:
        """Hidden channels of the Llama kind."""
        return 3 * self.width


WORKLOADS = {
    "S": Workload(4, 4, 128, 64, 12, 256),
    "M256": Workload(6, 6, 384, 256, 8, 256),
    "M50k": Workload(6, 6, 384, 256, 8, 50304),
    "L": Workload(12, 12, 768, 256, 1, 50304),
    "L1024": Workload(12, 12, 768, 1024, 1, 50304),
    "llama-S": Workload(4, 4, 128, 64, 12, 256, "llama"),
    "llama-M256": Workload(6, 6, 384, 256, 8, 256, "llama"),
    "tiny": Workload(1, 2, 32, 16, 2, 64),  # to see that everything runs
}


def token_file(vocab: int) -> Path:
    """Return a shard of random tokens with Zipf's frequencies, written at first use."""
    path = FOLDER / f"zipf_{vocab}.bin"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        weights = 1 / np.arange(1, vocab + 1)
        ids = np.random.default_rng(0).choice(vocab, size=TOKENS, p=weights / weights.sum())
        write_shard(path, ids.astype(layout_for(vocab).dtype))
    return path


def overrides(w: Workload, *, precision: str, threads: int, steps: int, root: Path) -> list[str]:
    """Return the runner's command line for a workload; clip and loggers stay at their defaults."""
    tokens = token_file(w.vocab)
    shape = [f"model.layers={w.layers}", f"model.heads={w.heads}", f"model.width={w.width}"]
    kind = ["model=tiny"]
    if w.kind == "llama":
        kind = ["model=llama_tiny", f"model.kv_heads={w.heads}", f"model.feed_forward={w.feed_forward}"]
    return [
        *kind,
        *shape,
        "data=shards",
        *(f"data.{split}={tokens}" for split in ("train", "val")),
        f"data.vocab_size={w.vocab}",
        f"train.micro_batch={w.batch}",
        f"train.seq_len={w.seq_len}",
        f"train.steps={steps}",
        f"precision={precision}",
        f"run.threads={threads}",
        f"run.root={root}",
        "run.plot=false",
        "evaluate=none",
        "checkpoint.every=0",
        "outlier.max_loss_z=8",
        "outlier.max_norm_z=8",
        "logger.wandb.mode=offline",
    ]
