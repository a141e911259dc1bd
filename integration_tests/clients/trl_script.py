"""Users of TRL train on supervised answers, and an adapter of PEFT on preferences, with trainers made parallel by our mixin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .accelerate_script import VOCABULARY
from .peft_script import base
from .plans import plan_of
from .trainer_script import Watcher


def tokenizer() -> Any:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 3))]
    words_only = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    words_only.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words_only, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def texts(count: int, longest: int) -> list[str]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [
        " ".join(f"w{n}" for n in torch.randint(0, VOCABULARY - 3, (length,), generator=generator).tolist())
        for length in lengths
    ]


def script(method: str, mixins: tuple[type, ...], folder: Path, **options: Any) -> dict[str, Any]:
    """Train by "SFT", or by "DPO" with an adapter; `mixins` are bases of the trainer."""
    shared: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 3e-2,
        "adam_epsilon": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_length": 8,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    watcher = Watcher()
    if method == "SFT":
        trainer_class, arguments = trl.SFTTrainer, trl.SFTConfig(str(folder), **shared)
        columns = {"text": texts(12, 8)}
    else:
        trainer_class, arguments = trl.DPOTrainer, trl.DPOConfig(str(folder), **shared)
        columns = {"prompt": texts(12, 3), "chosen": texts(12, 4), "rejected": texts(12, 5)}
        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    trainer = type("Parallel", (*mixins, trainer_class), {})(
        base(),
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(),
        callbacks=[watcher],
        **options,
    )
    trainer.train()
    accuracies = watcher.of("mean_token_accuracy") or watcher.of("rewards/accuracies")
    return {"losses": watcher.of("loss"), "norms": watcher.of("grad_norm"), "accuracies": accuracies}


def one_device(method: str, folder: Path) -> dict[str, Any]:
    """The script as its user wrote it, on one device."""
    return script(method, (), folder)


def on_rank(rank: int, size: int, plan: str, method: str, folder: Path) -> dict[str, Any]:
    """The same with the mixin that makes it parallel."""
    from meshwright.integrations.transformers import ParallelTrainer

    return script(method, (ParallelTrainer,), folder, parallel=plan_of(plan, size) or None)
