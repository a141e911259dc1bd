"""The model, the optimizer and the learning rate of a recipe: what a script for one device would build."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.recipes.reading import RecipeError
from meshwright.recipes.rules import is_function
from meshwright.recipes.schema import Recipe
from meshwright.sources import call_with
from meshwright.training.data import Tokenizer
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.utils.names import suggestion


def make_model(recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
    """A new model in float32, its values drawn from torch's default generator. Raises UsageError."""
    if isinstance(recipe.model, str) and is_function(recipe.model):
        sizes = {"vocab_size": tokenizer.size, "sequence_length": recipe.sequence_length}
        model = call_with("model", recipe.model, **sizes)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"model: {recipe.model} returned a {type(model).__name__}; it must return a module"
            )
        return model
    try:
        import transformers
    except ImportError as error:
        raise UsageError("model: it needs transformers; pip install 'meshwright[demo]'") from error
    # it warns about every config that names no loss
    transformers.logging.set_verbosity_error()
    config = _config(recipe, tokenizer)
    if config.get_text_config().vocab_size < tokenizer.size:
        raise UsageError(
            f"model: vocab_size = {config.get_text_config().vocab_size} is less than the {tokenizer.size} tokens of the "
            f"tokenizer, {recipe.tokenizer}; name the model's tokenizer"
        )
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise UsageError(
            f"model: transformers cannot build it ({_first_line(error)}); check its config"
        ) from error
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    tables = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    if limit is not None and limit in tables and limit < recipe.sequence_length:
        raise UsageError(
            f"model: it has {limit} positions, and a row sequence_length = {recipe.sequence_length}; give it more"
        )
    return model


def weights_of(recipe: Recipe) -> str | None:
    """The folder whose weights a new run begins with; None for random ones."""
    return recipe.model if isinstance(recipe.model, str) and Path(recipe.model).is_dir() else None


def _config(recipe: Recipe, tokenizer: Tokenizer) -> Any:
    """The config of transformers. In a table, the vocabulary is the tokenizer's, unless the table says otherwise."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if isinstance(recipe.model, str):
        try:
            return AutoConfig.from_pretrained(recipe.model)
        except Exception as error:
            raise UsageError(
                f"model: {recipe.model} is no config of transformers ({_first_line(error)})"
            ) from error
    given = dict(recipe.model)
    name = given.pop("model_type")
    if name not in CONFIG_MAPPING:
        raise UsageError(
            f"model: model_type {name!r} is not one of transformers'{suggestion(name, CONFIG_MAPPING)}"
        )
    kind = CONFIG_MAPPING[name]
    fields = {*inspect.signature(kind.__init__).parameters, *kind.attribute_map}
    if wrong := [
        f"there is no field model.{key}{suggestion(key, fields)}" for key in given if key not in fields
    ]:
        raise RecipeError(f"model: {kind.__name__} of transformers says otherwise\n  " + "\n  ".join(wrong))
    defaults = {
        "vocab_size": tokenizer.size,
        "bos_token_id": None,
        "eos_token_id": tokenizer.end,
        "use_cache": False,
    }
    try:
        return kind(**{**{key: value for key, value in defaults.items() if key in fields}, **given})
    except Exception as error:
        raise UsageError(
            f"model: {kind.__name__} refuses the table ({_first_line(error)}); correct it"
        ) from error


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of torch; its learning rate is set in every step."""
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[
        recipe.optimizer.name
    ]
    given = recipe.optimizer.model_dump(exclude={"name"}, exclude_none=True)
    return kind(model.parameters(), **given)


def set_rate(recipe: Recipe, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Set the learning rate of a step, counted from 0. It has no state, so a run may go on with other settings."""
    rate = recipe.optimizer.lr * recipe.schedule.factor(step, recipe.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
