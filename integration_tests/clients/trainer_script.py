"""A training script of a user of transformers' Trainer, with that and with ours.

It has accumulation of gradients, evaluations with metrics, checkpoints, the best model at the end, a callback and predictions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from .accelerate_script import model, samples
from .plans import plan_of

STEPS = 4


class Watcher(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.logs.append(dict(logs))

    def of(self, name: str) -> list[float]:
        """The numbers of a name, in order."""
        return [log[name] for log in self.logs if name in log]


def accuracy(results: Any) -> dict[str, float]:
    guessed = np.argmax(results.predictions, axis=-1)[:, :-1]
    return {"accuracy": float((guessed == results.label_ids[:, 1:]).mean())}


def script(
    trainer_class: Any, folder: Path, precision: str, resume: Path | None, **options: Any
) -> dict[str, Any]:
    """Train, evaluate, predict and save, into the folder. `resume`: the checkpoint to begin from."""
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        bf16=precision == "bf16",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    watcher = Watcher()
    trainer = trainer_class(
        model(),
        arguments,
        train_dataset=samples(18, seed=2),
        eval_dataset=samples(6, seed=3),
        compute_metrics=accuracy,
        callbacks=[watcher],
        **options,
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.save_model(str(folder / "final"))
    predictions = trainer.predict(samples(6, seed=4))
    reread = GPT2LMHeadModel.from_pretrained(folder / "final").eval()
    with torch.no_grad():
        rows = torch.stack([sample["input_ids"] for sample in samples(6, seed=4)])
        guesses = reread(rows).logits
    return {
        "losses": watcher.of("loss"),
        "norms": watcher.of("grad_norm"),
        "rates": watcher.of("learning_rate"),
        "evaluated": watcher.of("eval_loss"),
        "metrics": watcher.of("eval_accuracy"),
        "flops": [trainer.state.total_flos],
        "best": Path(trainer.state.best_model_checkpoint).name,
        "logits": predictions.predictions.flatten().tolist(),
        "reread": guesses.flatten().tolist(),
    }


def one_device(precision: str, folder: Path) -> dict[str, Any]:
    """The script as its user wrote it, on one device."""
    return script(Trainer, folder, precision, None)


def on_rank(
    rank: int, size: int, plan: str, precision: str, folder: Path, resume: Path | None = None
) -> dict[str, Any]:
    """The same with the lines that make it parallel. It saves into the folder; `resume`: the folder of another run."""
    from meshwright.integrations.transformers import Trainer as Ours

    checkpoint = None if resume is None else resume / "checkpoint-2"
    return script(Ours, folder, precision, checkpoint, parallel=plan_of(plan, size) or None)
