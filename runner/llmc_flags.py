"""The command line of llm.c's train_gpt2cu: its flags, their defaults, and what becomes of each here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple


class Flag(NamedTuple):
    """One flag of llm.c; `here` says what it sets, or why it sets nothing."""

    kind: type
    default: Any
    here: str
    used: bool = True


FLAGS: dict[str, Flag] = {
    "-i": Flag(str, "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", "data.train: glob of shards"),
    "-j": Flag(str, "dev/data/tinyshakespeare/tiny_shakespeare_val.bin", "data.val: glob of shards"),
    "-e": Flag(str, "gpt2_124M_bf16.bin", "model: a .bin to start from, or a descriptor (d12, gpt3:c768)"),
    "-o": Flag(str, None, "run.root/run.name: the run folder itself; without it a new one, no checkpoints"),
    "-lg": Flag(
        int, -1, "evaluate.gpu.every: steps between readings of the GPU's clock and power, -1 = none"
    ),
    "-n": Flag(int, 0, "checkpoint.every: steps between checkpoints, 0 = none"),
    "-nk": Flag(int, 0, "checkpoint.keep: newest checkpoints that stay, 0 = all"),
    "-nm": Flag(int, 0, "checkpoint.major_every: multiples of this step always stay"),
    "-y": Flag(int, None, "checkpoint.resume / run.overwrite: 1 = go on from the newest DONE, 0 = afresh"),
    "-b": Flag(int, 4, "train.micro_batch: sequences per process"),
    "-t": Flag(int, 1024, "train.seq_len"),
    "-d": Flag(int, -1, "train.tokens_per_step: -1 = b x t x processes"),
    "-x": Flag(int, -1, "train.steps: -1 = all training tokens / d"),
    "-k": Flag(str, "cosine", "scheduler: cosine, linear, constant or wsd"),
    "-l": Flag(float, 3e-4, "optimizer.lr: the peak"),
    "-u": Flag(int, 0, "scheduler.warmup_steps"),
    "-q": Flag(float, 1.0, "scheduler.final_frac: of the peak, at the end; 1 = no decay"),
    "-c": Flag(float, 0.0, "optimizer.weight_decay"),
    "-sl": Flag(float, 0.0, "outlier.max_loss_z: 0 = off"),
    "-sg": Flag(float, 0.0, "outlier.max_norm_z: 0 = off"),
    "-v": Flag(int, 20, "evaluate.val.every: steps between validations"),
    "-m": Flag(int, 20, "evaluate.val.batches: of each process; -1 = the whole split"),
    "-s": Flag(int, 20, "evaluate.sample.every: steps between samples, 0 = none"),
    "-g": Flag(int, 64, "evaluate.sample.max_tokens"),
    "-h": Flag(int, 0, "evaluate.hellaswag: 1 = on, if dev/data/hellaswag/hellaswag_val.bin is there"),
    "-a": Flag(int, 0, "1 = train on the first step's batch of the validation data again and again"),
    "-f": Flag(int, 1, "precision.tf32: 0 = off"),
    "-w": Flag(int, 1, "optimizer.master: fp32 copy of bf16 weights"),
    "-ge": Flag(int, -1, "no choice of GELU kernels here", used=False),
    "-z": Flag(int, 0, "parallel=zero1 for 1"),
    "-r": Flag(int, 1, "activations are never recomputed here", used=False),
    "-pn": Flag(int, 1, "parallel.processes: ranks to start here"),
    "-pr": Flag(int, 0, "over several machines start the ranks with torchrun", used=False),
    "-pg": Flag(int, 8, "over several machines start the ranks with torchrun", used=False),
    "-pi": Flag(str, "mpi", "ranks meet through torch.distributed here", used=False),
    "-pm": Flag(str, "mpi", "ranks meet through torch.distributed here", used=False),
    "-ps": Flag(str, "", "ranks meet through torch.distributed here", used=False),
    "-pf": Flag(str, "", "ranks meet through torch.distributed here", used=False),
    "-pp": Flag(str, "", "ranks meet through torch.distributed here", used=False),
}


class Parsed(NamedTuple):
    """A command line: every flag's value, which were given, settings of our own, and what was ignored."""

    values: dict[str, Any]
    given: frozenset[str]
    overrides: tuple[str, ...]
    notes: tuple[str, ...]


def parse(arguments: Sequence[str]) -> Parsed:
    """Read llm.c's flags, and settings of our own (key=value) between them.

    ValueError with one line per argument that is wrong: unlike llm.c, an unknown letter after a flag and a
    number that is none are mistakes.
    """
    values = {name: flag.default for name, flag in FLAGS.items()}
    given: set[str] = set()
    overrides, notes, problems = [], [], []
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        if not name.startswith("-") and "=" in name:
            overrides.append(name)
        elif name not in FLAGS:
            problems.append(_unknown(name))
            if name.startswith("-") and rest and not _is_flag(rest[0]):
                rest.pop(0)
        elif not rest:
            problems.append(f"{name}: needs a value ({FLAGS[name].here})")
        else:
            problems += _take(name, rest.pop(0), values)
            given.add(name)
    for name in FLAGS:
        if name in given and not FLAGS[name].used and not problems:
            notes.append(f"{name} {values[name]} has no effect: {FLAGS[name].here}")
    if problems:
        raise ValueError("\n".join(problems))
    return Parsed(values, frozenset(given), tuple(overrides), tuple(notes))


def _take(name: str, text: str, values: dict[str, Any]) -> list[str]:
    kind = FLAGS[name].kind
    try:
        values[name] = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        return [f"{name} {text}: expected {what} ({FLAGS[name].here})"]
    return []


def _is_flag(text: str) -> bool:
    return text in FLAGS or (text.startswith("-") and not text[1:2].isdigit())


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{name}: not a flag of llm.c's train_gpt2cu{hint} (--help lists them)"


def usage() -> str:
    """Return the table of flags."""
    lines = ["python -m runner.llmc [flags of llm.c's train_gpt2cu] [key=value settings of runner]", ""]
    for name, flag in FLAGS.items():
        default = "" if flag.default is None else f" [{flag.default}]"
        lines.append(f"  {name:<4}{'' if flag.used else '(no effect) '}{flag.here}{default}")
    return "\n".join(lines)
