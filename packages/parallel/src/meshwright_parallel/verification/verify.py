"""Check the promise on a user's own model: a few steps in parallel against the same steps on one device.

Both runs start from the same seed and see the same batch; every rank runs the one-device reference itself. Each step
compares the loss, every gradient, every parameter and buffer after the step, and the optimizer's state, each relative
to its own largest value. Two things cannot be compared so, and are reported apart, as no measure:

- a tensor that is rounding noise on one device too. A second run on one device, whose initial weights are one rounding
  away, tells which: it must change the tensor beyond recognition. Such a tensor must be as small in parallel.
- parameters after a step of an optimizer that divides by the gradient's own size (Adam): where a gradient is rounding
  noise, it takes a full step of it. They must stay within the reach of the steps; its moments are compared like gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import init
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_dtensor.model.tied_parameters import tied_names
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_parallel.api.parallelize import parallelize
from meshwright_parallel.ranks import generator_kept
from meshwright_parallel.verification.compare import (
    NOISE_REACH,
    TOLERANCES,
    Tensors,
    agreed,
    compare,
    farthest_move,
    one_rounding_away,
    uncompared,
    whole,
)
from meshwright_parallel.verification.locate import locate
from meshwright_parallel.verification.mixed_reference import HalfTwin
from meshwright_parallel.verification.report import Comparison, Kind, VerificationReport

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

ADAPTIVE = (
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SparseAdam,
)
"""Optimizers of torch whose step does not shrink with the gradient."""


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer: its step is as smooth as the gradient, so that it does not blow up rounding."""
    return torch.optim.SGD(parameters, lr=0.1)


def verify(
    make_model: Callable[[], nn.Module],
    batch: Any,
    plan: ParallelPlan,
    *,
    steps: int = 2,
    optimizer: OptimizerFactory = sgd,
    loss: Callable[[Any], torch.Tensor] | None = None,
    max_norm: float | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    adaptive: bool | None = None,
    plugins: PluginHost | None = None,
) -> VerificationReport:
    """Run `steps` training steps under `plan` and on one device, and compare all that a step computes.

    Args:
        make_model: builds the model; called three times, twice more where something differs, after the same seed
            (deferred_init() inside it is welcome).
        batch: what the model is called with (a dict of keywords, a tuple of arguments or a tensor), the same on
            every rank and in every step.
        plan: the plan to check; its world size is that of the job.
        optimizer: called with the parameters; `torch.optim.SGD(lr=0.1)` by default.
        loss: from the model's output to a 0-dim tensor; by default the output, its `.loss` or its "loss".
        max_norm: clip gradients to this norm in both runs; the gradients compared are the clipped ones.
        seed: of the generator, for initial weights, and again before every step.
        tolerance: largest relative difference that passes; by default that of each dtype (see comparison.TOLERANCES).
        adaptive: the optimizer's step does not shrink with the gradient, so that parameters are no measure; by default
            whether it is one of ADAPTIVE, or made from one.
        plugins: as for `parallelize`.

    Returns:
        The report, the same on every rank. `report.raise_if_bad()` turns failures into VerificationError.

    Raises:
        UsageError: the model's output holds no loss.
        whatever `parallelize` raises.
    """
    if steps < 1:
        raise UsageError(f"steps={steps} checks nothing; use at least 1")
    init()
    args, kwargs = _arguments(batch)
    with generator_kept():
        torch.manual_seed(seed)
        reference = make_model()
        torch.manual_seed(seed)
        parallel = parallelize(make_model(), plan, batch=batch, plugins=plugins)
        torch.manual_seed(seed)
        neighbour = make_model()
        half = None if plan.precision is None else DTYPES[plan.precision.parameters]
        if half == torch.float32:
            half = None
        if half is not None and tolerance is None:
            tolerance = TOLERANCES[half]
        one_rounding_away(neighbour.parameters(), half)
        one, near = _Run(reference, optimizer, half), _Run(neighbour, optimizer, half)
        many = _Run(parallel, optimizer)
        if adaptive is None:
            adaptive = isinstance(one.optimizer, ADAPTIVE)
        comparisons: list[Comparison] = []
        losses: list[tuple[float, float]] = []
        reach = dict.fromkeys(one.parameters(), 0.0)
        divided = stages_of(parallel) is not None
        # before the first step the values must be equal bit for bit
        comparisons += compare(-1, "parameter", one.parameters(), many.parameters(), 0.0, found_only=divided)
        for step in range(steps):
            found = []
            for run in (one, many, near):
                torch.manual_seed(seed + 1 + step)
                found.append(run.step(args, kwargs, loss, max_norm))
            losses.append((float(found[0].double()), float(found[1].double())))
            comparisons += compare(step, "loss", {"": found[0]}, {"": found[1]}, tolerance)
            pair = partial(_compare_runs, step, one, many, near, tolerance)
            gradients = pair("gradient")
            comparisons += gradients
            noise = {c.name for c in gradients if not c.measured}
            before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
            for run in (one, many, near):
                run.update()
            for name, move in farthest_move(before, one.parameters()).items():
                # both runs may have gone their own way, as far as their noise is large
                reach[name] += (NOISE_REACH if name in noise else 2.0) * move
            comparisons += pair("parameter", reach=reach if adaptive else {})
            comparisons += pair("buffer")
            comparisons += pair("state")
        every = agreed(comparisons, divided)
        if divided:  # what nobody holds is compared by nobody
            every += uncompared(every, -1, "parameter", one.parameters(), "float32")
        report = VerificationReport(
            model=type(reference).__name__,
            degrees=dict(plan.degrees),
            steps=steps,
            losses=tuple(losses),
            comparisons=tuple(every),
            tied=tied_names(reference),
        )
        if report.ok or divided or not any(c.step >= 0 for c in report.failures):
            return report
        fresh = []
        for _ in range(2):
            torch.manual_seed(seed)
            fresh.append(make_model())
        parallelize(fresh[1], plan, batch=batch, plugins=plugins)

        def forward(model: nn.Module) -> torch.Tensor:
            output = model(*args, **kwargs)
            return loss_of(output) if loss is None else loss(output)

        return replace(report, fault=locate(fresh[0], fresh[1], forward, seed + 1, tolerance))


