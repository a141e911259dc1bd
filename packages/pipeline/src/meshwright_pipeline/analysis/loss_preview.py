"""Predicts at planning time, from a few rows of the example batch, whether a loss is additive over microbatches.

It runs the proof of the first step (see loss_additivity) on a skeleton of the model, with two microbatches of one or two
rows and the first tokens of long sequences. The first step has other sizes and values: it may decide otherwise, and warns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.deferred.materialize import has_values
from meshwright_dtensor.devices import HOST, on_host
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_pipeline._torch import pytree, tensors_in
from meshwright_pipeline.analysis.loss_additivity import INPUT_GRADIENT, Reason, prove_additive
from meshwright_pipeline.partition.repeated_units import RepeatedUnitProfiler
from meshwright_pipeline.pytrees import expanded_zeros, tensors_of
from meshwright_pipeline.trace.loss import loss_of
from meshwright_pipeline.trace.meta_model import skeleton
from meshwright_pipeline.trace.microbatch import Call
from meshwright_pipeline.trace.profile import Profile
from meshwright_pipeline.trace.profiler import Profiler
from meshwright_pipeline.trace.side_outputs import CannotBeCut

ROWS = 4
"""Rows of the reduced batch: two microbatches of two rows. For microbatches of one row, half of them."""

TOKENS, LONGEST = 16, 4096
"""Tokens per row of the reduced batch; the second number is tried if the model does not run on so few."""


def token_counts(size: BatchSize) -> list[int]:
    """The numbers of tokens per row to try."""
    return sorted({min(most, size.tokens or 0) for most in (TOKENS, LONGEST)})


@dataclass(frozen=True)
class LossForecast:
    """Why a loss is assumed to need the whole batch; "" if it is additive over microbatches."""

    why: str = ""

    @property
    def adds(self) -> bool:
        """Whether a backward may start before the last forward has ended."""
        return not self.why

    def note(self, microbatches: int) -> str:
        """A one-line note for the plan."""
        return (
            f"pipeline: no backward begins before the last forward has ended, whatever the schedule, so each rank holds the "
            f"activations of all {microbatches} microbatches, as under gpipe: {self.why}"
        )


class LossChecker:
    """Predicts whether the loss of a model with these units is additive. The model is not changed."""

    def __init__(self, model: nn.Module, units: tuple[str, ...]) -> None:
        self._model, self._units = model, units
        self._profiler: RepeatedUnitProfiler | None = None
        self.keeping: Mapping[str, frozenset[str]] = {}
        """See Profile.keeping; of the last check."""

    def check(self, example: tuple[Any, Mapping[str, Any]], single: bool = False) -> LossForecast:
        """The forecast for an example batch: positional and keyword arguments, with or without values.

        `single`: microbatches have one row. Models may skip operations that repeat rows then.

        Raises CannotBeCut: the model cannot run as a pipeline.
        """
        args, kwargs = example
        size = BatchSize.of((t.shape, t.is_floating_point()) for t in tensors_of((args, dict(kwargs))))
        rows = 2 if single else min(ROWS, size.rows or 1) // 2 * 2
        if rows < 2 or (size.rows or 1) < 2:
            return LossForecast("the example batch has too few rows to split")
        error: Exception | None = None
        for tokens in token_counts(size):
            try:
                call = shrink_batch((args, dict(kwargs)), size, rows, tokens)
                model, units = self._model, self._units
                profiler = self._profiler or RepeatedUnitProfiler(skeleton_with_values(model, units), units)
                # a run that fails half-way may leave it unusable
                self._profiler = None
                profile = profiler.run(*call)
            except CannotBeCut:
                raise
            except Exception as raised:
                # the model may fail on few tokens, or on tensors without values
                error = raised
                continue
            self._profiler, self.keeping = profiler, profile.keeping
            return _forecast(profiler, profile, call)
        if all(_has_values(tensor) for tensor in tensors_of((args, kwargs))):
            self._check_whole((args, dict(kwargs)))
        text = " ".join(str(error).split())[:200]
        return LossForecast(f"the loss could not be analysed when planning ({type(error).__name__}: {text})")

    def _check_whole(self, batch: Call) -> None:
        """Run the profile of the first step: a model that does not run on a few rows may run on the batch, or never."""
        on_cpu: Call = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(HOST), batch)
        try:
            Profiler(skeleton_with_values(self._model, self._units), self._units).run(*on_cpu)
        except UnsupportedError as error:
            raise CannotBeCut(str(error)) from error


def _forecast(profiler: Profiler, profile: Profile, call: Call) -> LossForecast:
    if loss_of(profile.output) is None:
        return LossForecast(
            "the model returns no loss for the example batch (a scalar result, its .loss, its ['loss'] or its first element); "
            "the time of a loss outside of the model, and of sending it the outputs, is not predicted"
        )
    if any(tensor.requires_grad for tensor in tensors_of(call)):
        return LossForecast(str(INPUT_GRADIENT))
    proof = prove_additive(profiler, profile, call, 2)
    if isinstance(proof, Reason):
        return LossForecast(f"the loss is not proven additive over microbatches ({proof})")
    return LossForecast()


def shrink_batch(call: Call, size: BatchSize, rows: int, tokens: int) -> Call:
    """The first rows and tokens of a batch, on the CPU. Tensors without values become ones."""

    def shrunk(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        for dim, length in enumerate(shape):
            if not dim and length == size.rows:
                shape[0] = rows
            elif length == size.tokens:
                shape[dim] = tokens
        if not _has_values(tensor):
            return torch.ones(shape, dtype=tensor.dtype, device=HOST)
        return tensor.detach()[tuple(slice(n) for n in shape)].to(HOST).requires_grad_(tensor.requires_grad)

    result: Call = pytree.tree_map_only(torch.Tensor, shrunk, call)
    return result


def skeleton_with_values(model: nn.Module, units: tuple[str, ...]) -> nn.Module:
    """A skeleton on the CPU. Parameters and buffers outside of units without values become zeros."""
    copied = skeleton(model, units)
    for table in (table for part in copied.modules() for table in tensors_in(part)):
        for name, tensor in table.items():
            if tensor is None or (_has_values(tensor) and on_host(tensor.device)):
                continue
            trained = isinstance(tensor, nn.Parameter)
            if _has_values(tensor):
                value = tensor.detach().to(HOST)
            else:
                # code may write to a buffer
                value = (
                    expanded_zeros(tensor, HOST)
                    if trained
                    else torch.zeros(tensor.shape, dtype=tensor.dtype, device=HOST)
                )
            table[name] = nn.Parameter(value, tensor.requires_grad) if trained else value
    return copied


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor with values that code may read."""
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and has_values(tensor)
