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
        names = frozenset(blocks)
        above = (work.module.split(".") for work in placed.work)
        inside = [any(".".join(parts[: n + 1]) in names for n in range(len(parts))) for parts in above]
        work = {name: _work(placed, placed.with_recompute(rules), inside) for name, rules in policies.items()}
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


def _work(placed: Placed, recomputed: Placed, inside: Sequence[bool]) -> tuple[ModuleWork, ...]:
    """The work of `recomputed`, in seconds that are comparable with those of `placed`.

    `inside`: which entries belong to blocks. The seconds of a stage stand for compute and communication in the proportion
    that both have in `placed`, so the communication that recompute repeats is added in that proportion.
    """
    before, after = placed.placement, recomputed.placement
    more = after.compute_seconds - before.compute_seconds
    both = more + after.communication_seconds - before.communication_seconds
    whole = before.compute_seconds + before.communication_seconds
    scale = both / more * before.compute_seconds / whole if more and whole else 1.0
    result = []
    for base, work, in_block in zip(placed.work, recomputed.work, inside, strict=True):
        if in_block:
            seconds = base.seconds + (work.seconds - base.seconds) * scale
            forward = base.forward * base.seconds / seconds if seconds else base.forward
            # there are thousands of these, and dataclasses.replace is slow
            work = ModuleWork(**{**vars(work), "seconds": seconds, "forward": forward})
        result.append(work)
    return tuple(result)
