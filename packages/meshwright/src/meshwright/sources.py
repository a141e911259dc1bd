"""Where a command's model comes from: a demo model, a transformers config, or the user's own function.

--model gpt2                  one of the demo's models
--model config.json           a transformers config: a causal language model with random weights
--model train.py:build        a function of a file that returns (model, batch); it may take keywords batch_size, sequence_length
--model package.module:build  the same, of a module

Nothing is built until it is asked for, so that a command decides where the memory comes from.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from meshwright.defaults import ROWS, TOKENS
from meshwright.demo.models import RECIPES
from meshwright.demo.tasks import batches
from meshwright.demo.text import read_text
from meshwright_dtensor.deferred.materialize import deferred_init
from meshwright_dtensor.errors import MeshwrightError, UsageError
from meshwright_dtensor.utils.names import suggestion

_NO_SIZES: Mapping[str, int] = MappingProxyType({})

_OPTIONS: Mapping[str, str] = MappingProxyType(
    {"batch_size": "--batch-size", "sequence_length": "--sequence-length"}
)


@dataclass
class Source:
    """A model that can be made again and again, and a batch for it (plain tensors, or anything that holds them).

    Args:
        name: for people.
        build: makes the model and its batch.
        known: the batch, where it can be had without the model; None takes that of the first model.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Any]]
    known: Any = field(default=None, repr=False)

    def make(self) -> nn.Module:
        """A new model, with the same values every time."""
        model, batch = self.build()
        if self.known is None:
            self.known = batch
        return model

    def to_plan(self, values: bool = False) -> tuple[nn.Module, Any]:
        """A model and a batch. Without values neither memory nor disk is taken for its parameters, and it cannot be run."""
        with deferred_init(values=values):
            return self.build()

    @property
    def batch(self) -> Any:
        """The example batch. A model is built for it in files, and dropped, where it comes with one."""
        if self.known is None:
            with deferred_init():
                self.make()
        return self.known


def resolve(
    name: str,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    usual: Mapping[str, int] = _NO_SIZES,
) -> Source:
    """The model and batch that `--model NAME` means.

    Args:
        name: see the top of this module.
        batch_size, sequence_length: rows and tokens of the batch; None leaves it to the function, else is ROWS and TOKENS.
        seed: of the default generator whenever a model is made.
        usual: sizes to take in place of ROWS, TOKENS and a function's defaults, by the name of the argument.

    Raises:
        UsageError: there is no such model, it does not return what it should, or it would ignore a size that was given.
    """
    for option, value in (("--batch-size", batch_size), ("--sequence-length", sequence_length)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value} is less than 1; give a whole number of at least 1")
    rows = batch_size or usual.get("batch_size", ROWS)
    tokens = sequence_length or usual.get("sequence_length", TOKENS)
    if name in RECIPES:
        check_tokens(name, sequence_length)
        return _demo(name, rows, tokens, seed)
    if name.endswith(".json"):
        return _config(Path(name), rows, tokens, seed)
    if ":" in name:
        return _function(name, {"batch_size": batch_size, "sequence_length": sequence_length}, seed, usual)
    if name.endswith(".py"):
        raise UsageError(
            f"--model {name} is a file; name a function of it that returns (model, batch), as {name}:make"
        )
    raise UsageError(
        f"--model {name} is not known; give one of {', '.join(RECIPES)}, a transformers config.json, "
        "or file.py:function that returns (model, batch)" + suggestion(name, RECIPES)
    )


def check_tokens(name: str, sequence_length: int | None) -> None:
    """Refuse a number of tokens that a demo model would ignore. Raises UsageError."""
    if sequence_length is not None and RECIPES[name].rows.fixed:
        raise UsageError(
            f"--sequence-length {sequence_length} says nothing of {name}, whose rows are of one size; leave it out"
        )


def _demo(name: str, rows: int, tokens: int, seed: int) -> Source:
    recipe = RECIPES[name]
    text = read_text(at_least=recipe.rows.bytes_per_row(tokens))
    batch = next(batches(recipe.data(text, tokens, rows, seed), rows))

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        return recipe.make(tokens), batch

    return Source(name, build, batch)


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
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch_size, sequence_length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone()}

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config), batch

    return Source(path.stem, build, batch)


def _function(name: str, sizes: Mapping[str, int | None], seed: int, usual: Mapping[str, int]) -> Source:
    where, _, attribute = name.rpartition(":")
    module = _module(name, where)
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(
            f"--model {name}: {where} has no function {attribute!r}; name one that returns (model, batch)"
            + suggestion(attribute, names)
        )
    keywords = _keywords(name, function, sizes, usual)

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        try:
            made = function(**keywords)
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

    return Source(attribute, build)


def _keywords(
    name: str, function: Callable[..., Any], sizes: Mapping[str, int | None], usual: Mapping[str, int]
) -> dict[str, int]:
    """What of the sizes the function is called with.

    Raises:
        UsageError: it has no keyword for one that was given, or wants more than sizes.
    """
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # written in C, say
        parameters = inspect.signature(function).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    found: dict[str, int] = {}
    for key, value in sizes.items():
        known = parameters.get(key)
        takes = every or (
            known is not None and known.kind in (known.POSITIONAL_OR_KEYWORD, known.KEYWORD_ONLY)
        )
        if value is not None and not takes:
            raise UsageError(
                f"{_OPTIONS[key]} {value}: {name} brings a batch of its own and has no parameter {key}; give it one, as in "
                f"def {name.rpartition(':')[2]}({key}={value}), or leave {_OPTIONS[key]} out"
            )
        if value is not None:
            found[key] = value
        elif takes and key in usual:
            found[key] = usual[key]
        elif known is not None and takes and known.default is known.empty:
            found[key] = ROWS if key == "batch_size" else TOKENS
    for key, known in parameters.items():
        wanted = known.default is known.empty and known.kind not in (known.VAR_KEYWORD, known.VAR_POSITIONAL)
        if wanted and key not in found:
            raise UsageError(
                f"--model {name} wants an argument {key!r}; only batch_size and sequence_length are given: give {key} a default"
            )
    return found


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
