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


class Manual(Module):
    """Steps two optimizers itself, and clips and schedules by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        loss = self.net(**batch).loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        for schedule in self.lr_schedulers():
            schedule.step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        named = dict(self.net.named_parameters())
        groups = [[p for name, p in named.items() if ("mlp" in name) == inner] for inner in (True, False)]
        optimizers = [torch.optim.AdamW(group, lr=1e-2, eps=1e-4) for group in groups]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]


def by_hand(rank: int, size: int, plan: str | None) -> list[float]:
    """Losses of manual optimization."""
    from meshwright.integrations.lightning import MeshwrightStrategy

    torch.manual_seed(1)
    net = Manual()
    where: dict[str, Any] = {"devices": 1} if plan is None else {"strategy": MeshwrightStrategy(PLANS[plan])}
    Trainer(
        accelerator="cpu", max_epochs=1, limit_val_batches=0, enable_checkpointing=False, **where, **QUIET
    ).fit(net)
    return net.losses


@pytest.mark.parametrize("plan", ["dp2", "tp2", "zero3", "pp2"])
def test_manual_optimization_is_that_of_one_device(rank_pool: RankPool, plan: str) -> None:
    expected = by_hand(0, 1, None)
    assert len(expected) == 4
    for losses in rank_pool.run(2, by_hand, plan):
        assert gap(losses, expected) < LIMITS["no"]


def written(rank: int, size: int, plan: str | None, folder: Path) -> list[Any]:
    """What a script that writes with TensorBoard itself passes, on rank 0 as on one device."""
    from tensorboardX import SummaryWriter

    torch.manual_seed(1)
    batch = next(iter(DataLoader(samples(4, seed=3), batch_size=ROWS)))
    net = model() if plan is None else mw.auto_parallelize(model(), batch, **PLANS[plan])
    loss = net(**batch).loss
    loss.backward()
    weight = net.transformer.wte.weight
    if rank == 0:
        with SummaryWriter(str(folder)) as writer:
            writer.add_scalar("loss", loss, 0)
            writer.add_scalars("two", {"loss": loss.item()}, 0)
            if plan != "pp2":
                # values of one stage are read by all ranks together
                writer.add_histogram("weight", weight.detach().cpu().numpy(), 0)
    return [float(loss), float(weight.grad.norm())]


@pytest.mark.parametrize("plan", ["dp2", "pp2"])
def test_scripts_may_write_with_tensorboard_on_rank_0(rank_pool: RankPool, tmp_path: Path, plan: str) -> None:
    pytest.importorskip("tensorboardX")
    expected = written(0, 1, None, tmp_path / "one")
    for values in rank_pool.run(2, written, plan, tmp_path / "many"):
        assert gap(values, expected) < LIMITS["no"]
    assert list((tmp_path / "many").glob("events*"))


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
