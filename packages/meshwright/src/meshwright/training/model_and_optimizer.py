"""The model, the optimizer and the learning rate of a recipe: what a script for one device would build."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import meshwright as mw
from meshwright.configs import config_of, model_of
from meshwright.recipes.rules import is_function
from meshwright.recipes.schema import Recipe
from meshwright.sources import call_with
from meshwright.training.tokens import Tokenizer
from meshwright_dtensor.errors import UsageError


def make_model(recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
    """A new model in float32, its values drawn from torch's default generator. Raises UsageError."""
    given, length = recipe.model, recipe.sequence_length
    if isinstance(given, str) and is_function(given):
        model = call_with("model", given, vocab_size=tokenizer.size, sequence_length=length)
        if not isinstance(model, nn.Module):
            raise UsageError(f"model: {given} returned a {type(model).__name__}; it must return a module")
        return model
    tokens = {"vocab_size": tokenizer.size, "bos_token_id": None, "eos_token_id": tokenizer.end}
    config = config_of("model", given, tokens)
    # a cache is for generation
    config.use_cache = False
    sizes = config.get_text_config()
    if sizes.vocab_size < tokenizer.size:
        rule = f"less than the {tokenizer.size} tokens of the tokenizer, {recipe.vocabulary}; name the model's tokenizer"
        raise UsageError(f"model.vocab_size = {sizes.vocab_size} is {rule}")
    model = model_of("model", config, dtype=torch.float32)
    tables = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    limit = getattr(sizes, "max_position_embeddings", length)
    if limit < length and limit in tables:
        raise UsageError(
            f"model: it has {limit} positions, and a row sequence_length = {length}; give it more"
        )
    return model


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of torch; `set_rate` sets its learning rate."""
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[
        recipe.optimizer.name
    ]
    return kind(model.parameters(), **recipe.optimizer.model_dump(exclude={"name"}, exclude_none=True))


def set_rate(recipe: Recipe, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Set the learning rate of a step, counted from 0. It has no state, so a run may go on with another schedule."""
    rate = recipe.optimizer.lr * recipe.schedule.factor(step, recipe.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def export(recipe: Recipe, folder: str, model: nn.Module, first: bool) -> None:
    """Write a folder for `from_pretrained`: weights, config and, on the first rank, the tokenizer. Collective."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", None) is False:
        config.use_cache = True
    mw.export(folder, model=model)
    if first and recipe.vocabulary != "bytes":
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(recipe.vocabulary, trust_remote_code=False).save_pretrained(folder)
