"""Open a session: build its parts, then put them where the last checkpoint left them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from runner import manifest
from runner.api import Event, Note, RunInfo, Slot
from runner.assembly import Process, assemble_session
from runner.branch import Branch, branch_off
from runner.evaluate import Validation
from runner.micro_batch import settle_micro_batch
from runner.session import Session
from runner.stale import remove_records, unwritten_records

Config = dict[str, Any]

_UNCOMPARED = (
    f"{manifest.FILE_NAME} is not there: what has changed in model, optimizer, data or precision since the "
    "checkpoint was written could not be compared"
)


class _Start(NamedTuple):
    """How a session begins: afresh, as the continuation of a run, or as a branch of another one."""

    manifest: Config
    resumed: bool
    events: tuple[Event, ...]


def open_session(config: Config, *, dir: Path, process: Process) -> Session:
    """Return a session that is ready to train: fresh, or restored from the newest intact checkpoint.

    Raises:
        ValueError: one line per reason why this run cannot start or go on in `dir`.
    """
    run, given = config["run"], config
    config = settle_micro_batch(config, dir=dir, device=process.device, world=process.world)
    s = assemble_session(config, dir=dir, process=process)
    start = _settle_start(config, s)
    s.forensics.rewind(s.progress.step if start.resumed else 0)
    s.emitter.open(
        RunInfo(
            name=str(run["label"] or run["name"] or dir.name),
            dir=dir,
            config=config,
            manifest=start.manifest,
            start_step=s.progress.step,
            resumed=start.resumed,
            steps=s.plan.steps,
            group=run["group"],
            tags=tuple(map(str, run["tags"])),
        )
    )
    _settle_records(s, resumed=start.resumed)
    at = s.progress.step
    cautions = [*getattr(s.outlier, "warnings", tuple)(), *s.store.warnings(), *_rate_caution(config, s)]
    cautions += [*_losses_caution(s), *_validation_cautions(given, s)]
    s.emit([*start.events, *(Note(at, text, "warning") for text in cautions)])
    s.meter.start()
    return s


def _settle_records(s: Session, *, resumed: bool) -> None:
    """Let no record of an earlier start pass for one of this."""
    if s.engine.rank != 0:
        return
    written, at = s.emitter.loggers.keys(), s.progress.step
    if not resumed:
        remove_records(s.dir, written=written)
    elif at < s.plan.steps:
        lines = unwritten_records(s.dir, written=written, start_step=at)
        s.emit([Note(at, text, "warning") for text in lines])


def _settle_start(config: Config, s: Session) -> _Start:
    """Restore what there is to restore, after comparing manifests; write this session's own."""
    overwrite = config["run"]["overwrite"]
    now = _manifest(config, s)
    goes_on = s.store.resumes(overwrite=overwrite)
    before = manifest.read(s.dir) if goes_on else None
    notes = _changes(before, now)
    if before:
        _refuse_another_start(before["config"], config)
    branch = None
    if config["run"]["from"] and not goes_on:  # before an overwrite removes what a mistake here would cost
        branch = _branch(config, s)
        notes = [*branch.notes, *_changes(manifest.read(branch.source), now)]
    restored = s.store.restore(s.snapshot(), overwrite=overwrite)
    found = branch.snapshot if branch is not None else restored.snapshot
    missing = s.restore(found) if found is not None else []
    if before is not None and s.progress.step >= s.plan.steps:
        # Nothing will be trained: what was changed is no setting of this run.
        return _Start(before, True, restored.events)
    notes += missing
    now["sessions"][-1]["start_step"] = s.progress.step
    if s.engine.rank == 0:
        manifest.write(s.dir, manifest.resumed(before, now) if before else now)
    events = (*restored.events, *(Note(s.progress.step, text) for text in notes))
    if goes_on and before is None and found is not None and found.parts:  # llm.c's own have no manifest
        events = (*events, Note(s.progress.step, _UNCOMPARED, "warning"))
    return _Start(now, restored.snapshot is not None, events)


def _changes(before: Config | None, now: Config) -> list[str]:
    """Return what changed since, one line each.

    Raises:
        ValueError: something changed that the bits of the run depend on.
    """
    changes = manifest.compare(before, now) if before else manifest.Changes((), ())
    if changes.errors:
        raise ValueError("\n".join(changes.errors))
    return list(changes.notes)


def _refuse_another_start(before: Config, config: Config) -> None:
    """Refuse a `run.from` that would be ignored, since the run goes on from its own checkpoint."""
    was, now = before.get("run", {}).get("from"), config["run"]["from"]
    if now is not None and now != was:
        raise ValueError(
            f"run.from: {was or 'null'} -> {now} may not change in a resumed run, which goes on from its own "
            "checkpoint; leave it out, choose another run.name, or start again with run.overwrite=true"
        )


def _branch(config: Config, s: Session) -> Branch:
    """Load the checkpoint of another run that this one starts from."""
    branch = branch_off(
        config["run"]["from"],
        root=Path(config["run"]["root"]),
        live=s.snapshot(),
        steps=s.plan.steps,
        allow_reshard=s.store.allow_reshard,
        strict_env=s.store.strict_env,
    )
    if branch.source == s.dir.resolve():
        raise ValueError(
            f"run.from={config['run']['from']}: that is this run itself, which run.overwrite=true empties; "
            "choose another run.name"
        )
    return branch


def _rate_caution(config: Config, s: Session) -> list[str]:
    """Warn of the default model's learning rate on a model that it would destroy."""
    lr, parameters = config["optimizer"].get("lr"), count_parameters(s.engine.layout)
    if not isinstance(lr, float | int) or lr < 2e-3 or parameters < 20_000_000:
        return []
    return [
        f"optimizer.lr={lr:g} is high for {parameters / 1e6:.0f}M parameters: "
        "6e-4 is usual at 125M, 2e-4 at 1.3B (GPT-3, table 2.1)"
    ]


def _losses_caution(s: Session) -> list[str]:
    """Warn of evaluators whose losses no record can tell apart."""
    names = [f"evaluate.{name}" for name, one in s.evaluators.items() if isinstance(one, Validation)]
    if len(names) < 2:
        return []
    return [
        f"{' and '.join(names)} both write the validation loss: the tel lines of main.log, val/loss and the "
        "best loss mix them; keep one of them"
    ]


def _validation_cautions(given: Config, s: Session) -> list[str]:
    """Warn of a validation set that is trained on, or whose size the machine's memory decides."""
    used = {name: e for name, e in s.evaluators.items() if isinstance(e, Validation)}
    lines = list(getattr(s.data, "warnings", list)()) if used else []
    for name, e in used.items():
        if given["train"]["micro_batch"] == "auto" and e.tokens is None:
            same = f"evaluate.{name}.tokens={e.batches * s.plan.rows * s.plan.seq_len}"
            lines.append(
                f"evaluate.{name}.batches={e.batches}: with train.micro_batch=auto the memory decides on how "
                f"many tokens the loss is measured; {same} would be the same ones everywhere"
            )
    return lines


def count_parameters(layout: Sequence[Slot]) -> int:
    """Return the parameters of a model, wherever they are."""
    return sum(slot.numel for slot in layout)


def _manifest(config: Config, s: Session) -> Config:
    tokenizer = s.data.tokenizer
    return manifest.collect(
        config,
        data=s.data.fingerprint(),
        tokenizer=tokenizer.name if tokenizer else None,
        parameters=count_parameters(s.engine.layout),
        world=s.engine.world,
    )