def _compare_runs(
    step: int,
    one: _Run,
    many: _Run,
    near: _Run,
    tolerance: float | None,
    kind: Kind,
    reach: Mapping[str, float] = MappingProxyType({}),
) -> list[Comparison]:
    return compare(
        step,
        kind,
        one.all(kind),
        many.all(kind),
        tolerance,
        neighbour=near.all(kind),
        reach=reach,
        found_only=stages_of(many.model) is not None,
    )


class _Run:
    """One model in training, and what can be compared of it."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory, half: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.twin = None if half is None else HalfTwin(model, half)
        self.optimizer = optimizer(p for p in model.parameters() if p.requires_grad)
        division = stages_of(model)
        aliases = {} if division is None else division.aliases  # a tied one goes by its first name
        self.named = {aliases.get(name, name): p for name, p in model.named_parameters()}
        self.names = {id(p): name for name, p in self.named.items()}

    def step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Callable[[Any], torch.Tensor] | None,
        max_norm: float | None,
    ) -> torch.Tensor:
        """Forward and backward; the loss as a plain tensor."""
        from meshwright_parallel.optim.clip_grad import clip_grad_norm_

        self.optimizer.zero_grad()
        if self.twin is not None:
            args, kwargs = self.twin.inputs(args, kwargs)
        output = (self.model if self.twin is None else self.twin.model)(*args, **kwargs)
        value = loss_of(output) if loss is None else loss(output)
        value.backward()
        if self.twin is not None:
            self.twin.hand_over()
        if max_norm is not None:
            clip_grad_norm_(self.model.parameters(), max_norm)
        plain = whole(value)
        assert plain is not None
        return plain

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def all(self, kind: Kind) -> Tensors:
        """The tensors of one kind by name."""
        tensors = {
            "gradient": self.gradients,
            "parameter": self.parameters,
            "buffer": self.buffers,
            "state": self.state,
        }
        return tensors[kind]()

    def gradients(self) -> Tensors:
        return {name: p.grad for name, p in self.named.items() if p.requires_grad}

    def parameters(self) -> Tensors:
        return dict(self.named)

    def buffers(self) -> Tensors:
        return dict((self.model if self.twin is None else self.twin.model).named_buffers())

    def state(self) -> Tensors:
        """The tensors that the optimizer keeps per parameter."""
        found: dict[str, torch.Tensor | None] = {}
        for parameter, entries in self.optimizer.state.items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    found[f"{self.names.get(id(parameter), '?')}/{key}"] = value
        return found


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned: a 0-dim tensor, its `.loss` or its "loss"; None where there is none."""
    candidates = [
        output,
        getattr(output, "loss", None),
        output.get("loss") if isinstance(output, Mapping) else None,
    ]
    return next((v for v in candidates if isinstance(v, torch.Tensor) and v.dim() == 0), None)


def loss_of(output: Any) -> torch.Tensor:
    """As `find_loss`.

    Raises:
        UsageError: there is none.
    """
    value = find_loss(output)
    if value is None:
        raise UsageError(
            f"the model returned a {type(output).__name__} in which no loss was found (a 0-dim tensor, its .loss or its "
            "'loss'); say where it is: loss=lambda output: ..."
        )
    return value
