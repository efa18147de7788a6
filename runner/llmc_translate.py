"""What the flags of llm.c's train_gpt2cu mean as settings of this package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from runner.checkpoint.folder import done_steps
from runner.data.shard import Shard, inspect_shards
from runner.llmc_flags import Parsed
from runner.llmc_model import Model, model_of, quoted

HELLASWAG = Path("dev/data/hellaswag/hellaswag_val.bin")  # fixed in llm.c
_SCHEDULERS = ("cosine", "linear", "constant", "wsd")


class Batch(NamedTuple):
    """The first tokens of a shard, to be written as a shard of their own."""

    source: Shard
    tokens: int
    path: Path


class Translation(NamedTuple):
    """The equivalent settings, what a person should know about them, and a batch to write first."""

    overrides: tuple[str, ...]
    notes: tuple[str, ...]
    batch: Batch | None = None


def translate(parsed: Parsed) -> Translation:
    """Return the settings that mean what the flags mean.

    ValueError, one line per problem, for what llm.c would abort on or what cannot be done here.
    """
    values = parsed.values
    notes = list(parsed.notes)
    model = model_of(values["-e"], given="-e" in parsed.given)
    notes += [model.note] if model.note else []
    batch = _one_batch(values) if values["-a"] == 1 else None
    overrides = [
        *model.settings,
        *_data(values, model, batch),
        *_train(values),
        *_optimizer(values, notes),
        *_precision(values, model),
        *_parallel(values),
        *_checkpoints(values, parsed.given),
        *_evaluations(values, model, notes),
        "logger=[llmc,console,jsonl]",
        "logger.console.style=llmc",
        "run.plot=false",
    ]
    return Translation((*overrides, *parsed.overrides), tuple(notes), batch)


# ---------------------------------------------------------------- data


def _data(values: dict[str, Any], model: Model, batch: Batch | None) -> Iterator[str]:
    train, order = values["-i"], "shuffle"
    if batch is not None:
        train, order = str(batch.path), "sequential"
    yield "data=shards"
    yield f"data.train={quoted(train)}"
    yield f"data.val={quoted(values['-j'])}"
    yield f"data.vocab_size={model.vocab_size}"
    yield f"data.order={order}"
    if model.vocab_size == 50257:
        yield "data.tokenizer=gpt2"


def _one_batch(values: dict[str, Any]) -> Batch:
    """Say which tokens -a 1 repeats: the first step's of the validation data, which is smaller."""
    if values["-o"] is None:
        raise ValueError("-a 1: needs a folder for the batch that is repeated; give -o")
    tokens = max(values["-d"], values["-b"] * values["-t"] * values["-pn"]) + 1
    first = _shards(values["-j"], "-j")[0]
    if first.tokens < tokens:
        raise ValueError(f"-a 1: {first.path} has {first.tokens} tokens, a step takes {tokens}; lower -d")
    return Batch(first, tokens, Path(values["-o"]) / "one_batch.bin")


def _shards(pattern: str, flag: str) -> list[Shard]:
    shards, problems = inspect_shards(pattern, key=flag)
    if problems:
        raise ValueError("\n".join(problems))
    return shards


# ---------------------------------------------------------------- training


def _train(values: dict[str, Any]) -> Iterator[str]:
    per_pass = values["-b"] * values["-t"] * values["-pn"]
    if min(values["-b"], values["-t"], values["-pn"]) < 1:
        raise ValueError(f"-b {values['-b']} -t {values['-t']} -pn {values['-pn']}: each must be at least 1")
    per_step = per_pass if values["-d"] == -1 else values["-d"]
    if per_step < 1 or per_step % per_pass:
        raise ValueError(f"-d {per_step}: must be a multiple of b x t x processes = {per_pass}")
    steps = values["-x"]
    if steps == -1:
        steps = sum(shard.tokens for shard in _shards(values["-i"], "-i")) // per_step
    if steps < 1:
        raise ValueError(f"-x {values['-x']}: makes {steps} steps, there is nothing to train")
    yield f"train.steps={steps}"
    yield f"train.micro_batch={values['-b']}"
    yield f"train.seq_len={values['-t']}"
    if per_step != per_pass:
        yield f"train.tokens_per_step={per_step}"


