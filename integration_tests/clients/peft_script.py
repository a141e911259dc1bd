"""A user of PEFT trains an adapter of a Llama with transformers' Trainer, saves it, merges it, and turns it off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from .accelerate_script import LENGTH, VOCABULARY, samples
from .plans import plan_of
from .trainer_script import Watcher


def base() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def adapted() -> Any:
    targets = ["q_proj", "v_proj", "up_proj"]
    return get_peft_model(
        base(), LoraConfig(r=4, target_modules=targets, lora_dropout=0.1, task_type="CAUSAL_LM")
    )


def logits_of(model: nn.Module) -> list[float]:
    with torch.no_grad():
        logits: Tensor = model.eval()(
            input_ids=torch.stack([row["input_ids"] for row in samples(4, seed=4)])
        ).logits
    return (logits.full_tensor() if hasattr(logits, "full_tensor") else logits).flatten().tolist()


def script(
    trainer_class: Any, folder: Path, precision: str, resume: Path | None, **options: Any
) -> dict[str, Any]:
    """Train, save and merge. `resume`: the checkpoint to begin from."""
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=3e-2,
        adam_epsilon=1e-4,
        logging_steps=1,
        save_steps=2,
        bf16=precision == "bf16",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    watcher, model = Watcher(), adapted()
    trainer = trainer_class(
        model, arguments, train_dataset=samples(16, seed=2), callbacks=[watcher], **options
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.save_model(str(folder / "final"))
    results = {
        "losses": watcher.of("loss"),
        "norms": watcher.of("grad_norm"),
        "logits": logits_of(model),
        "reread": logits_of(PeftModel.from_pretrained(base(), str(folder / "final"))),
    }
    model.merge_adapter()
    results["merged"] = logits_of(model)
    model.unmerge_adapter()
    with model.disable_adapter():
        results["disabled"] = logits_of(model)
    return results


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
