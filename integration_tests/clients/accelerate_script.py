"""A training script of a user of accelerate, with its Accelerator and with ours.

It has accumulation of gradients, clipping, a schedule, an evaluation, mixed precision and a checkpoint in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from .plans import plan_of

ROWS, LENGTH, VOCABULARY = 4, 8, 32


def model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=VOCABULARY,
        initializer_range=0.2,
        n_positions=LENGTH,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def script(
    accelerator: Any,
    make_parallel: Callable[[nn.Module, Any], nn.Module],
    save: Path | None,
    resume: Path | None,
) -> dict[str, Any]:
    """Train for two epochs. `save`: where to save after the first; `resume`: begin with the second, from there."""
    torch.manual_seed(1)
    loader = DataLoader(samples(10, seed=2), batch_size=ROWS, shuffle=True)
    evaluation = DataLoader(samples(6, seed=3), batch_size=ROWS)
    net = make_parallel(model(), next(iter(evaluation)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 3)
    net, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        net, optimizer, loader, evaluation, scheduler
    )
    losses, norms = [], []
    if resume is not None:
        accelerator.load_state(str(resume))
    for epoch in range(2):
        if epoch == 0 and resume is not None:
            continue
        net.train()
        for batch in loader:
            with accelerator.accumulate(net):
                loss = net(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0 and save is not None:
            accelerator.save_state(str(save))
    net.eval()
    guesses = []
    for batch in evaluation:
        with torch.no_grad():
            logits = net(**batch).logits
        guesses.append(accelerator.gather_for_metrics((logits, batch["labels"]))[0])
    # of rank 0
    weights = accelerator.get_state_dict(net).get("transformer.wte.weight", torch.empty(0))
    return {
        "losses": losses,
        "norms": norms,
        "rates": scheduler.get_last_lr(),
        "logits": torch.cat(guesses).flatten().tolist(),
        "weights": weights.flatten().tolist(),
    }


def one_device(precision: str, folder: Path) -> dict[str, Any]:
    """The script as its user wrote it, on one device."""
    from accelerate import Accelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision, cpu=True)
    return script(accelerator, lambda net, batch: net, folder, None)


def on_rank(
    rank: int, size: int, plan: str, precision: str, folder: Path, resume: Path | None = None
) -> dict[str, Any]:
    """The same with the lines that make it parallel. It saves into the folder; `resume`: the folder of another run."""
    import meshwright as mw
    from meshwright.integrations.accelerate import Accelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision)
    return script(
        accelerator,
        lambda net, batch: mw.auto_parallelize(net, batch, **plan_of(plan, size)),
        folder / "state",
        None if resume is None else resume / "state",
    )
