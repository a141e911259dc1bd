"""Recomputation stage by stage: a strategy that divides the model is told what running modules again costs and saves, and by
how much its fullest rank is too full; it says which modules of which stage run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.strategy import ModuleWork
from meshwright_planner.evaluation.placed_model import Placed
from meshwright_planner.recompute.rules import rules_of


@dataclass(frozen=True)
class Again:
    """What may run again.

    Args:
        work: policy -> what modules do in a microbatch where all that may run again does, as `Placed.work`.
        blocks: names of the modules that may.
        patterns: those that stand for all of them.
    """

    work: Mapping[str, tuple[ModuleWork, ...]]
    blocks: tuple[str, ...]
    patterns: tuple[str, ...]

    @staticmethod
    def of(placed: Placed, policies: Mapping[str, Sequence[RecomputeRule]], blocks: Sequence[str]) -> Again:
        """That of a placement; `policies`: name -> its rules for all `blocks`."""
        named = frozenset(blocks)
        inside = [_lies(work.module, named) for work in placed.work]
        work = {
            policy: _work(placed, placed.with_recompute(rules), inside) for policy, rules in policies.items()
        }
        patterns = dict.fromkeys(rule.pattern for rules in policies.values() for rule in rules)
        return Again(work, tuple(blocks), tuple(patterns))

    def rules(self, chosen: Mapping[str, str]) -> tuple[RecomputeRule, ...]:
        """Rules for what a strategy chose: module -> policy by which the blocks in it run again.

        Raises:
            PlanError: it chose a part of a block.
        """
        policies: dict[str, str] = {}
        every = frozenset(self.blocks)
        for module, policy in chosen.items():
            own = [module] if module in every else [n for n in self.blocks if n.startswith(f"{module}.")]
            if not own:
                raise PlanError(
                    "recompute", module, "only whole blocks run again, and none lies in this module"
                )
            policies.update(dict.fromkeys(own, policy))
        return rules_of(policies, self.blocks, self.patterns)


@dataclass(frozen=True)
class Easing:
    """What is asked of the strategy that divides the model; `relief`: as `PipelineQuery.bytes_to_free`."""

    again: Again
    relief: int


def _work(placed: Placed, other: Placed, inside: Sequence[bool]) -> tuple[ModuleWork, ...]:
    """The work of `other`, in which modules run again, as a part of the time that `placed` computes.

    `inside`: which of it is of modules that may. What they communicate when they run again counts too: the seconds of stages
    stand for computing and communicating, in the proportion that both have in `placed`.
    """
    now, then = placed.placement, other.placement
    more = then.compute_seconds - now.compute_seconds
    both = more + then.communication_seconds - now.communication_seconds
    whole = now.compute_seconds + now.communication_seconds
    scale = both / more * now.compute_seconds / whole if more and whole else 1.0
    found = []
    for base, work, again in zip(placed.work, other.work, inside, strict=True):
        if again:
            seconds = base.seconds + (work.seconds - base.seconds) * scale
            work = ModuleWork(  # thousands of them: `replace` is slow
                work.module,
                seconds,
                work.saved_bytes,
                work.parameters,
                work.inputs,
                work.shared,
                work.transient_bytes,
                work.deferred_bytes,
                base.forward * base.seconds / seconds if seconds else base.forward,
                work.outputs,
            )
        found.append(work)
    return tuple(found)


def _lies(module: str, blocks: frozenset[str]) -> bool:
    """Whether a module is one of these, or in one."""
    parts = module.split(".")
    return any(".".join(parts[:n]) in blocks for n in range(1, len(parts) + 1))
