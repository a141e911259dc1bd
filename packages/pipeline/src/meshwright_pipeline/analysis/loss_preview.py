"""What planning can know of a loss: whether it adds up over microbatches, from a few rows of the example batch.

The proof is that of the first step (see adding), on a skeleton of the model, with two microbatches of one or two rows and, of a
long sequence, its first tokens; so the first step, which has other sizes and values, may find otherwise, and says so then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.deferred.materialize import has_values
from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_pipeline._torch import pytree, tensors_in
from meshwright_pipeline.analysis.loss_additivity import INPUT_GRADIENT, NotAdditive, prove_additive
from meshwright_pipeline.partition.repeated_units import RepeatedUnitProfiler
from meshwright_pipeline.pytrees import tensors_of
from meshwright_pipeline.trace.loss import loss_of
from meshwright_pipeline.trace.meta_model import skeleton
from meshwright_pipeline.trace.microbatch import Call
from meshwright_pipeline.trace.profile import Profile
from meshwright_pipeline.trace.profiler import Profiler
from meshwright_pipeline.trace.side_outputs import CannotBeCut

ROWS = 4
"""Rows that are looked at: two in each of two microbatches; of microbatches of one row, half of them."""

TOKENS, LONGEST = 16, 4096
"""Tokens of a row that are looked at; where the model does not run on so few, all of them up to the longest."""


@dataclass(frozen=True)
class LossForecast:
    """Why a loss is taken to be made of the whole batch; "" where it adds up over microbatches."""

    why: str = ""

    @property
    def adds(self) -> bool:
        """Whether backwards may begin before the last forward has ended."""
        return not self.why

    def note(self, microbatches: int) -> str:
        """What users should know, in a line."""
        return (
            f"pipeline: no backward begins before the last forward has ended, whatever the schedule, so each rank holds the "
            f"activations of all {microbatches} microbatches, as under gpipe: {self.why}"
        )


class LossChecker:
    """Looks at the loss of one model.

    Args:
        model: it is left as it is.
        units: names of its units.
    """

    def __init__(self, model: nn.Module, units: tuple[str, ...]) -> None:
        self._model, self._units = model, units
        self._profiler: RepeatedUnitProfiler | None = None

    def look(self, example: tuple[Any, Mapping[str, Any]], single: bool = False) -> LossForecast:
        """What is foreseen for an example batch: its positional and keyword arguments, with or without values.

        `single`: microbatches have one row, of which models make what they make of none other (they leave out what repeats
        rows).

        Raises:
            CannotBeCut: no first step could run it as a pipeline.
        """
        args, kwargs = example
        size = BatchSize.of((t.shape, t.is_floating_point()) for t in tensors_of((args, dict(kwargs))))
        rows = 2 if single else min(ROWS, size.rows or 1) // 2 * 2
        if rows < 2 or (size.rows or 1) < 2:
            return LossForecast("the example batch has no rows that microbatches could share")
        error: Exception | None = None
        long = size.tokens or 0
        for tokens in dict.fromkeys([min(TOKENS, long), min(LONGEST, long)]):
            try:
                call = shrink_batch((args, dict(kwargs)), size, rows, tokens)
                profiler = self._profiler or RepeatedUnitProfiler(
                    skeleton_with_values(self._model, self._units), self._units
                )
                self._profiler = None  # another one, should this fail half-way
                entire = profiler.run(*call)
            except CannotBeCut:  # nor will it be in a first step
                raise
            except Exception as raised:  # whatever a model does with so few tokens, or tensors without values
                error = raised
                continue
            self._profiler = profiler
            return _judged(profiler, entire, call)
        text = " ".join(str(error).split())[:200]
        return LossForecast(f"the loss could not be looked at when planning ({type(error).__name__}: {text})")


def _judged(profiler: Profiler, entire: Profile, call: Call) -> LossForecast:
    if loss_of(entire.output) is None:
        return LossForecast(
            "the model returns no loss for the example batch (a number that is its result, its .loss, its ['loss'] or its first "
            "element); what a loss outside of it takes, and sending it the outputs, is not predicted"
        )
    if any(tensor.requires_grad for tensor in tensors_of(call)):
        return LossForecast(str(INPUT_GRADIENT))
    try:
        prove_additive(profiler, entire, call, 2)
    except NotAdditive as unproven:
        return LossForecast(f"the loss is not proven to add up over microbatches ({unproven})")
    return LossForecast()


def shrink_batch(call: Call, size: BatchSize, rows: int, tokens: int) -> Call:
    """The first rows and tokens of a batch, on the CPU; what has no values is ones."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        for dim, length in enumerate(shape):
            if not dim and length == size.rows:
                shape[0] = rows
            elif length == size.tokens:
                shape[dim] = tokens
        if not _ordinary(tensor):
            return torch.ones(shape, dtype=tensor.dtype)
        return tensor.detach()[tuple(slice(n) for n in shape)].cpu().requires_grad_(tensor.requires_grad)

    found: Call = pytree.tree_map_only(torch.Tensor, one, call)
    return found


def skeleton_with_values(model: nn.Module, units: tuple[str, ...]) -> nn.Module:
    """A skeleton on the CPU; parameters and buffers outside of units that have no values are zeros."""
    made = skeleton(model, units)
    for part in made.modules():
        for table in tensors_in(part):
            table.update({name: _real(tensor) for name, tensor in table.items() if tensor is not None})
    return made


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if _ordinary(tensor):
        if tensor.device.type == "cpu":
            return tensor
        found = tensor.detach().cpu()
    elif isinstance(tensor, nn.Parameter):
        found = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    else:
        found = torch.zeros(tensor.shape, dtype=tensor.dtype)  # code may write to it
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _ordinary(tensor: torch.Tensor) -> bool:
    """Whether it holds numbers that code may look at."""
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and has_values(tensor)
