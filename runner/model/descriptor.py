"""llm.c's model descriptors: `d12`, `gpt2:d12`, `gpt3:c768`.

Source: llm.c train_gpt2.cu, gpt2_set_hyperparameters and gpt3_set_hyperparameters.
"""

from __future__ import annotations

VOCAB_SIZE = 50257  # the GPT-2 tokenizer's, for both families

# depth -> (channels, heads)
GPT2_SHAPES = {
    6: (384, 6),
    12: (768, 12),
    24: (1024, 16),
    36: (1280, 20),
    48: (1600, 25),
    60: (1920, 30),
    72: (2880, 30),
    84: (3456, 36),
}
# channels -> (depth, channels per head). llm.c also lists 5140, which its own check of divisibility
# by 128 channels per head refuses.
GPT3_SHAPES = {
    384: (6, 64),
    768: (12, 64),
    1024: (24, 64),
    1536: (24, 96),
    2048: (24, 128),
    2560: (32, 80),
    4096: (32, 128),
    12288: (96, 128),
}


def descriptor(text: str) -> dict[str, int]:
    """Return the shape that llm.c's `-e text` builds, as constructor arguments of `GPT2`."""
    if text.startswith("gpt3:c"):
        width = _number(text, prefix="gpt3:c", table=GPT3_SHAPES)
        layers, head_width = GPT3_SHAPES[width]
        return _shape(layers=layers, heads=width // head_width, width=width, max_seq_len=2048)
    prefix = "gpt2:d" if text.startswith("gpt2:d") else "d"
    layers = _number(text, prefix=prefix, table=GPT2_SHAPES)
    width, heads = GPT2_SHAPES[layers]
    return _shape(layers=layers, heads=heads, width=width, max_seq_len=1024)


def _shape(*, layers: int, heads: int, width: int, max_seq_len: int) -> dict[str, int]:
    return {
        "layers": layers,
        "heads": heads,
        "width": width,
        "max_seq_len": max_seq_len,
        "vocab_size": VOCAB_SIZE,
    }


def _number(text: str, *, prefix: str, table: dict[int, tuple[int, int]]) -> int:
    digits = text.removeprefix(prefix)
    if text.startswith(prefix) and digits.isdecimal() and int(digits) in table:
        return int(digits)
    allowed = [f"d{depth}" for depth in GPT2_SHAPES] + [f"gpt3:c{width}" for width in GPT3_SHAPES]
    raise ValueError(
        f"model descriptor {text!r} is unknown; allowed: {', '.join(allowed)}, or a model file (.bin)"
    )
