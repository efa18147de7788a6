"""One rank of the runs that test_parallel compares: started as a program, it saves what it saw."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from runner.optimizer.adamw import AdamW
from runner.parallel.ddp import Ddp
from runner.parallel.flat import Flat
from runner.parallel.single import Single
from runner.parallel.zero1 import Zero1
from runner.rng import ModelRng

C, V = 8, 16
BUCKET_MB = 0.0004  # several buckets even here


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1w = nn.Parameter(torch.ones(C))
        self.fcw = nn.Parameter(torch.randn(4 * C, C) * 0.3)
        self.fcb = nn.Parameter(torch.zeros(4 * C))
        self.fcprojw = nn.Parameter(torch.randn(C, 4 * C) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(
            F.gelu(F.linear(F.layer_norm(x, (C,), self.ln1w), self.fcw, self.fcb)), self.fcprojw
        )


class Tiny(nn.Module):
    """A tied embedding and head, stacked blocks, and a parameter that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(C, V, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(C, C, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


class Run:
    """A short training in which micro-batch j of a step goes to rank j % world at micro-step j // world."""

    def __init__(self, engine: Flat, *, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(5 + engine.rank)  # rank 0's weights must win
        self.engine = engine
        self.model = engine.place(Tiny().to(dtype))
        self.rng = ModelRng(draws=engine.draws_per_micro_step)
        self.optimizer = engine.optimizer(lambda segments: AdamW(segments, lr=1e-2, rng=self.rng))
        self.norms: list[float] = []
        self.losses: list[float] = []

    def steps(self, first: int, end: int, *, micro_batches: int = 4) -> Run:
        for step in range(first, end):
            self._step(step, micro_batches=micro_batches)
        return self

    def _step(self, step: int, *, micro_batches: int) -> None:
        engine = self.engine
        accumulate = micro_batches // engine.world
        engine.zero_grad()
        total = torch.zeros(())
        for i in range(accumulate):
            self.rng.micro_step()
            generator = torch.Generator().manual_seed(100 * step + i * engine.world + engine.rank)
            tokens = torch.randint(V, (2, 6), generator=generator)
            with engine.micro_batch(last=i == accumulate - 1):
                loss = self.model(tokens)
                (loss / accumulate).backward()
            total += loss.detach() / accumulate
        engine.finish_gradient_sync()
        self.losses.append(float(engine.mean(total)))
        norm = engine.grad_norm()
        self.norms.append(float(norm))
        apply = torch.tensor(step != 2)  # one step is skipped
        self.optimizer.update(step=step, lr=1e-2, scale=torch.clamp(1 / norm, max=1.0), apply=apply)

    def seen(self) -> dict[str, Any]:
        state = {name: tensor.clone() for name, tensor in self.optimizer.state_dict().items()}
        return {
            "weights": self.engine.weights.clone(),
            "gradient": self.engine.gradient.clone(),
            "norms": self.norms,
            "losses": self.losses,
            "state": state,
            "rng": self.rng.state_dict(),
            "layout": self.engine.layout,
            "adds_in": self.engine.adds_in,
        }

    def resumed(self, engine: Flat) -> Run:
        """Return a new run on `engine` that starts from the state of this one."""
        seen = self.seen()
        other = Run(engine, dtype=self.engine.weights.dtype)
        engine.weights.copy_(seen["weights"])
        other.optimizer.load_state_dict(seen["state"])
        other.rng.load_state_dict(seen["rng"])
        other.norms, other.losses = list(self.norms), list(self.losses)
        return other


def engines(rank: int, world: int) -> dict[str, Callable[[], Flat]]:
    where = {"rank": rank, "world": world, "device": torch.device("cpu")}
    if world == 1:
        return {
            "ddp-native": lambda: Single(**where),
            "ddp-sent": lambda: Single(**where),
            "ddp-canonical": lambda: Single(reduce="canonical", **where),
            "zero1-native": lambda: Zero1(bucket_mb=BUCKET_MB, **where),
            "zero1-canonical": lambda: Zero1(reduce="canonical", bucket_mb=BUCKET_MB, **where),
        }
    kinds = {"ddp": Ddp, "zero1": Zero1}
    sent = {"ddp-sent": lambda: Ddp(shared_memory="off", bucket_mb=BUCKET_MB, **where)}
    return sent | {
        f"{name}-{reduce}": lambda kind=kind, reduce=reduce: kind(reduce=reduce, bucket_mb=BUCKET_MB, **where)
        for name, kind in kinds.items()
        for reduce in ("native", "canonical")
    }


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world
        )
    seen: dict[str, Any] = {}
    for name, make in engines(rank, world).items():
        seen[name] = Run(make()).steps(0, 5).seen()
        half = Run(make(), dtype=torch.bfloat16).steps(0, 3)  # stops right after the skipped step
        seen[f"{name}-bf16-resumed"] = half.resumed(make()).steps(3, 5).seen()
        seen[f"{name}-bf16"] = half.steps(3, 5).seen()
        seen[f"{name}-resumed"] = Run(make()).steps(0, 2).resumed(make()).steps(2, 5).seen()
        if world <= 2 and "canonical" in name:
            seen[f"{name}-6"] = Run(make()).steps(0, 3, micro_batches=6).seen()
    engine = make()
    seen["mean"] = engine.mean(torch.tensor(0.1 * (rank + 1)))
    seen["any"] = [engine.any(rank == world - 1), engine.any(False)]
    engine.barrier()
    torch.save(seen, folder / f"seen-{world}-{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
