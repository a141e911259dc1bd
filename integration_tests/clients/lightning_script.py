"""A training script of a user of Lightning's Trainer.

It has accumulation of gradients, clipping, mixed precision, a shuffled loader, a schedule, a validation with torchmetrics, loggers,
and checkpoints.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torchmetrics import MetricCollection
from torchmetrics.aggregation import SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from .accelerate_script import ROWS, VOCABULARY, model, samples
from .fabric_script import PRECISIONS
from .plans import plan_of


class OrderOfEpoch(Sampler[int]):
    """A random order for each epoch, which Lightning tells it."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order: list[int] = torch.randperm(
            self.size, generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        return iter(order)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.accuracy = MetricCollection(
            {"accuracy": MulticlassAccuracy(VOCABULARY, average="micro"), "seen": SumMetric()}
        )
        self.confusion = MulticlassConfusionMatrix(VOCABULARY)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train_dataloader(self) -> Any:
        data = samples(16, seed=2)
        return DataLoader(data, batch_size=ROWS, sampler=OrderOfEpoch(len(data)))

    def val_dataloader(self) -> Any:
        return DataLoader(samples(6, seed=3), batch_size=ROWS)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Lightning's checkpoints have no random streams: so that dropout in a resumed run is that of the whole run
        torch.manual_seed(self.global_step)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        self.log("loss", loss, on_step=True)
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.net.transformer.wte.weight.grad
        if gradient is not None:
            self.norms.append(float(gradient.norm()))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        outputs = self.net(**batch)
        guesses, labels = outputs.logits[:, :-1].argmax(-1), batch["labels"][:, 1:]
        self.accuracy["accuracy"].update(guesses, labels)
        self.accuracy["seen"].update(float(labels.numel()))
        self.confusion.update(guesses, labels)
        self.log_dict(self.accuracy)
        self.log("val_loss", outputs.loss)

    def on_validation_epoch_end(self) -> None:
        self.log("confused", self.confusion.compute().float().square().sum())
        self.confusion.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def script(precision: str, folder: Path, resume: Path | None, **options: Any) -> dict[str, Any]:
    """Train for two epochs. `resume`: the folder of a run, to begin with the second epoch from there."""
    torch.manual_seed(1)
    module = Module()
    trainer = Trainer(
        precision=PRECISIONS[precision],
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, monitor="val_loss"),
            LearningRateMonitor(),
        ],
        logger=[CSVLogger(folder, "csv", ""), TensorBoardLogger(folder, "tensorboard", "")],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, ckpt_path=None if resume is None else str(resume / "epoch=0.ckpt"))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    trainer.strategy.barrier()
    logged = list(csv.DictReader((folder / "csv" / "metrics.csv").open()))
    weights = torch.load(folder / "weights.ckpt", weights_only=True)["state_dict"]
    return {
        "losses": module.losses,
        "norms": module.norms,
        "evaluated": [metrics["val_loss"]],
        "metrics": [metrics["accuracy"], metrics["seen"], metrics["confused"]],
        "logged": [float(row["loss"]) for row in logged if row["loss"]],
        "rates": [float(row["lr-AdamW"]) for row in logged if row["lr-AdamW"]],
        "reread": weights["net.transformer.wte.weight"].flatten().tolist(),
    }


def one_device(precision: str, folder: Path) -> dict[str, Any]:
    """The script as its user wrote it, on one device."""
    return script(precision, folder, None, accelerator="cpu", devices=1)


def on_rank(
    rank: int, size: int, plan: str, precision: str, folder: Path, resume: Path | None = None
) -> dict[str, Any]:
    """The same with the lines that make it parallel. It saves into the folder; `resume`: the folder of another run."""
    from meshwright.integrations.lightning import MeshwrightStrategy

    strategy = MeshwrightStrategy(plan_of(plan, size) or None)
    return script(precision, folder, resume, accelerator="cpu", strategy=strategy)
