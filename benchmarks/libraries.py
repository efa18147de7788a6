"""Trainers of other libraries on the same workloads; optional."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor

from benchmarks.bare import PlainModel, decayed, random_windows
from benchmarks.gate import Gate
from benchmarks.workloads import RUNS, Workload

STEPS = 10_000_000


class _Windows(torch.utils.data.IterableDataset[Any]):
    """Whole batches, for trainers that are told not to make their own."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self._batch = random_windows(w)

    def __iter__(self) -> Any:
        while True:
            yield self._batch()


def lightning(w: Workload, *, bf16: bool) -> None:
    """Run Lightning's Trainer without what can be turned off: checkpoints, bars, summaries."""
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger

    gate = Gate()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = PlainModel(w)

        def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
            loss = self.model(*batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(decayed(self.model), lr=6e-4, betas=(0.9, 0.95), fused=True)

    class Passing(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            gate()

    RUNS.mkdir(parents=True, exist_ok=True)
    trainer = L.Trainer(
        accelerator="cpu",
        precision="bf16-mixed" if bf16 else "32-true",
        max_steps=STEPS,
        gradient_clip_val=None,  # refused with a fused optimizer; the clip is the cheapest part
        logger=CSVLogger(tempfile.mkdtemp(dir=RUNS)),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Passing()],
    )
    loader = torch.utils.data.DataLoader(_Windows(w), batch_size=None)
    trainer.fit(Module(), loader)


def hf(w: Workload, *, bf16: bool) -> None:
    """Run transformers' Trainer on its own GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    gate = Gate()
    draw = random_windows(w)

    class Samples(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                for row in draw()[0]:
                    yield {"input_ids": row, "labels": row}

    class Passing(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate()

    shape = {"n_layer": w.layers, "n_head": w.heads, "n_embd": w.width, "n_positions": w.seq_len}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=w.vocab, **shape, **dropout)
    RUNS.mkdir(parents=True, exist_ok=True)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=RUNS),
        per_device_train_batch_size=w.batch,
        max_steps=STEPS,
        learning_rate=6e-4,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=bf16,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = GPT2LMHeadModel(config)
    Trainer(model=model, args=arguments, train_dataset=Samples(), callbacks=[Passing()]).train()
