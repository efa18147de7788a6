"""Peak memory of a step, vocabulary 50257: logits in chunks or all at once, blocks kept or computed again.

    python -m benchmarks.memory

Each contender is a process of its own; its peak resident size, less that of a process with the
same model and no step, is divided by that of the plain one.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

ROWS, SEQ_LEN, VOCAB = 4, 512, 50257
CONTENDERS = {
    "idle": {"step": False},
    "all logits at once": {"kernels": "plain"},
    "logits in chunks of 512": {},
    "chunks, blocks computed again": {"checkpoint": True},
}


def measure(*, step: bool = True, kernels: str = "fast", checkpoint: bool = False) -> float:
    """Return this process's peak resident MiB after one forward and backward pass."""
    import torch

    from runner.blocks import settle_blocks
    from runner.model.gpt2 import GPT2

    torch.set_num_threads(1)
    model = GPT2(
        layers=12,
        heads=4,
        width=256,
        max_seq_len=SEQ_LEN,
        vocab_size=VOCAB,
        kernels=kernels,  # type: ignore[arg-type]
    )
    settle_blocks(model, compile=False, checkpoint=checkpoint)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if step:
        tokens = torch.randint(VOCAB, (ROWS, SEQ_LEN))
        model(tokens, tokens).backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    if len(sys.argv) > 1:
        print(measure(**json.loads(sys.argv[1])))
        return
    peak = {}
    for name, settings in CONTENDERS.items():
        command = [sys.executable, "-m", "benchmarks.memory", json.dumps(settings)]
        peak[name] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    plain = peak["all logits at once"] - peak["idle"]
    for name, mib in peak.items():
        print(f"{name:32} {mib:7.0f} MiB  step {(mib - peak['idle']) / plain:5.2f} of all at once")


if __name__ == "__main__":
    main()
