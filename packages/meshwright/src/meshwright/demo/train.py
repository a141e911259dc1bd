"""Train in parallel and on one device, and compare the losses of every step.

The parallel part of `run` is the loop of a single-device script; everything else is there to watch it. Optimizers: see
`OPTIMIZERS` for why AdamW is given a larger epsilon here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

import meshwright as mw
from meshwright import ranks
from meshwright.demo.models import RECIPES
from meshwright.demo.tasks import batches, loader, read_text
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.device import forked_random, generator_of, on_device

# absolute, on the loss, in fp32: about ten units in the last place of a loss near 5
TOLERANCE = 5e-6
# the same where it is computed in half precision: a few roundings of bf16
HALF_TOLERANCE = 5e-2

# Adam divides a gradient by its own size: where the gradient is zero but for rounding (the bias of an attention's keys,
# say) the step is rounding noise at full size, and two runs that sum in another order part, however right they are. An
# epsilon well above that noise and well below real gradients keeps such steps small; training is as good.
OPTIMIZERS: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], float]] = MappingProxyType(
    {
        "adamw": (partial(torch.optim.AdamW, eps=1e-5), 5e-4),
        "sgd": (partial(torch.optim.SGD, momentum=0.9), 1e-2),
    }
)
# steps over which the learning rate rises to its value
WARM_UP = 10


@dataclass(frozen=True)
class Options:
    """What to train and how; the defaults are the main job.

    sequence_length in tokens, batch_size in rows of the global batch. plan: a plan file, instead of planning.
    degrees: pinned by axis ("dp", "cp", "tp"). zero, zero_degree, precision: as for `plan`.
    """

    model: str = "gpt2"
    steps: int = 50
    degrees: Mapping[str, int] = field(default_factory=dict)
    zero: int | None = None
    zero_degree: int | None = None
    precision: str | None = None
    text: Path | None = None
    plan: Path | None = None
    batch_size: int = 8
    sequence_length: int = 128
    seed: int = 0
    optimizer: str = "adamw"
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        for name, value, names in (("model", self.model, RECIPES), ("optimizer", self.optimizer, OPTIMIZERS)):
            if value not in names:
                raise UsageError(f"--{name} {value} is not known; choose one of {', '.join(names)}")
        for name in ("steps", "batch_size", "sequence_length"):
            option, value = name.replace("_", "-"), getattr(self, name)
            if value < 1:
                raise UsageError(f"--{option} {value} is less than 1; give a larger one")
        if self.learning_rate is not None and not 0.0 < self.learning_rate < math.inf:
            text = f"--learning-rate {self.learning_rate} is no rate; give a number above 0, such as 1e-3"
            raise UsageError(text)
        pinned = (self.zero, self.zero_degree, self.precision)
        if self.plan is not None and (self.degrees or any(value is not None for value in pinned)):
            raise UsageError(
                f"--plan {self.plan} already fixes the degrees; leave out --dp, --cp, --tp, --zero, --zero-degree and "
                "--precision, or the plan"
            )


@dataclass(frozen=True)
class Step:
    """One step: both losses, and the seconds each took on rank 0."""

    step: int
    parallel: float
    single: float
    parallel_seconds: float
    single_seconds: float

    @property
    def difference(self) -> float:
        """Absolute difference of the losses; infinite when one is not a number."""
        difference = abs(self.parallel - self.single)
        return math.inf if math.isnan(difference) else difference


@dataclass
class Outcome:
    """The run as it went; `passed` is the verdict."""

    model: str
    world_size: int
    degrees: dict[str, int]
    parameters: int
    steps: list[Step] = field(default_factory=list)
    tolerance: float = TOLERANCE

    @property
    def layout(self) -> str:
        """The mesh in short, as "dp2 x tp2"."""
        return " x ".join(f"{axis}{n}" for axis, n in self.degrees.items() if n > 1) or "one rank"

    @property
    def worst(self) -> Step:
        """The step at which the losses differ most."""
        return max(self.steps, key=lambda step: step.difference)

    @property
    def passed(self) -> bool:
        """Whether the losses agree at every step."""
        return self.worst.difference <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        names = ("model", "world_size", "degrees", "parameters", "tolerance", "passed")
        return {
            **{name: getattr(self, name) for name in names},
            "worst_difference": self.worst.difference,
            "worst_step": self.worst.step,
            "steps": [{**asdict(step), "difference": step.difference} for step in self.steps],
        }


class Watcher(Protocol):
    """Told on rank 0 what happens."""

    def planned(self, plan: Any, outcome: Outcome, options: Options) -> None: ...

    def stepped(self, step: Step) -> None: ...


class _Single:
    """The same training on one device, with random numbers of its own."""

    def __init__(self, options: Options, make: Callable[[], nn.Module], rows: Any) -> None:
        self.device = mw.init()
        self.generator = generator_of(self.device)
        with forked_random(self.device):
            torch.manual_seed(options.seed)
            self.model = make().to(self.device)
            self.random = self.generator.get_state()
        self.optimizer, self.scheduler = make_optimizer(self.model, options)
        self.batches = batches(rows, options.batch_size)

    def step(self) -> tuple[float, float]:
        """One step: the loss, and the seconds it took."""
        start = time.perf_counter()
        batch = on_device(next(self.batches), self.device)
        with forked_random(self.device):
            self.generator.set_state(self.random)
            loss = self.model(**batch).loss
            loss.backward()
            self.random = self.generator.get_state()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item(), time.perf_counter() - start


def make_optimizer(model: nn.Module, options: Options) -> tuple[torch.optim.Optimizer, Any]:
    """The stock optimizer and learning rate schedule, the same for both runs."""
    make, rate = OPTIMIZERS[options.optimizer]
    optimizer = make(model.parameters(), lr=options.learning_rate or rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    return optimizer, schedule


def run(options: Options, watcher: Watcher | None) -> Outcome:
    """Train on every rank of this job; the one-device run happens on rank 0, in turn with the parallel one.

    watcher: told on rank 0; other ranks pass None.
    Raises what planning and applying a plan raise: UsageError, InfeasibleError.
    """
    torch.set_num_threads(1)
    device = mw.init()
    recipe = RECIPES[options.model]
    rows = options.steps * options.batch_size
    text = read_text(options.text, at_least=recipe.rows.bytes_per_row(options.sequence_length))
    data = recipe.rows(text, options.sequence_length, rows, options.seed)
    example = on_device(next(batches(data, options.batch_size)), device)

    torch.manual_seed(options.seed)
    with mw.deferred_init():
        model = recipe.make(options.sequence_length)
    if options.plan is None:
        names = ("optimizer", "zero", "zero_degree", "precision")
        keywords: dict[str, Any] = {name: getattr(options, name) for name in names}
        model = mw.auto_parallelize(model, example, **{**keywords, **options.degrees})
    else:
        model = mw.parallelize(model, mw.ParallelPlan.load(options.plan), batch=example)
    optimizer, schedule = make_optimizer(model, options)

    plan: Any = model.parallel_plan
    count = sum(parameter.numel() for parameter in model.parameters())
    half = plan.precision is not None and plan.precision.parameters != "fp32"
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    outcome = Outcome(options.model, ranks.world_size(), dict(plan.degrees), count, tolerance=tolerance)
    make = partial(recipe.make, options.sequence_length)
    single = _Single(options, make, data) if ranks.rank() == 0 else None
    if watcher:
        watcher.planned(plan, outcome, options)

    start = time.perf_counter()
    for number, batch in enumerate(mw.shard_loader(loader(data, options.batch_size))):
        loss = model(**on_device(batch, device)).loss
        loss.backward()
        mw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        value, seconds = loss.item(), time.perf_counter() - start
        if single is not None:
            single_loss, single_seconds = single.step()
            step = Step(number, value, single_loss, seconds, single_seconds)
            outcome.steps.append(step)
            if watcher:
                watcher.stepped(step)
        start = time.perf_counter()
    return outcome
