"""Training runs of tiny models of transformers with compiled regions, next to one device. Functions for a RankPool."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_parallel.compile.report import RegionRow, regions
from meshwright_parallel.verification.compare import whole

_SMALL = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "Llama": ("LlamaForCausalLM", {**_SMALL, "intermediate_size": 128, "attention_dropout": 0.1}),
        "Llama without cache": (
            "LlamaForCausalLM",
            {**_SMALL, "intermediate_size": 128, "attention_dropout": 0.1, "use_cache": False},
        ),
        "GPT2": ("GPT2LMHeadModel", {"vocab_size": 128, "n_embd": 64, "n_layer": 4, "n_head": 4}),
        "Bert": ("BertForMaskedLM", {**_SMALL, "intermediate_size": 128}),
        "T5": (
            "T5ForConditionalGeneration",
            {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4, "num_heads": 4},
        ),
        "ViT": (
            "ViTForImageClassification",
            {
                **{name: _SMALL[name] for name in list(_SMALL)[1:]},
                **{"intermediate_size": 128, "image_size": 32, "patch_size": 8},
                **{"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
            },
        ),
        "Mixtral": (
            "MixtralForCausalLM",
            {
                **_SMALL,
                **{"intermediate_size": 64, "num_local_experts": 4, "num_key_value_heads": 2},
                "attention_dropout": 0.1,
            },
        ),
    }
)
"""Name -> class and config."""

LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = MappingProxyType(
    {
        "dp2": (2, {"dp": 2, "zero": 0}),
        "tp2": (2, {"tp": 2, "sequence_parallel": False}),
        "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
        "zero3": (2, {"dp": 2, "zero": 3}),
        "pp2": (2, {"pp": 2}),
        "dp2 x tp2": (4, {"dp": 2, "tp": 2}),
        "bf16": (2, {"dp": 2, "zero": 3, "precision": "bf16"}),
        "recomputed": (2, {"tp": 2, "recompute": "full"}),
    }
)
"""Name -> ranks and pins."""
NOISE = 1e-6
"""Of the largest gradient: smaller ones are rounding on one device too."""
TOLERANCE = MappingProxyType({"fp32": 1e-5, "bf16": 1.6e-2})
"""Largest difference, relative to the largest value, by precision."""


@dataclass(frozen=True)
class Run:
    """A run with compiled regions next to one device, or in lower precision next to the same plan uncompiled.

    Attributes:
        loss: the largest difference of a loss; gradient: of a gradient of the last step, relative to its largest value.
        drawn: whether the generator was left as on one device after every step.
        missing: parameters of which one has a gradient and the other has none.
        rows: what the regions of this rank have done.
        freed: whether nothing holds the model after its run.
    """

    loss: float
    gradient: float
    drawn: bool
    missing: tuple[str, ...]
    rows: tuple[RegionRow, ...]
    freed: bool


def build(name: str) -> nn.Module:
    """The model, with equal values in every call."""
    kind, fields = MODELS[name]
    model = getattr(transformers, kind)
    config = model.config_class(**fields)
    if name == "T5":
        config.decoder_start_token_id = 0
    torch.manual_seed(0)
    made: nn.Module = model(config)
    return made.train()


def batch(name: str, step: int) -> dict[str, torch.Tensor]:
    """Four rows."""
    generator = torch.Generator().manual_seed(step)
    if name == "ViT":
        pixels = torch.randn(4, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 2, (4,), generator=generator)}
    ids = torch.randint(0, 128, (4, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Not one that divides rounding by its own size, as Adam does."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def train(
    model: Any, name: str, steps: int, optimizer: torch.optim.Optimizer | None = None
) -> tuple[list[float], list[torch.Tensor], dict[str, Any]]:
    """Losses, the generator's states, and the gradients of the last step."""
    optimizer = optimizer or optimizer_of(model)
    torch.manual_seed(7)
    losses, states = [], []
    gradients: dict[str, Any] = {}
    for step in range(steps):
        loss = model(**batch(name, step)).loss
        loss.backward()
        if step == steps - 1:
            gradients = {key: whole(p.grad) for key, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        states.append(torch.get_rng_state())
    return losses, states, gradients


def plan_of(name: str, layout: str, backend: str) -> ParallelPlan:
    """The plan of a layout, with compiled blocks."""
    ranks, pins = LAYOUTS[layout]
    plan: Any = mw.plan(build(name), batch(name, 0), world_size=ranks, compile=True, **pins)
    rules = tuple(rule.model_copy(update={"backend": backend}) for rule in plan.compile)
    return plan.replace(compile=rules)  # type: ignore[no-any-return]


def compiled_run(rank: int, size: int, name: str, layout: str, plan: str, steps: int) -> Run:
    """Train on the ranks and on one device, and compare; in lower precision with the same plan uncompiled."""
    transformers.logging.set_verbosity_error()
    compiled_plan = ParallelPlan.from_json(plan)
    reference = build(name)
    if compiled_plan.precision is not None:
        reference = mw.parallelize(reference, compiled_plan.replace(compile=()), batch=batch(name, 0))
    expected, states, wanted = train(reference, name, steps)
    model = mw.parallelize(build(name), compiled_plan, batch=batch(name, 0))
    losses, drawn, gradients = train(model, name, steps)
    differences = [0.0]
    largest = max(float(value.abs().max()) for value in wanted.values() if value is not None)
    for key, gradient in gradients.items():
        value = wanted[key]
        # a bias of keys has rounding for its gradient
        if gradient is not None and value is not None and value.abs().max() > NOISE * largest:
            differences.append(float((gradient - value).abs().max() / value.abs().max()))
    missing = tuple(key for key in wanted if (wanted[key] is None) != (gradients[key] is None))
    rows = tuple(regions(model).rows)
    alive = weakref.ref(model)
    del model
    gc.collect()
    return Run(
        max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        max(differences),
        all(map(torch.equal, states, drawn)),
        missing,
        rows,
        alive() is None,
    )
