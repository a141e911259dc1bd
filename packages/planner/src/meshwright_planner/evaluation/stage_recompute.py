"""Stage-wise recompute: each stage of a pipeline recomputes only as many blocks as its memory requires.

The strategy that divides the model gets the cost and the savings of recomputing each module, and the bytes by which its
fullest rank exceeds the memory. It answers with the modules to recompute, stage by stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.strategy import ModuleWork
from meshwright_planner.evaluation.placed_model import Placed
from meshwright_planner.recompute.rules import rules_of

Rules: TypeAlias = tuple[RecomputeRule, ...]


@dataclass(frozen=True)
class RecomputeVariants:
    """The modules that stages may recompute, by each policy.

    Args:
        work: policy -> the work of each module in a microbatch where all blocks are recomputed, as `Placed.work`.
        blocks: names of the blocks that may be recomputed.
        patterns: name patterns that match all of them.
    """

    work: Mapping[str, tuple[ModuleWork, ...]]
    blocks: tuple[str, ...]
    patterns: tuple[str, ...]

    @classmethod
    def of(cls, placed: Placed, policies: Mapping[str, Rules], blocks: Sequence[str]) -> RecomputeVariants:
        """The variants of a placement; `policies`: name -> its rules for all `blocks`."""
        work = {name: placed.with_recompute(rules).work for name, rules in policies.items()}
        patterns = dict.fromkeys(rule.pattern for rules in policies.values() for rule in rules)
        return cls(work, tuple(blocks), tuple(patterns))

    def rules(self, chosen: Mapping[str, str]) -> Rules:
        """Rules for the choice of a strategy: module -> policy by which the blocks in it are recomputed.

        Raises PlanError: it chose a part of a block.
        """
        policies: dict[str, str] = {}
        for module, policy in chosen.items():
            inside = [name for name in self.blocks if name == module or name.startswith(f"{module}.")]
            if not inside:
                rule = "only whole blocks are recomputed, and this module contains none"
                raise PlanError("recompute", module, rule)
            policies.update(dict.fromkeys(inside, policy))
        return rules_of(policies, self.blocks, self.patterns)
