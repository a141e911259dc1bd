"""`meshwright train` on real ranks: two kinds of models, three plans, killed and resumed under others."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from commands import run_on
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.recipes.recipe_input import read_recipe
from meshwright.training.data import Order, loader_of, rows_of
from meshwright.training.tokens import tokenizer_of
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.testing.rank_pool import RankPool

SOURCES = f"{sysconfig.get_path('stdlib')}/a*.py"
GPT2 = """
model = {model_type = "gpt2", n_embd = 16, n_layer = 2, n_head = 2}
steps = 6
batch_size = 4
accumulate = 2
check_replicas = 2
sequence_length = 16
optimizer = {lr = 1e-2, eps = 1e-5}
schedule = {warm_up = 2}
checkpoints = {interval = 2}
"""
PLANS = {"dp": "plan.dp=2", "tp": "plan.tp=2", "pp": "plan.pp=2"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)
    return folder


def words(folder: Path, *more: str) -> list[str]:
    """The command of a run in `folder`."""
    recipe = folder / "gpt2.toml"
    recipe.write_text(GPT2)
    return ["train", str(recipe), f"data={SOURCES}", f"out={folder / 'run'}", *more]


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(
        0 < record["mfu"] < 1 and "predicted_bubble" in record for record in records if "loss" in record
    )
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_three_plans_have_the_losses_of_one_device(
    rank_pool: RankPool, tmp_path: Path, llama: Path, model: str
) -> None:
    chosen = [f"model={llama}"] if model == "llama" else []
    curves: dict[str, list[float]] = {}
    for name, plan in {"one": "plan.dp=1", **PLANS}.items():
        folder = tmp_path / name
        folder.mkdir()
        done = run_on(rank_pool, 1 if name == "one" else 2, words(folder, plan, *chosen), tmp_path)
        assert [rank.returncode for rank in done] == [0] * len(done)
        curves[name] = losses(folder)
    assert len(curves["one"]) == 6 and curves["one"][-1] < curves["one"][0]
    for curve in curves.values():
        assert curve == pytest.approx(curves["one"], abs=1e-5)
    if model == "llama":
        assert curves["one"][0] == pytest.approx(first_loss(llama, words(tmp_path, *chosen)), abs=1e-5)


def first_loss(folder: Path, arguments: list[str]) -> float:
    """The loss of the first step, as transformers computes it with the weights of the folder."""
    recipe = read_recipe(arguments[1:])
    rows = rows_of(recipe.data, recipe, tokenizer_of(recipe))
    batch = next(iter(loader_of(rows, Order(len(rows), recipe.batch_size, recipe.seed))))
    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(folder)(**batch).loss.item()


@pytest.mark.slow
def test_killed_at_a_random_step_and_resumed_on_other_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    """Two runs of one recipe, one of them killed on one rank and taken up by two."""
    step = random.randrange(5, 15)
    steps = {"whole": ["steps=20"], "killed": ["steps=20", "checkpoints.interval=3"]}
    for name, more in steps.items():
        (tmp_path / name).mkdir()
        steps[name] = words(tmp_path / name, *more)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "meshwright", *steps["killed"]]
    log = tmp_path / "killed" / "run" / "metrics.jsonl"
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not (log.is_file() and f'"step": {step},' in log.read_text()):
            time.sleep(0.002)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    run_on(rank_pool, 2, [*steps["killed"], "plan.tp=2"], tmp_path)
    run_on(rank_pool, 1, steps["whole"], tmp_path)
    assert len(losses(tmp_path / "whole")) == 20
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5), step


ROWS = """
import os, signal, torch
from pathlib import Path

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        stop = Path(__file__).parent / "stop"
        if index == 7 and stop.exists():
            stop.unlink()
            os.kill(os.getpid(), signal.SIGTERM)
        ids = (torch.arange(16) * index) % 256
        return {"input_ids": ids, "labels": ids}

def rows():
    return Rows()
"""


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "stop").touch()
    arguments = words(tmp_path, f"data={tmp_path / 'rows.py'}:rows", "checkpoints.interval=100", "--json")
    stopped = run_on(rank_pool, 2, [*arguments, "plan.dp=2"], tmp_path)
    assert [rank.returncode for rank in stopped] == [128 + signal.SIGTERM] * 2
    step = json.loads(stopped[0].stdout)["step"]
    assert 1 <= step < 6 and len(losses(tmp_path)) == step
    done = run_on(rank_pool, 2, [*arguments, "plan.pp=2"], tmp_path)
    assert f"from step {step} to 6" in done[0].stderr and json.loads(done[0].stdout)["signal"] == 0
    resumed = losses(tmp_path)
    changes = {
        "seed=1": "seed = 0, not 1",
        "model.n_head=4": "model.n_head = 2, not 4",
        "optimizer.name=adam": "optimizer.name = adamw, not adam",
    }
    for change, expected in changes.items():
        with pytest.raises(
            UsageError, match=f"run is a run with {expected}: a run goes on with the same rows"
        ):
            run_on(rank_pool, 1, [*arguments, change], tmp_path)
    run_on(rank_pool, 1, [*arguments, f"out={tmp_path / 'whole' / 'run'}"], tmp_path)
    assert resumed == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
