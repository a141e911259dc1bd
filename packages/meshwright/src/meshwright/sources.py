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
from typing import TYPE_CHECKING, Any

from meshwright.configs import config_of, model_of
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import MeshwrightError, UsageError
from meshwright_dtensor.utils.names import suggestion

if TYPE_CHECKING:
    import torch
    from torch import nn

ROWS, TOKENS = 8, 128
"""Rows and tokens of a batch where neither the user nor the model's function gives a size."""


@dataclass
class Source:
    """A model that can be built again and again, and a batch for it (plain tensors, or any object that holds them).

    Args:
        name: shown to people.
        produce: makes the model and its batch.
        example: the batch, where it does not need the model; None takes the batch of the first model.
        seed: of the default generator whenever a model is built, so that ranks start alike.
    """

    name: str
    produce: Callable[[], tuple[nn.Module, Any]]
    example: Any = field(default=None, repr=False)
    seed: int = 0

    def build(self) -> tuple[nn.Module, Any]:
        """A new model, with the same values every time, and its batch."""
        import torch

        torch.manual_seed(self.seed)
        return self.produce()

    def make(self) -> nn.Module:
        """A new model, with the same values every time."""
        model, batch = self.build()
        if self.example is None:
            self.example = batch
        return model

    def to_plan(self, values: bool = False) -> tuple[nn.Module, Any]:
        """A model and a batch. Without values, its parameters take neither memory nor disk, and it cannot be run."""
        from meshwright_dtensor.deferred.materialize import deferred_init

        with deferred_init(values=values):
            return self.build()

    @property
    def batch(self) -> Any:
        """The example batch. Where it comes with the model, one is built in files and dropped."""
        from meshwright_dtensor.deferred.materialize import deferred_init

        if self.example is None:
            with deferred_init():
                self.make()
        return self.example


def loss_of(output: Any) -> torch.Tensor:
    """The loss in the output of a model. Raises UsageError where it has none."""
    from meshwright_parallel.verification.verify import find_loss

    value = find_loss(output)
    if value is None:
        raise UsageError(
            f"the model returned a {type(output).__name__} without a loss (a number, its .loss or its 'loss'). The command "
            "line calls the model as it is: let --model file.py:function return a module that computes its loss, and a "
            "batch with labels"
        )
    return value


def resolve(
    name: str,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    defaults: Mapping[str, int] = MappingProxyType({}),
) -> Source:
    """The model and batch that `--model NAME` means.

    Args:
        name: see the docstring of this module.
        batch_size, sequence_length: rows and tokens of the batch; None leaves it to the function, else is ROWS and TOKENS.
        seed: of the default generator whenever a model is built.
        defaults: sizes used in place of ROWS, TOKENS and a function's defaults, by argument name.

    Raises UsageError: there is no such model, it does not return a model and a batch, or it would ignore a given size.
    """
    from meshwright.demo.models import RECIPES
    from meshwright.demo.tasks import batches, read_text

    for option, value in (("--batch-size", batch_size), ("--sequence-length", sequence_length)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value} is less than 1; give a whole number of at least 1")
    rows = batch_size or defaults.get("batch_size", ROWS)
    tokens = sequence_length or defaults.get("sequence_length", TOKENS)
    if name in RECIPES:
        check_tokens(name, sequence_length)
        recipe = RECIPES[name]
        text = read_text(at_least=recipe.rows.bytes_per_row(tokens))
        batch = next(batches(recipe.rows(text, tokens, rows, seed), rows))
        return Source(name, lambda: (recipe.make(tokens), batch), batch, seed)
    if name.endswith(".json"):
        return _config(Path(name), rows, tokens, seed)
    if ":" in name:
        return _function(name, {"batch_size": batch_size, "sequence_length": sequence_length}, seed, defaults)
    if name.endswith(".py"):
        raise UsageError(
            f"--model {name} is a file; name a function of it that returns (model, batch), as {name}:make"
        )
    raise UsageError(
        f"--model {name} is not known; give one of {', '.join(RECIPES)}, a transformers config.json, "
        "or file.py:function that returns (model, batch)" + suggestion(name, RECIPES)
    )


