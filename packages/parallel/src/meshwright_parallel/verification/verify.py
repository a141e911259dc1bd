"""Compare a few training steps of a user's model in parallel with the same steps on one device.

Both runs start from the same seed and see the same batch. Every rank runs the one-device reference itself. Each step
compares the loss, every gradient, every parameter and buffer after the step, and the optimizer's state, each relative
to its own largest value. Two kinds of tensors cannot be compared this way, and are reported separately, as "no measure":

- tensors that are rounding noise on one device too. A second run on one device, whose initial weights are one rounding
  away, finds them: it must change them completely. Such a tensor must be as small in parallel.
- parameters after a step of an optimizer that divides by the gradient's own size (Adam). Where a gradient is rounding
  noise, Adam takes a full step of it. So these parameters must stay within the sum of the steps. Adam's moments are
  compared like gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn, optim

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import init
from meshwright_dtensor.model.batch_size import call_arguments
from meshwright_dtensor.model.device import forked_random, on_device
from meshwright_dtensor.model.precision import DTYPES, cast_buffers
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_dtensor.model.tied_parameters import tied_names
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.trace.one_device import show_one_device
from meshwright_parallel._torch.core import map_tensors
from meshwright_parallel.api.parallelize import parallelize
from meshwright_parallel.optim.clip_grad import clip_grad_norm_
from meshwright_parallel.optim.optimizer_steps import ELEMENTWISE
from meshwright_parallel.verification import compare
from meshwright_parallel.verification.locate import locate
from meshwright_parallel.verification.report import Comparison, Kind, VerificationReport

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

ADAPTIVE = (*ELEMENTWISE.difference((optim.SGD, optim.ASGD)), optim.Adafactor, optim.Muon, optim.SparseAdam)
"""Optimizers of torch whose step does not shrink with the gradient."""


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer: its step is proportional to the gradient, so it does not amplify rounding."""
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
        make_model: builds the model; called three times, and twice more where something differs, after the same seed
            (it may use deferred_init()).
        batch: what the model is called with (a dict of keywords, a tuple of arguments or a tensor), the same on
            every rank and in every step.
        plan: the plan to check; its world size is that of the job.
        optimizer: called with the parameters; `torch.optim.SGD(lr=0.1)` by default.
        loss: from the model's output to a 0-dim tensor; by default the output, its `.loss` or its "loss".
        max_norm: clip gradients to this norm in both runs; the gradients compared are the clipped ones.
        seed: of the generator, for initial weights, and again before every step.
        tolerance: largest relative difference that passes; by default that of each dtype (see compare.TOLERANCES).
        adaptive: the optimizer's step does not shrink with the gradient, so that parameters are no measure; by default
            whether the optimizer is an instance of a class in ADAPTIVE.
        plugins: as for `parallelize`.

    Returns:
        The report, the same on every rank. `report.raise_if_bad()` turns failures into VerificationError.

    Raises UsageError: the model's output holds no loss, or the plan does not draw the random numbers of one device. Errors of
    `parallelize` are raised too.
    """
    _check(plan, steps)
    device = init()
    batch = on_device(batch, device)
    call = _Call(*call_arguments(batch), loss)

    def seeded_model() -> nn.Module:
        torch.manual_seed(seed)
        return make_model()

    with forked_random(device):
        reference = seeded_model().to(device)
        show_one_device(reference)
        parallel = parallelize(seeded_model(), plan, batch=batch, plugins=plugins)
        perturbed = seeded_model().to(device)
        dtype = None if plan.precision is None else DTYPES[plan.precision.parameters]
        if dtype == torch.float32:
            dtype = None
        if dtype is not None and tolerance is None:
            tolerance = compare.TOLERANCES[dtype]
        compare.one_rounding_away(perturbed.parameters(), dtype)
        runs = _Runs(
            one_device=_Run(reference, optimizer, dtype),
            parallel=_Run(parallel, optimizer),
            perturbed=_Run(perturbed, optimizer, dtype),
            tolerance=tolerance,
        )
        adaptive = isinstance(runs.one_device.optimizer, ADAPTIVE) if adaptive is None else adaptive
        runs.compare_initial()
        for step in range(steps):
            runs.step(step, seed + 1 + step, call, max_norm, adaptive)
        report = VerificationReport(
            model=type(reference).__name__,
            degrees=dict(plan.degrees),
            steps=steps,
            losses=tuple(runs.losses),
            comparisons=tuple(compare.merge_ranks(runs.comparisons, runs.is_staged)),
            tied=tied_names(reference),
        )
        if report.ok or runs.is_staged or not any(c.step >= 0 for c in report.failures):
            return report
        fresh = seeded_model().to(device), seeded_model()
        parallelize(fresh[1], plan, batch=batch, plugins=plugins)
        return replace(report, fault=locate(*fresh, call, seed + 1, tolerance))


def _check(plan: ParallelPlan, steps: int) -> None:
    if steps < 1:
        raise UsageError(f"steps={steps} checks nothing; use at least 1")
    if plan.rng != "exact":
        raise UsageError(
            f"plan field rng is {plan.rng!r}, whose random numbers are not those of one device, which verify compares with; verify "
            "plan.replace(rng='exact'), which differs in nothing else"
        )


@dataclass(frozen=True)
class _Call:
    """The call of the model in every step, and the loss of its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None

    def __call__(self, model: nn.Module) -> torch.Tensor:
        output = model(*self.args, **self.kwargs)
        return loss_of(output) if self.loss is None else self.loss(output)