def _optimizer(values: dict[str, Any], notes: list[str]) -> Iterator[str]:
    yield f"optimizer.lr={values['-l']}"
    yield f"optimizer.weight_decay={values['-c']}"
    kind = values["-k"]
    if kind not in _SCHEDULERS:
        raise ValueError(f"-k {kind}: unknown schedule; llm.c has {', '.join(_SCHEDULERS)}")
    yield f"scheduler={kind}"
    if kind == "constant":
        if values["-u"]:
            notes.append(f"-u {values['-u']} has no effect: llm.c's constant schedule has no warmup")
        yield "scheduler.warmup_steps=0"
    else:
        yield f"scheduler.warmup_steps={values['-u']}"
        yield f"scheduler.final_frac={values['-q']}"
    yield "clip.max_norm=1.0"
    if values["-sl"] or values["-sg"]:
        yield f"outlier.max_loss_z={values['-sl']}"
        yield f"outlier.max_norm_z={values['-sg']}"


def _precision(values: dict[str, Any], model: Model) -> Iterator[str]:
    """llm.c's build decides: bf16 by default, fp32 on a CPU. A .bin says what it was made by."""
    bf16 = Path("/dev/nvidia0").exists() if model.bf16 is None else model.bf16
    yield "precision=bf16_master" if bf16 else "precision=fp32"
    if bf16 and not values["-w"]:
        yield "optimizer.master=false"
    if not values["-f"]:
        yield "precision.tf32=false"


def _parallel(values: dict[str, Any]) -> Iterator[str]:
    if values["-z"] not in (0, 1):
        raise ValueError(f"-z {values['-z']}: llm.c has ZeRO stages 0 and 1; for more use parallel=fsdp")
    if values["-pn"] > 1:
        yield "parallel=zero1" if values["-z"] else "parallel=ddp"
        yield f"parallel.processes={values['-pn']}"
    elif values["-z"] and "WORLD_SIZE" in os.environ:
        yield "parallel=zero1"


# ---------------------------------------------------------------- checkpoints and evaluation


def _checkpoints(values: dict[str, Any], given: frozenset[str]) -> Iterator[str]:
    folder = values["-o"]
    if folder is None:
        if values["-y"]:
            raise ValueError("-y 1: there is no folder to go on from; give -o")
        yield "checkpoint.every=0"
        return
    path = Path(folder).absolute()
    done = done_steps(path)
    if done and "-y" not in given:
        raise ValueError(
            f"-o {folder}: holds checkpoints up to step {done[-1]}; -y 1 goes on there, -y 0 deletes them"
        )
    parent = (
        path.parent if Path(folder).is_absolute() or path.name != Path(folder).name else Path(folder).parent
    )
    yield f"run.root={quoted(str(parent))}"
    yield f"run.name={quoted(path.name)}"
    yield f"checkpoint.every={max(0, values['-n'])}"
    if values["-nk"] > 0:
        yield f"checkpoint.keep={values['-nk']}"
    if values["-nm"] > 0:
        yield f"checkpoint.major_every={values['-nm']}"
    yield "checkpoint.format=llmc"
    if values["-y"] == 0:
        yield "run.overwrite=true"
    elif values["-y"]:
        yield "checkpoint.resume=auto"


def _evaluations(values: dict[str, Any], model: Model, notes: list[str]) -> Iterator[str]:
    chosen = {"val": values["-v"]}
    if values["-v"] < 1:
        raise ValueError(f"-v {values['-v']}: must be at least 1 (llm.c divides by it)")
    if values["-s"] > 0:
        chosen["sample"] = values["-s"]
        if model.vocab_size != 50257:
            del chosen["sample"]
            notes.append(f"no samples: no tokenizer is known for a vocabulary of {model.vocab_size}")
    if values["-lg"] > 0:
        chosen["gpu"] = values["-lg"]
    if values["-h"]:
        if HELLASWAG.exists():
            chosen["hellaswag"] = values["-v"]
        else:
            notes.append(
                f"-h 1 has no effect: {HELLASWAG} is not here (llm.c's dev/data/hellaswag.py writes it)"
            )
    yield f"evaluate=[{','.join(chosen)}]"
    yield from (f"evaluate.{name}.every={every}" for name, every in chosen.items())
    yield f"evaluate.val.batches={_val_batches(values)}"
    if "sample" in chosen:
        yield f"evaluate.sample.max_tokens={values['-g']}"
        yield "evaluate.sample.temperature=1.0"


def _val_batches(values: dict[str, Any]) -> int:
    """Return the batches of all ranks together: llm.c's -m counts those of each."""
    steps: int = values["-m"]
    if steps == -1:
        per_pass: int = values["-b"] * values["-t"] * values["-pn"]
        steps = max(1, sum((shard.tokens - 1) // per_pass for shard in _shards(values["-j"], "-j")))
    if steps < 1:
        raise ValueError(f"-m {steps}: must be at least 1, or -1 for the whole split")
    ranks: int = values["-pn"]
    return steps * ranks
