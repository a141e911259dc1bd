"""A script of Lightning's Trainer trains to the numbers of one device, and resumes from any checkpoint of either."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

from .plans import LIMITS, PLANS, check, gap

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler

from .accelerate_script import ROWS, model, samples
from .lightning_script import Module, on_rank, one_device

pytestmark = pytest.mark.filterwarnings("ignore")

# precision, plan (None: plain Lightning on one device), and the plan of the run that goes on from its checkpoint
CASES = [("no", None, "pp2"), ("bf16", "zero3", "tp2")]
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


@pytest.mark.parametrize(("precision", "plan", "later"), CASES)
def test_lightning_has_the_numbers_of_one_device(
    rank_pool: RankPool, tmp_path: Path, precision: str, plan: str | None, later: str
) -> None:
    exact, limit, start = one_device(precision, tmp_path / "one"), LIMITS[precision], tmp_path / "one"
    if plan is not None:
        start = tmp_path / "start"
        check(rank_pool.run(2, on_rank, plan, precision, start), exact, limit)
    resumed = rank_pool.run(2, on_rank, later, precision, tmp_path / "later", start)
    assert len(resumed[0]["losses"]) == 4
    check(resumed, exact, limit)


class Averages(Callback):
    """Saves other weights in place of the model's, as callbacks of moving averages do."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["trained"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            name: value * 2 if "wte" in name else value for name, value in checkpoint["state_dict"].items()
        }


class Small(Module):
    """Reads only this rank's rows."""

    def train_dataloader(self) -> Any:
        return mw.shard_loader(super().train_dataloader())


def averaged(rank: int, size: int, folder: Path) -> list[Any]:
    """Losses, and the weights of a checkpoint that a callback has changed: as it is read, with and without the optimizer."""
    from meshwright.integrations.lightning import MeshwrightStrategy

    # models of tests before, which shard_loader would have to choose from
    gc.collect()
    torch.manual_seed(1)
    net = Small()
    options: dict[str, Any] = {"accelerator": "cpu", "max_steps": 2, "limit_val_batches": 0, **QUIET}
    trainer = Trainer(
        strategy=MeshwrightStrategy(PLANS["tp2"]),
        callbacks=[Averages()],
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(net)
    trainer.save_checkpoint(folder / "whole.ckpt")
    trained = net.net.transformer.wte.weight.full_tensor()
    later = Module()
    # one that was made parallel by hand
    batch = next(iter(DataLoader(samples(4, seed=3), batch_size=ROWS)))
    later.net = mw.auto_parallelize(later.net, batch, **PLANS["pp2"])
    resumed = Trainer(strategy=MeshwrightStrategy(), enable_checkpointing=False, **options)
    resumed.fit(later, ckpt_path=str(folder / "whole.ckpt"))
    kept = torch.load(folder / "whole.ckpt" / "meta.pt", weights_only=True)["trained"]
    return [
        net.losses,
        trained.tolist(),
        later.net.transformer.wte.weight.full_tensor().tolist(),
        kept["net.transformer.wte.weight"].tolist(),
    ]


def test_what_callbacks_save_is_resumed(rank_pool: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    alone = Module()
    Trainer(accelerator="cpu", max_steps=2, limit_val_batches=0, enable_checkpointing=False, **QUIET).fit(
        alone
    )
    for losses, trained, resumed, kept in rank_pool.run(2, averaged, tmp_path):
        assert gap(losses, alone.losses) < LIMITS["no"]
        assert gap(trained, alone.net.transformer.wte.weight.tolist()) < LIMITS["no"]
        assert gap(kept, trained) == 0
        assert gap(resumed, (2 * torch.tensor(trained)).tolist()) == 0


def logged(rank: int, size: int, folder: Path) -> tuple[list[float], Any]:
    """Losses, and what wandb has of the last on this rank."""
    from lightning.pytorch.loggers import WandbLogger

    from meshwright.integrations.lightning import MeshwrightStrategy

    torch.manual_seed(1)
    net, logger = Module(), WandbLogger(save_dir=folder, offline=True)
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 2,
        "limit_val_batches": 0,
        "log_every_n_steps": 1,
    }
    strategy = MeshwrightStrategy(PLANS["dp2"])
    trainer = Trainer(strategy=strategy, enable_checkpointing=False, **options, **{**QUIET, "logger": logger})
    trainer.fit(net)
    if rank:
        return net.losses, None
    run = logger.experiment
    last = run.summary["loss"]
    run.finish()
    return net.losses, last


def test_wandb_logs_on_rank_0(rank_pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (losses, last), (_, nothing) = rank_pool.run(2, logged, tmp_path)
    assert gap([last], losses[-1:]) < LIMITS["no"]
    assert nothing is None
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1


class Divided(Module):
    def train_dataloader(self) -> Any:
        data = samples(8, seed=2)
        return DataLoader(data, batch_size=ROWS, sampler=DistributedSampler(data))  # type: ignore[var-annotated, arg-type]


class Two(Module):
    """Has parameters outside of the model that the step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.other = model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(**batch).loss


class Early(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("no such key")


def misused(rank: int, size: int) -> list[str]:
    from meshwright.integrations.lightning import MeshwrightStrategy

    lines = []
    module: LightningModule
    for module in (Divided(), Two(), Early()):
        strategy = MeshwrightStrategy(PLANS["dp2"])
        try:
            Trainer(accelerator="cpu", strategy=strategy, enable_checkpointing=False, **QUIET).fit(module)
        except mw.errors.UsageError as error:
            lines.append(str(error))
    return lines


def test_misuse_of_the_strategy_is_told_in_one_line(rank_pool: RankPool) -> None:
    for sampler, two, early in rank_pool.run(2, misused):
        assert "the data loader has a DistributedSampler" in sampler
        assert "training_step calls no module that has all trained parameters" in two
        assert "training_step failed before it called the model (no such key)" in early
        assert all("\n" not in line for line in (sampler, two, early))