class _MixedReference:
    """Mixed precision on one device: a copy of `master` in `dtype` computes, and the float32 `master` is trained."""

    def __init__(self, master: nn.Module, dtype: torch.dtype) -> None:
        self.master, self.dtype = master, dtype
        self.model = copy.deepcopy(master)
        cast = cast_buffers(self.model)
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for module in self.model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if id(buffer) in cast:
                    setattr(module, name, buffer.to(dtype))

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Refresh the copy's weights from the master; returns the arguments in the copy's precision."""
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
                parameter.grad = None
                parameter.copy_(master)
        return map_tensors(lambda _, t: t.to(self.dtype) if t.dtype == torch.float32 else t, args, kwargs)

    def accumulate_gradients(self) -> None:
        """Add the copy's gradients to those of the master, in float32."""
        for parameter, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad + gradient


class _Run:
    """One model in training, and its tensors that can be compared."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory, compute_dtype: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.mixed = None if compute_dtype is None else _MixedReference(model, compute_dtype)
        self.optimizer = optimizer(p for p in model.parameters() if p.requires_grad)
        self.named = dict(model.named_parameters())
        self.names = {id(p): name for name, p in self.named.items()}

    def backward(self, call: _Call, max_norm: float | None) -> torch.Tensor:
        """Forward and backward; returns the loss as a plain tensor."""
        self.optimizer.zero_grad()
        if self.mixed is None:
            loss = call(self.model)
            loss.backward()
        else:
            args, kwargs = self.mixed.inputs(call.args, call.kwargs)
            loss = replace(call, args=args, kwargs=kwargs)(self.mixed.model)
            loss.backward()
            self.mixed.accumulate_gradients()
        if max_norm is not None:
            clip_grad_norm_(self.model.parameters(), max_norm)
        plain = compare.whole(loss)
        assert plain is not None
        return plain

    def tensors(self, kind: Kind) -> compare.Tensors:
        """The tensors of one kind by name; states are those that the optimizer keeps per parameter."""
        if kind == "gradient":
            return {name: p.grad for name, p in self.named.items() if p.requires_grad}
        if kind == "parameter":
            return dict(self.named)
        if kind == "buffer":
            # whether two names are one buffer is known on the ranks of its stage only
            model = self.model if self.mixed is None else self.mixed.model
            return dict(model.named_buffers(remove_duplicate=False))
        return {
            f"{self.names.get(id(parameter), '?')}/{key}": value
            for parameter, entries in self.optimizer.state.items()
            for key, value in entries.items()
            if isinstance(value, torch.Tensor)
        }


@dataclass
class _Runs:
    """The three runs of a verification, step by step, and their comparisons.

    Attributes:
        perturbed: a run on one device whose initial weights are one rounding away.
        reach: parameter -> largest difference that adaptive steps may have caused so far.
    """

    one_device: _Run
    parallel: _Run
    perturbed: _Run
    tolerance: float | None
    comparisons: list[Comparison] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    reach: dict[str, float] = field(default_factory=dict)

    @property
    def is_staged(self) -> bool:
        """Whether a rank holds the optimizer's states of some stages of the model only."""
        return stages_of(self.parallel.model) is not None

    def compare_initial(self) -> None:
        """Before the first step the values must be equal bit for bit."""
        expected, actual = self.one_device.named, self.parallel.named
        self.comparisons += compare.compare(-1, "parameter", expected, actual, 0.0)

    def step(self, step: int, seed: int, call: _Call, max_norm: float | None, adaptive: bool) -> None:
        """Run one training step in every run, and compare its tensors."""
        runs = (self.one_device, self.parallel, self.perturbed)
        losses = []
        for run in runs:
            torch.manual_seed(seed)
            losses.append(run.backward(call, max_norm))
        self.losses.append((float(losses[0].double()), float(losses[1].double())))
        self.comparisons += compare.compare(step, "loss", {"": losses[0]}, {"": losses[1]}, self.tolerance)
        gradients = self._compare(step, "gradient")
        noise = {c.name for c in gradients if not c.measured}
        before = {name: p.detach().clone() for name, p in self.one_device.model.named_parameters()}
        for run in runs:
            run.optimizer.step()
        for name, old in before.items():
            # the two runs may step in opposite directions, and further where the gradient is noise
            factor = compare.NOISE_REACH if name in noise else 2.0
            change = compare.magnitude(self.one_device.named[name] - old)
            self.reach[name] = self.reach.get(name, 0.0) + factor * change
        self._compare(step, "parameter", self.reach if adaptive else {})
        self._compare(step, "buffer")
        self._compare(step, "state")

    def _compare(self, step: int, kind: Kind, reach: Mapping[str, float] | None = None) -> list[Comparison]:
        runs = (self.one_device, self.parallel, self.perturbed)
        want, got, near = (run.tensors(kind) for run in runs)
        comparisons = compare.compare(
            step,
            kind,
            want,
            got,
            self.tolerance,
            perturbed=near,
            reach=reach or {},
            actual_only=kind == "state" and self.is_staged,
        )
        self.comparisons += comparisons
        return comparisons


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned: a 0-dim tensor, its `.loss` or its "loss"; None where there is none."""
    item = output.get("loss") if isinstance(output, Mapping) else None
    candidates = (output, getattr(output, "loss", None), item)
    return next((v for v in candidates if isinstance(v, torch.Tensor) and v.dim() == 0), None)


def loss_of(output: Any) -> torch.Tensor:
    """As `find_loss`. Raises UsageError: there is none."""
    value = find_loss(output)
    if value is None:
        raise UsageError(
            f"no loss was found in the model's output, a {type(output).__name__}: it must be a 0-dim tensor, or have it as "
            ".loss or ['loss']; otherwise give verify() a function: loss=lambda output: ..."
        )
    return value
