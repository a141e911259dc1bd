"""Every pair and triple of parallelisms on small models: what pins ask for it, and how far it is from one device.

    python integration_tests/compositions.py            # all of them, a table; 1 when any is wrong

"sp" is sequence parallelism, a way of the tensor axis: it doubles the tensor degree when both are named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plan import ParallelPlan

PARALLELISMS = ("tp", "sp", "ep", "cp", "dp", "zero")
STEPS = 3
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


@dataclass(frozen=True)
class Composition:
    """Parallelisms together, on one model; `stage` is that of ZeRO, where it takes part."""

    model: str
    parts: tuple[str, ...]
    stage: int = 3

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
        if "zero" in parts:
            pins.update(zero=self.stage, zero_degree=2)
        return pins

    @property
    def world_size(self) -> int:
        """Ranks it takes."""
        pins = self.pins
        return int(pins["tp"] * pins["cp"] * pins["ep"] * pins["dp"])

    @property
    def name(self) -> str:
        """As "llama tp+dp+zero3"."""
        shown = [f"zero{self.stage}" if part == "zero" else part for part in self.parts]
        return f"{self.model} {'+'.join(shown)}"


def compositions(sizes: tuple[int, ...] = (2, 3)) -> Iterator[Composition]:
    """Every choice of so many parallelisms: a dense model without experts, and one with; ZeRO at every stage in pairs."""
    for size in sizes:
        for parts in itertools.combinations(PARALLELISMS, size):
            stages = (1, 2, 3) if "zero" in parts and size == 2 else (3,)
            for stage in stages:
                if "ep" not in parts:
                    yield Composition("llama", parts, stage)
                yield Composition("mixtral", parts, stage)


def check(rank: int, world_size: int, composition: Composition, optimizer: str) -> tuple[bool, str]:
    """(passed, what was seen) on one rank; a refusal is passed on as an error."""
    case = CASES[composition.model]
    torch.manual_seed(0)
    plan = mw.plan(case.model(), case.batch(), world_size=world_size, **composition.pins)
    assert isinstance(plan, ParallelPlan)
    report = mw.verify(case.model, case.batch(), plan, steps=STEPS, optimizer=OPTIMIZERS[optimizer])
    (worst,) = report.worst(1)
    seen = f"{worst.kind} {worst.name} {worst.relative:.1e}" + (f" ({worst.note})" if worst.note else "")
    return report.ok, seen


def main() -> int:
    """Run all, print one line each."""
    from meshwright_dtensor.testing import RankPool

    bad = 0
    with RankPool() as pool:
        for composition, optimizer in itertools.product(compositions(), OPTIMIZERS):
            try:
                results = pool.run(composition.world_size, check, composition, optimizer)
                passed, seen = min(results)
            except MeshwrightError as error:
                passed, seen = False, f"{type(error).__name__}: {error}"
            bad += not passed
            print(
                f"{'ok ' if passed else 'BAD'} {composition.name:32} {optimizer:6} {seen[:150]}", flush=True
            )
    print(f"{bad} of them not as on one device" if bad else "all as on one device")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
