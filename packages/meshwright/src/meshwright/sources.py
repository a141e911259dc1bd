"""Where a command's model comes from: a demo model, a transformers config, or the user's own function.

--model gpt2                  one of the demo's models
--model config.json           a transformers config: a causal language model with random weights
--model train.py:build        a function of a file that returns (model, batch)
--model package.module:build  the same, of a module
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.demo.models import RECIPES
from meshwright.demo.tasks import batches
from meshwright.demo.text import read_text
from meshwright_dtensor.errors import MeshwrightError, UsageError


@dataclass(frozen=True)
class Source:
    """A model that can be made again and again, and a batch for it (plain tensors, or anything that holds them)."""

    name: str
    make: Callable[[], nn.Module]
    batch: Any


def resolve(name: str, *, batch_size: int, sequence_length: int, seed: int) -> Source:
    """The model and batch that `--model NAME` means; rows and tokens are for models that bring no batch.

    Raises:
        UsageError: there is no such model, or it does not return what it should.
    """
    for option, value in (("--batch-size", batch_size), ("--sequence-length", sequence_length)):
        if value < 1:
            raise UsageError(f"{option} {value} is less than 1; give a whole number of at least 1")
    if name in RECIPES:
        return _demo(name, batch_size, sequence_length, seed)
    if name.endswith(".json"):
        return _config(Path(name), batch_size, sequence_length, seed)
    if ":" in name:
        return _function(name, seed)
    raise UsageError(
        f"--model {name} is not known; give one of {', '.join(RECIPES)}, a transformers config.json, "
        "or file.py:function that returns (model, batch)"
    )


def _demo(name: str, batch_size: int, sequence_length: int, seed: int) -> Source:
    recipe = RECIPES[name]
    text = read_text(at_least=recipe.rows.bytes_per_row(sequence_length))
    batch = next(batches(recipe.data(text, sequence_length, batch_size, seed), batch_size))

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return recipe.make(sequence_length)

    return Source(name, make, batch)


def _config(path: Path, batch_size: int, sequence_length: int, seed: int) -> Source:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(f"--model {path} needs transformers; pip install 'meshwright[demo]'") from error
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises many kinds for a bad config
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"--model {path} is no transformers config ({reason}); give its config.json"
        ) from error

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch_size, sequence_length), generator=generator)
    return Source(path.stem, make, {"input_ids": tokens, "labels": tokens.clone()})


def _function(name: str, seed: int) -> Source:
    where, _, attribute = name.rpartition(":")
    function = getattr(_module(name, where), attribute, None)
    if not callable(function):
        raise UsageError(
            f"--model {name}: {where} has no function {attribute!r}; name one that returns (model, batch)"
        )

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        try:
            made = function()
        except MeshwrightError:
            raise
        except Exception as error:
            raise UsageError(
                f"--model {name} raised {type(error).__name__}: {error}; mend the function"
            ) from error
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise UsageError(
                f"--model {name} returned a {type(made).__name__}; it must return (model, batch)"
            )
        return made

    _, batch = build()
    return Source(attribute, lambda: build()[0], batch)


def _module(name: str, where: str) -> Any:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        if spec is None or spec.loader is None:
            raise ImportError(f"{where} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # classes of the file can then be pickled and found by name
        sys.path.insert(0, str(Path(where).resolve().parent))  # its neighbours, as for `python file.py`
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--model {name}: {where} cannot be imported ({reason}); check the path") from error
    return module
