"""The loop: what one optimizer step is, and what happens between steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from runner.api import Batch
from runner.update import update

if TYPE_CHECKING:
    from runner.session import Session

MicroBatch = Annotated[int, Ge(1)] | Literal["auto"]


@dataclass(frozen=True)
class Plan:
    """How long to train and how many tokens make one update."""

    steps: Annotated[int, Ge(1), Le(99999999)]  # the names of checkpoints have eight digits
    micro_batch: MicroBatch
    seq_len: Annotated[int, Ge(1)]
    tokens_per_step: Annotated[int, Ge(1)] | None = None
    checkpoint_blocks: bool = False
    world: int = 1

    @property
    def rows(self) -> int:
        """Return the sequences of one forward pass of a process."""
        assert isinstance(self.micro_batch, int), "auto is settled before a plan is used"
        return self.micro_batch

    @property
    def accumulate(self) -> int:
        """Return how many micro-batches each process runs per update."""
        passes, rest = divmod(self.tokens, self.rows * self.seq_len * self.world)
        assert rest == 0 < passes, f"{self} cannot train on {self.tokens} tokens per step"
        return passes

    @property
    def tokens(self) -> int:
        """Return the tokens of one update over all processes."""
        return self.tokens_per_step or self.rows * self.seq_len * self.world


def train(s: Session) -> float:
    """Run `s` to its last step; return the final validation loss (nats per token)."""
    s.progress.stopped = s.engine.any(s.stop.requested)  # during the start
    if s.progress.step == 0 and not s.progress.stopped:
        evaluate(s, step=0, last=False)
        s.progress.stopped = s.engine.any(s.stop.requested)
    while s.progress.step < s.plan.steps and not s.progress.stopped:
        step = s.progress.step
        s.watchdog.beat(f"step {step}")

        if s.curvature.due(step):  # second-order optimizers only
            estimate_curvature(s)
        loss = accumulate_gradients(s)  # data, forward, backward      [] mean over the step
        norm = s.engine.grad_norm()  # global L2                       []
        verdict = s.outlier(loss, norm)  # may this update be applied? [] bool
        lr = s.scheduler(step)  # a pure function of the step
        scale = s.clip(norm)  # in (0, 1]                              []
        s.finish_save()  # a checkpoint that still reads the weights goes first
        update(s.optimizer, step=step, lr=lr, scale=scale, apply=verdict.apply)

        s.forensics.stepped(step)
        s.readback.push(step, lr, loss, norm, scale, verdict)  # copies start; nobody waits
        s.emit(s.readback.ready())  # whatever has arrived by now
        s.emit(s.pace.due(step))

        s.progress.step = step = step + 1
        last = step == s.plan.steps
        evaluate(s, step=step, last=last)
        s.progress.stopped = s.engine.any(s.stop.requested)
        if s.store.due(step, last=last) or s.progress.stopped:
            s.save()
    s.emit([*s.readback.drain(), *s.store.join()])
    return s.progress.val_loss


def accumulate_gradients(s: Session) -> Tensor:
    """Leave the mean gradient of one step in the engine; return the mean loss [] over all ranks."""
    losses = []
    share = s.plan.accumulate
    with s.pace.alone():
        s.inject.step(s.progress.step)
        for i in range(share):
            losses.append(micro_batch(s, first=i == 0, last=i == share - 1))
    s.engine.finish_gradient_sync()
    s.inject.gradients(s.progress.step, s.engine)
    mean = torch.stack(losses).double().mean() if share > 1 else losses[0]
    return s.engine.mean(mean).float()


def micro_batch(s: Session, *, first: bool, last: bool) -> Tensor:
    """Add one micro-batch's share to the gradient, which the first begins; return its loss []."""
    batch = s.stream.next()
    s.forensics.saw(s.stream)
    s.rng.micro_step()
    run = functools.partial(forward_backward, s)
    return run(batch, first=first, last=last) if s.graphs is None else s.graphs(run, batch, first=first)


def forward_backward(s: Session, batch: Batch, *, first: bool, last: bool) -> Tensor:
    """Run one pass; this is all that a CUDA graph holds."""
    if first:
        s.engine.zero_grad()
    share = s.plan.accumulate
    with s.engine.micro_batch(last=last):
        with s.autocast():
            loss: Tensor = s.model(batch.inputs, batch.targets)
        loss = s.inject.loss(s.progress.step, loss)
        (loss / share if share > 1 else loss).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def estimate_curvature(s: Session) -> None:
    """Show the optimizer the gradient of one more micro-batch with labels that the model draws itself."""
    s.engine.zero_grad()
    batch = s.stream.next()
    with s.engine.micro_batch(last=True):
        with s.autocast():
            loss = s.model(batch.inputs, s.curvature.draw_labels(s.model, batch.inputs))
        loss.backward()
    s.engine.finish_gradient_sync()
    samples = batch.inputs.numel() * s.plan.world
    s.finish_save()  # the estimate belongs to the optimizer's state
    s.curvature.observe(samples=samples, apply=torch.isfinite(s.engine.grad_norm()))


def evaluate(s: Session, *, step: int, last: bool) -> None:
    """Run the evaluators that are due after `step` updates; they leave no trace in the training state."""
    due = {n: e for n, e in s.evaluators.items() if e.every and (step % e.every == 0 or last)}
    if not due:
        return
    s.emit(s.readback.drain())
    with s.meter.pause(), torch.no_grad(), s.generators.untouched():
        s.model.eval()
        for name, evaluator in due.items():
            s.watchdog.beat(f"evaluate.{name} at step {step}")
            s.emit(evaluator(s.view, step))
        s.model.train()
