"""Build every part of a session, in a fixed order, and put it where the last checkpoint left it."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner import __version__, manifest
from runner.api import Engine, Note, Optimizer, RunInfo, Segment, View
from runner.branch import Branch, branch_off
from runner.config import MULTIPLE, build, trusted
from runner.emit import Emitter
from runner.meter import Meter
from runner.precision import Precision
from runner.readback import Readback, Timing
from runner.rng import Generators, ModelRng, seed_everything
from runner.session import Identity, Progress, Session
from runner.stop import Stop
from runner.train import Plan

Config = dict[str, Any]


def open_session(config: Config, *, dir: Path, rank: int, world: int, stop: Stop) -> Session:
    """Return a session that is ready to train: fresh, or restored from the newest intact checkpoint.

    Raises:
        ValueError: one line per reason why this run cannot start or go on in `dir`.
    """
    s = _build(config, dir=dir, rank=rank, world=world, stop=stop)
    restored = s.store.restore(s.snapshot(), overwrite=config["run"]["overwrite"])
    resumed = restored.snapshot is not None
    branch = _branch(config, s) if config["run"]["from"] and not resumed else None
    start = branch.snapshot if branch else restored.snapshot
    changes = _settle_manifest(config, s, step=start.step if start else None, branch=branch)
    if start is not None:
        changes = [*changes, *s.restore(start)]
    s.emitter.open(
        RunInfo(
            name=str(config["run"]["label"] or config["run"]["name"] or dir.name),
            dir=dir,
            config=config,
            manifest=manifest.read(dir) or {},
            start_step=s.progress.step,
            resumed=resumed,
            steps=s.plan.steps,
            group=config["run"]["group"],
            tags=tuple(config["run"]["tags"]),
        )
    )
    at = s.progress.step
    cautions: Sequence[str] = getattr(s.outlier, "warnings", tuple)()
    s.emit([*restored.events, *(Note(at, t) for t in changes), *(Note(at, t, "warning") for t in cautions)])
    s.meter.start()
    return s


def _build(config: Config, *, dir: Path, rank: int, world: int, stop: Stop) -> Session:
    make = functools.partial(build, trust=trusted(config))
    run = config["run"]
    device = choose_device(run["device"], rank=rank)
    plan: Plan = make(config["train"], world=world)
    seed_everything(run["seed"], rank=rank)
    data = make(config["data"])
    precision: Precision = make(config["precision"])
    numbers = precision.apply(device)
    network = make(config["model"], vocab_size=data.vocab_size, max_seq_len=plan.seq_len)
    precision.convert(network, device=device)
    engine: Engine = make(config["parallel"], rank=rank, world=world, device=device)
    model = engine.place(network.to(device=device, dtype=precision.param_dtype(device)))
    rng = ModelRng(device=device, draws=engine.draws_per_micro_step)
    where = {"micro_batch": plan.micro_batch, "seq_len": plan.seq_len, "rank": rank, "world": world}
    meter: Meter = make(
        config["meter"],
        flops_per_token=network.flops_per_token(plan.seq_len),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        dtype="fp32" if numbers["mode"] == "fp32" else "bf16",
        world=world,
    )
    outlier = make(config["outlier"])
    autocast = precision.autocast(device)
    several = {group: {n: make(e) for n, e in (config[group] or {}).items() if e} for group in MULTIPLE}
    return Session(
        dir=dir,
        plan=plan,
        progress=Progress(max_consecutive_skips=outlier.max_consecutive_skips),
        data=data,
        stream=data.train(**where, device=device, seed=run["seed"]),
        model=model,
        engine=engine,
        optimizer=engine.optimizer(functools.partial(_optimizer, make, config["optimizer"], rng)),
        scheduler=make(config["scheduler"]),
        clip=make(config["clip"]),
        outlier=outlier,
        autocast=autocast,
        rng=rng,
        generators=Generators(device=device),
        meter=meter,
        readback=Readback(functools.partial(_timing, meter, plan), device=device),
        evaluators=several["evaluate"],
        view=View(model, engine, data, autocast, plan.micro_batch, plan.seq_len, run["seed"], plan.steps),
        emitter=Emitter(several["logger"] if rank == 0 else {}),
        store=make(config["checkpoint"], dir=dir, rank=rank, any_rank=engine.any, barrier=engine.barrier),
        stop=stop,
        inject=make(config["debug"]),
        identity=_identity(network, numbers, engine, run),
    )


def _branch(config: Config, s: Session) -> Branch:
    """Load the checkpoint of another run that this one starts from."""
    return branch_off(
        config["run"]["from"],
        root=Path(config["run"]["root"]),
        live=s.snapshot(),
        steps=s.plan.steps,
        allow_reshard=s.store.allow_reshard,
        strict_env=s.store.strict_env,
    )


def _settle_manifest(config: Config, s: Session, *, step: int | None, branch: Branch | None) -> Sequence[str]:
    """Write the manifest; on a resume at `step`, compare with the old one and return what changed.

    A branch is compared with the run that it leaves, and has a manifest of its own.

    Raises:
        ValueError: something changed that the run's bits depend on.
    """
    tokenizer = s.data.tokenizer
    new = manifest.collect(
        config,
        data=s.data.fingerprint(),
        tokenizer=tokenizer.name if tokenizer else None,
        parameters=s.engine.weights.numel(),
        world=s.engine.world,
        start_step=step or 0,
    )
    old = manifest.read(branch.source if branch else s.dir) if step is not None else None
    changes = manifest.compare(old, new) if old else manifest.Changes((), ())
    if changes.errors:
        raise ValueError("\n".join(changes.errors))
    if s.engine.rank == 0:
        manifest.write(s.dir, manifest.resumed(old, new) if old and not branch else new)
    return [*(branch.notes if branch else ()), *changes.notes]


def _optimizer(
    make: Callable[..., Any], node: Config, rng: ModelRng, segments: Sequence[Segment]
) -> Optimizer:
    optimizer: Optimizer = make(node, segments=segments, rng=rng)
    return optimizer


def _timing(meter: Meter, plan: Plan, step: int) -> Timing:
    speed = meter.tick(plan.tokens)
    return Timing(tokens=(step + 1) * plan.tokens, **speed._asdict())


def choose_device(name: str, *, rank: int) -> torch.device:
    """Return the device of a rank.

    Raises:
        ValueError: there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"run.device: no device is called {name!r}; use auto, cpu, cuda or cuda:N"
        ) from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"run.device: {name} asked for, but this machine or this torch has no CUDA; use cpu"
            )
        device = torch.device(
            "cuda", rank % torch.cuda.device_count() if device.index is None else device.index
        )
        torch.cuda.set_device(device)
    return device


def _identity(network: nn.Module, numbers: dict[str, str], engine: Engine, run: Config) -> Identity:
    kind = {"GPT2": "gpt2"}.get(type(network).__name__, type(network).__name__.lower())
    header: Any = getattr(network, "header", dict)
    gpu = engine.device.type == "cuda"
    env = {
        "runner": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(engine.device) if gpu else _cpu(),
        "threads": torch.get_num_threads(),
        "precision": numbers["mode"],
        "fp32_matmul": numbers["fp32_matmul"],
        "deterministic": run["deterministic"],
        "world": engine.world,
    }
    return Identity({"kind": kind, **header()}, env)


def _cpu() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
