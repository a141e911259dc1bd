"""The plan of one step of a pipelined model, and what its actions leave on a rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from meshwright_pipeline.analysis import loss_additivity
from meshwright_pipeline.runtime.actions.executor import StepRun
from meshwright_pipeline.runtime.actions.full_batch_tail import TailLeaves
from meshwright_pipeline.runtime.input_grads import InputGradients
from meshwright_pipeline.runtime.p2p.step import Failure
from meshwright_pipeline.runtime.prepare import Prepared
from meshwright_pipeline.trace.loss_denominators import Denominators
from meshwright_pipeline.trace.microbatch import Call
from meshwright_pipeline.trace.rng_replay import StepDraws

Tensor = torch.Tensor
LossMode = Literal["per_microbatch", "full_batch"]
"""Where the loss is computed: for each microbatch, so that backwards run in the order of the schedule; or once for the
whole batch, after the forwards of all microbatches. Then backwards run when the results are differentiated."""


@dataclass(frozen=True)
class StepPlan:
    """One call of the model, ready to run.

    Attributes:
        calls: the microbatches. `whole`: the batch. `batch`: the same in words.
        prepared: profile, stages and random numbers for its shapes. `training`: gradients are on.
        loss_mode: where the loss is computed. `returns`: the caller gets the loss alone, or all outputs.
        weight, leaves: in "per_microbatch", how the loss and all outputs follow from those of microbatches.
        numbers: loss denominators of the whole batch, where microbatches need them.
        inputs: inputs that require a gradient; None where there are none.
    """

    calls: list[Call]
    whole: Call
    batch: str
    prepared: Prepared
    training: bool
    loss_mode: LossMode
    returns: Literal["loss", "all"]
    weight: float = 1.0
    leaves: tuple[loss_additivity.Leaf | None, ...] = ()
    numbers: Denominators | None = None
    inputs: InputGradients | None = None

    @property
    def output(self) -> Any:
        """The result of the model in the profile."""
        return self.prepared.profile.output


@dataclass
class StepResult:
    """What the actions of a step leave on this rank; values on the rank of the last stage only.

    Attributes:
        run: the step, whose backwards may still have to run.
        failure: the first error on this rank.
        loss: the part that this rank adds to the loss of the batch, in "per_microbatch"; it requires a gradient where that has one.
        outputs: the leaves to return: ordinary tensors, which require a gradient where they have one.
        tail: what the code after the last unit took, once it has run, in "full_batch".
        drawn: the random numbers of the step.
    """

    plan: StepPlan
    run: StepRun
    failure: Failure | None = None
    loss: Tensor | None = None
    outputs: list[Any] = field(default_factory=list)
    tail: TailLeaves | None = None
    drawn: StepDraws | None = None
