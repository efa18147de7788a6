"""The loop: what one optimizer step is, and what happens between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from runner.update import update

if TYPE_CHECKING:
    from runner.session import Session


@dataclass(frozen=True)
class Plan:
    """How long to train and how many tokens make one update."""

    steps: Annotated[int, Ge(1)]
    micro_batch: Annotated[int, Ge(1)]
    seq_len: Annotated[int, Ge(1)]
    tokens_per_step: Annotated[int, Ge(1)] | None = None
    world: int = 1

    @property
    def accumulate(self) -> int:
        """Return how many micro-batches each process runs per update."""
        return self.tokens // (self.micro_batch * self.seq_len * self.world)

    @property
    def tokens(self) -> int:
        """Return the tokens of one update over all processes."""
        return self.tokens_per_step or self.micro_batch * self.seq_len * self.world


def train(s: Session) -> float:
    """Run `s` to its last step; return the final validation loss (nats per token)."""
    if s.progress.step == 0:
        evaluate(s, step=0, last=False)
    while s.progress.step < s.plan.steps and not s.progress.stopped:
        step = s.progress.step
        s.watchdog.beat(f"step {step}")

        loss = accumulate_gradients(s)  # data, forward, backward      [] mean over the step
        norm = s.engine.grad_norm()  # global L2                       []
        verdict = s.outlier(loss, norm)  # may this update be applied? [] bool
        lr = s.scheduler(step)  # a pure function of the step
        scale = s.clip(norm)  # in (0, 1]                              []
        s.emit(s.store.before_update())  # a checkpoint that still reads the weights goes first
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
    with s.pace.alone():
        s.inject.step(s.progress.step)
        s.engine.zero_grad()
        for i in range(s.plan.accumulate):
            losses.append(micro_batch(s, last=i == s.plan.accumulate - 1))
    s.engine.finish_gradient_sync()
    s.inject.gradients(s.progress.step, s.engine)
    return s.engine.mean(torch.stack(losses).double().mean()).float()


def micro_batch(s: Session, *, last: bool) -> Tensor:
    """Add one micro-batch's share to the gradient; return its loss []."""
    batch = s.stream.next()
    s.forensics.saw(s.stream)
    s.rng.micro_step()
    with s.engine.micro_batch(last=last):
        with s.autocast():
            loss: Tensor = s.model(batch.inputs, batch.targets)
        loss = s.inject.loss(s.progress.step, loss)
        (loss / s.plan.accumulate).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


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
