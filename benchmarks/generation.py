"""Tokens per second of generation with keys and values kept, against computing every token anew.

    python -m benchmarks.generation

CPU seconds of one thread, the two taking turns; the texts must be the same.
"""

from __future__ import annotations

import time

import torch

from runner.generate import generate
from runner.model.gpt2 import GPT2

ROUNDS, TOKENS = 3, 128


def main() -> None:
    torch.set_num_threads(1)
    model = GPT2(layers=6, heads=6, width=192, max_seq_len=256, vocab_size=257)
    prompt = torch.arange(64)[None]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    written = {}
    for _ in range(ROUNDS):
        for use_cache, taken in seconds.items():
            start = time.process_time()
            written[use_cache] = generate(model, prompt, max_tokens=TOKENS, use_cache=use_cache)
            taken.append(time.process_time() - start)
    assert written[True] == written[False]
    kept, anew = (TOKENS / min(seconds[use_cache]) for use_cache in (True, False))
    print(f"kept {kept:.0f} tokens/s, anew {anew:.0f} tokens/s, ratio {kept / anew:.1f}")


if __name__ == "__main__":
    main()
