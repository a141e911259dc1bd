"""A user of transformers generates text with each cache, by greedy search, sampling and beams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from .plans import plan_of

VOCABULARY = 32
OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "sampling": {"do_sample": True, "top_k": 8, "top_p": 0.9, "temperature": 1.5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "none": {"use_cache": False},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "static beams": {"cache_implementation": "static", "disable_compile": True, "num_beams": 2},
    "sliding": {},
    "static sliding": {"cache_implementation": "static", "disable_compile": True},
    "quantized": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "assistant": {},
}
"""What is tried -> arguments of generate()."""


def model(option: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if "sliding" in option:
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=4)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def prompt() -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    # a shorter prompt, padded on the left
    ids[1, :2] = mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def script(option: str, make_parallel: Callable[[nn.Module, Any], nn.Module]) -> dict[str, Any]:
    net: Any = make_parallel(model(option), prompt())
    options = dict(OPTIONS[option])
    batch = prompt()
    if option in ("prompt lookup", "assistant"):
        # of one sequence
        batch = {name: value[:1] for name, value in batch.items()}
    if option == "assistant":
        options["assistant_model"] = model("dynamic")
    torch.manual_seed(1)
    with torch.no_grad():
        made = net.generate(
            **batch, max_new_tokens=4, return_dict_in_generate=True, output_logits=True, **options
        )
    logits = [whole(step) for step in made.logits]
    return {
        "losses": torch.cat([step.flatten() for step in logits]).tolist(),
        "tokens": whole(made.sequences).tolist(),
    }


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def one_device(option: str, folder: Path) -> dict[str, Any]:
    """The script as its user wrote it, on one device."""
    return script(option, lambda net, batch: net)


def on_rank(rank: int, size: int, plan: str, option: str, folder: Path) -> dict[str, Any]:
    """The same with the line that makes it parallel."""
    import meshwright as mw

    return script(option, lambda net, batch: mw.auto_parallelize(net, batch, **plan_of(plan, size)))
