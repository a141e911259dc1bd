"""Every pair and triple of parallelisms on small models, and some with more: how far three steps are from one device.

    python integration_tests/compositions.py                    # all of them, a line each; 1 when any is wrong
    python integration_tests/compositions.py "llama tp+" cp     # those whose name contains one of the texts
    python integration_tests/compositions.py --table            # the same as a table in Markdown
    python integration_tests/compositions.py --store FILE       # go on where a run was cut off

A refusal is an error with its reason, before memory is taken; `legal` says which compositions are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from architectures.float64 import Float64
from compositions_models import MODELS

import meshwright as mw
from meshwright_dtensor.errors import InfeasibleError, PlanError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel.verification.compare import NOISE_REACH, magnitude, max_difference, one_rounding_away

PARALLELISMS = ("tp", "sp", "ep", "cp", "dp", "zero")
STEPS = 3
FLOAT64 = 1e-9
"""Largest relative difference in float64: Adam makes full steps of what rounding leaves of small gradients."""
Label = tuple[int, str, str]
OPTIMIZERS: Mapping[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = MappingProxyType(
    {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    }
)


@dataclass(frozen=True)
class Composition:
    """Parallelisms together, on one model.

    Attributes:
        model: a name in MODELS.
        parts: of PARALLELISMS, and "pp", two stages and two microbatches; "sp" is sequence parallelism, a way of the
            tensor axis: it doubles the tensor degree when both are named.
        stage: that of ZeRO, where it takes part.
        more: further keywords of `mw.plan`.
    """

    model: str
    parts: tuple[str, ...]
    stage: int = 3
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pins(self) -> dict[str, Any]:
        """Keywords of `mw.plan`, every degree pinned."""
        parts = set(self.parts)
        pins: dict[str, Any] = {
            "tp": (2 if "tp" in parts else 1) * (2 if "sp" in parts else 1),
            "cp": 2 if "cp" in parts else 1,
            "ep": 2 if "ep" in parts else 1,
            "dp": (2 if "dp" in parts else 1) * (2 if "zero" in parts else 1),
            "sequence_parallel": "sp" in parts,
        }
        if "pp" in parts:
            pins.update(pp=2, microbatches=2)
        if "zero" in parts:
            pins.update(zero=self.stage, zero_degree=2)
        return {**pins, **self.more}

    @property
    def world_size(self) -> int:
        """Ranks it takes."""
        pins = self.pins
        others = pins.get("degrees", {}).values()
        size = pins.get("pp", 1) * pins["tp"] * pins["cp"] * pins["ep"] * pins["dp"]
        for degree in others:
            size *= degree
        return int(size)

    @property
    def name(self) -> str:
        """As "llama tp+dp+zero3"."""
        shown = [f"zero{self.stage}" if part == "zero" else part for part in self.parts]
        named = {"precision": "{}", "schedule": "{}", "pp": "pp{}", "microbatches": "{} microbatches"}
        shown += [named.get(key, key).format(value) for key, value in self.more.items()]
        return f"{self.model} {'+'.join(shown)}"

    @property
    def legal(self) -> bool:
        """Whether it can be: experts are shared only where there are some."""
        return "ep" not in self.parts or "mixtral" in self.model

    @property
    def optimizers(self) -> tuple[str, ...]:
        """With which optimizers it is run.

        A router in bf16 sends tokens elsewhere when weights are one rounding away: after a step of Adam, one device differs
        from itself by most of its gradients, and nothing can be told. Float64, which decides after Adam, is a mode that
        torch leaves for recomputation.
        """
        smooth = not self.legal or {"precision", "recompute"} & set(self.more)
        return ("sgd",) if smooth else tuple(OPTIMIZERS)


MORE = (
    Composition("gpt2", ("tp", "dp")),
    Composition("gpt2", ("tp", "zero")),
    Composition("gpt2", ("tp", "cp")),
    Composition("phi3", ("tp", "zero"), 1),
    Composition("llama-tied", ("sp", "zero"), 2),
    Composition("mixtral", ("ep",), more={"precision": "bf16"}),
    Composition("mixtral", ("ep", "tp"), more={"precision": "bf16"}),
    Composition("mixtral", ("ep",), more={"recompute": "full"}),
    Composition("mixtral", ("ep", "zero"), more={"recompute": "full"}),
    Composition("llama", ("cp",), more={"recompute": "full"}),
    Composition("llama", ("cp", "tp"), more={"recompute": "full"}),
    Composition("llama", ("cp",), more={"context_attention": "ring", "recompute": "full"}),
)
"""Fused projections, tied weights, precision and recomputation, with other things."""


PIPELINES = (
    *(
        Composition(model, ("pp", part), stage)
        for part in PARALLELISMS
        for stage in ((1, 2, 3) if part == "zero" else (3,))
        for model in ("llama", "mixtral")
        if part != "ep" or model == "mixtral"
    ),
    *(Composition(model, ("pp", "dp", "tp")) for model in ("llama", "gpt2", "mixtral")),
    *(Composition("llama", ("pp", "zero", part), stage) for stage in (1, 2, 3) for part in ("tp", "sp")),
    *(Composition("mixtral", ("pp", "ep", part)) for part in ("tp", "dp", "cp", "zero")),
    *(Composition("llama", ("pp", "cp", part)) for part in ("tp", "dp", "zero")),
    *(Composition("llama", ("pp",), more={"pp": 4, "microbatches": 4, "schedule": s}) for s in ("gpipe", "1f1b")),
    *(Composition("llama", ("pp", "zero"), stage, {"pp": 4}) for stage in (1, 2, 3)),
    *(Composition("llama", ("pp", "sp"), more={"pp": 4}), Composition("mixtral", ("pp", "ep"), more={"pp": 4})),
    *(
        Composition(model, ("pp", "zero"), more={"microbatches": 4, "schedule": schedule})
        for model, schedule in (
            ("llama", "interleaved"), ("gpt2", "zero-bubble"), ("llama-tied", "zbv"), ("llama", "dualpipev")
        )
    ),
    *(
        Composition(model, ("pp", "tp"), more={"microbatches": 4, "schedule": schedule})
        for model, schedule in (("llama", "zero-bubble"), ("mixtral", "zbv"))
    ),
    Composition("mixtral", ("pp", "ep"), more={"microbatches": 4, "schedule": "zbv"}),
    Composition("llama", ("pp", "cp"), more={"microbatches": 4, "schedule": "zbv"}),
    Composition("llama-tied", ("pp", "dp", "zero"), 2),
    Composition("llama", ("pp", "zero"), 1, {"precision": "bf16"}),
    Composition("mixtral", ("pp", "zero"), more={"recompute": "full"}),
    Composition("gpt2", ("pp", "dp"), more={"recompute": "full"}),
)  # fmt: skip
"""Pipelines with everything else inside of their stages."""


def compositions(sizes: tuple[int, ...] = (2, 3)) -> Iterator[Composition]:
    """Every choice of so many parallelisms: a dense model, and one with experts; ZeRO at every stage in pairs."""
    for size in sizes:
        for parts in itertools.combinations(PARALLELISMS, size):
            for stage in (1, 2, 3) if "zero" in parts and size == 2 else (3,):
                yield Composition("llama", parts, stage)
                yield Composition("mixtral", parts, stage)


@dataclass(frozen=True)
class Outcome:
    """What came of one composition with one optimizer.

    Attributes:
        kind: "equal", "wrong" or "refused".
        seen: the worst tensor and how far it is from that of one device, or the reason of a refusal.
    """

    kind: str
    seen: str

    def due(self, composition: Composition) -> bool:
        """Whether that is what should have come."""
        return self.kind == ("equal" if composition.legal else "refused")


def planned(composition: Composition, float64: bool = False) -> ParallelPlan:
    """The only plan that the pins leave."""
    make, batch = _made(composition.model, float64)
    torch.manual_seed(0)
    plan = mw.plan(make(), batch, world_size=composition.world_size, **composition.pins)
    assert isinstance(plan, ParallelPlan)
    return plan


def check(
    rank: int, world_size: int, model: str, plan: ParallelPlan, optimizer: str, float64: bool
) -> tuple[Outcome, dict[Label, float]]:
    """Three steps under `plan`, compared with one device, on one rank; and each difference above the tolerance."""
    make, batch = _made(model, float64)
    with Float64() if float64 else contextlib.nullcontext():
        report = mw.verify(
            make,
            batch,
            plan,
            steps=STEPS,
            optimizer=OPTIMIZERS[optimizer],
            tolerance=FLOAT64 if float64 else None,
        )
    (worst,) = report.worst(1)
    where = f"{worst.kind} {worst.name} of step {worst.step}" + (f" ({worst.note})" if worst.note else "")
    if optimizer == "adamw":
        where += (
            f"; moments {max(c.relative for c in report.comparisons if c.kind == 'state' and c.measured):.1e}"
        )
    wrong = {(c.step, c.kind, c.name): c.relative for c in report.failures}
    return Outcome("wrong" if wrong else "equal", f"{worst.relative:.1e} {where}"), wrong


def outcome(pool: RankPool, composition: Composition, optimizer: str, timeout: float = 300.0) -> Outcome:
    """Plan and run it; a refusal is an outcome, and any other error goes up.

    Where one device is no surer of its own float32 values than the two runs agree, the same run in float64 decides.
    """
    ranks, model = composition.world_size, composition.model
    try:
        plan = planned(composition)
        outcomes, wrong = pool.run(ranks, check, model, plan, optimizer, False, timeout=timeout)[0]
    except (PlanError, UsageError, InfeasibleError) as error:
        return Outcome("refused", str(error))
    if not wrong or "precision" in composition.more:
        return outcomes
    moves = rounding(model, optimizer)
    sure = [label for label, relative in wrong.items() if not relative <= NOISE_REACH * moves.get(label, 0.0)]
    if sure:
        label = sure[0]
        seen = f"{wrong[label]:.1e} {label}; rounding moves it by {moves.get(label, 0.0):.1e} on one device"
        return Outcome("wrong", seen)
    exact, still = pool.run(
        ranks, check, model, planned(composition, True), optimizer, True, timeout=timeout
    )[0]
    if still:
        return Outcome("wrong", f"{outcomes.seen}; in float64: {exact.seen}")
    most = max(moves[label] for label in wrong)
    return Outcome("equal", f"{outcomes.seen}; one rounding: {most:.1e}; in float64: {exact.seen}")


def rounding(model: str, optimizer: str) -> dict[Label, float]:
    """How far one rounding of the initial weights moves each value of three steps on one device, of its largest."""
    runs = []
    for turn in range(4):
        torch.manual_seed(0)
        make, batch = _made(model, False)
        instance = make()
        parameters = list(instance.parameters())
        if turn:  # in another order each time, so that each draws other directions
            one_rounding_away(parameters[turn:] + parameters[:turn])
        runs.append(_values(instance, batch, OPTIMIZERS[optimizer](parameters)))
    return {
        label: max(max_difference(value, near[label])[0] for near in runs[1:]) / (magnitude(value) or 1.0)
        for label, value in runs[0].items()
    }


def _values(model: Any, batch: Any, optimizer: torch.optim.Optimizer) -> dict[Label, torch.Tensor]:
    outcomes: dict[Label, torch.Tensor] = {}
    for step in range(STEPS):
        torch.manual_seed(1 + step)
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        outcomes[step, "loss", ""] = loss.detach().clone()
        optimizer.step()
        for name, p in model.named_parameters():
            outcomes[step, "parameter", name] = p.detach().clone()
            if p.grad is not None:
                outcomes[step, "gradient", name] = p.grad.clone()
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    outcomes[step, "state", f"{name}/{key}"] = value.clone()
    return outcomes


def _made(name: str, float64: bool) -> tuple[Callable[[], Any], Any]:
    case = MODELS[name]

    def make() -> Any:
        model: Any = case.model().double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # torch's grouped product knows no float64
        return model

    return (make if float64 else case.model), case.batch()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run those that are asked for, a line each."""
    parser = argparse.ArgumentParser(description="Compositions of parallelisms against one device.")
    parser.add_argument("texts", nargs="*", help="those whose name contains one of these")
    parser.add_argument("--table", action="store_true", help="as a table in Markdown")
    parser.add_argument("--store", type=Path, help="a file of outcomes: those in it are not run again")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one of them")
    options = parser.parse_args(arguments)
    texts = options.texts
    chosen = [
        c for c in (*compositions(), *MORE, *PIPELINES) if not texts or any(t in f"{c.name} " for t in texts)
    ]
    stored = _stored(options.store)
    bad = 0
    with RankPool() as pool:
        for composition, optimizer in ((c, o) for c in chosen for o in c.optimizers):
            start, stored_outcome = time.monotonic(), stored.get((composition.name, optimizer))
            try:
                outcomes = stored_outcome or outcome(pool, composition, optimizer, options.timeout)
            except Exception as error:  # the others are of interest too, whatever broke
                outcomes = Outcome("failed", f"{type(error).__name__}: {error}"[:400])
            if options.store is not None and stored_outcome is None and outcomes.kind != "failed":
                entry = (composition.name, optimizer, outcomes.kind, outcomes.seen)
                with options.store.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
            bad += not outcomes.due(composition)
            line = [composition.name, str(composition.world_size), optimizer, outcomes.kind, outcomes.seen]
            if options.table:
                print(f"| {' | '.join(line)} |", flush=True)
            else:
                took = f"{time.monotonic() - start:4.0f}s"
                mark = "ok " if outcomes.due(composition) else "BAD"
                print(f"{mark} {took} {line[0]:32} {' '.join(line[1:])}"[:400], flush=True)
    print(f"{bad} of them not as they should be" if bad else "all as they should be", file=sys.stderr)
    return int(bad > 0)


def _stored(path: Path | None) -> dict[tuple[str, str], Outcome]:
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {(name, optimizer): Outcome(kind, seen) for name, optimizer, kind, seen in map(json.loads, lines)}


if __name__ == "__main__":
    raise SystemExit(main())