def check_tokens(name: str, sequence_length: int | None) -> None:
    """Refuse a sequence length that a demo model would ignore. Raises UsageError."""
    from meshwright.demo.models import RECIPES

    if sequence_length is not None and RECIPES[name].rows.fixed:
        text = f"--sequence-length {sequence_length} has no effect on {name}, whose rows have a fixed size; leave it out"
        raise UsageError(text)


def _config(path: Path, batch_size: int, sequence_length: int, seed: int) -> Source:
    import torch

    config = config_of("--model", path)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch_size, sequence_length), generator=generator, device=HOST)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return Source(path.stem, lambda: (model_of("--model", config), batch), batch, seed)


def function_of(option: str, name: str) -> Callable[..., Any]:
    """The function that `file.py:function` or `module:function` names. Raises UsageError; `option`: where it was named."""
    file, _, attribute = name.rpartition(":")
    try:
        module = importlib.import_module(file) if not file.endswith(".py") else _executed(file)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{option} {name}: {file} cannot be imported ({reason}); check the path") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(
            f"{option} {name}: {file} has no function {attribute!r}; name one of its functions"
            + suggestion(attribute, names)
        )
    return function


def call_with(option: str, name: str, **offered: object) -> Any:
    """What a named function returns, called with those of the offered keywords that it has. Raises UsageError."""
    function = function_of(option, name)
    try:
        parameters = inspect.signature(function).parameters
        return function(**{key: value for key, value in offered.items() if key in parameters})
    except MeshwrightError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{option} {name} raised {reason}; mend the function") from error


def _function(name: str, sizes: Mapping[str, int | None], seed: int, defaults: Mapping[str, int]) -> Source:
    from torch import nn

    function = function_of("--model", name)
    keywords = _size_keywords(name, function, sizes, defaults)

    def produce() -> tuple[nn.Module, Any]:
        try:
            result = function(**keywords)
        except MeshwrightError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(f"--model {name} raised {reason}; mend the function") from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
            kind = type(result).__name__
            raise UsageError(f"--model {name} returned a {kind}; it must return (model, batch)")
        return result

    return Source(name.rpartition(":")[2], produce, seed=seed)


def _size_keywords(
    name: str, function: Callable[..., Any], sizes: Mapping[str, int | None], defaults: Mapping[str, int]
) -> dict[str, int]:
    """The sizes that the function is called with. Raises UsageError where it takes no given size, or needs other arguments."""
    parameters: Mapping[str, inspect.Parameter] = {}
    # a function written in C has no signature
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    keywords: dict[str, int] = {}
    for key, value in sizes.items():
        parameter, option = parameters.get(key), f"--{key.replace('_', '-')}"
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
        by_name = parameter is not None and parameter.kind not in positional
        if value is not None and not (takes_any or by_name):
            raise UsageError(
                f"{option} {value}: {name} brings a batch of its own and has no parameter {key}; give it one, as in "
                f"def {name.rpartition(':')[2]}({key}={value}), or leave {option} out"
            )
        if value is not None:
            keywords[key] = value
        elif (takes_any or by_name) and key in defaults:
            keywords[key] = defaults[key]
        elif by_name and parameter is not None and parameter.default is parameter.empty:
            keywords[key] = ROWS if key == "batch_size" else TOKENS
    for key, parameter in parameters.items():
        variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not variable and key not in keywords:
            raise UsageError(
                f"--model {name} wants an argument {key!r}; only batch_size and sequence_length are given: give {key} a default"
            )
    return keywords


def _executed(file: str) -> Any:
    """The module of a Python file."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # so that classes of the file can be pickled and found by name
    sys.modules[spec.name] = module
    # the file may import modules of its folder, as under `python file.py`
    sys.path.insert(0, str(Path(file).resolve().parent))
    spec.loader.exec_module(module)
    return module
