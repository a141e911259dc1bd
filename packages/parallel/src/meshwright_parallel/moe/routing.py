"""The router's choice as rows: one for every (token, slot) that names an expert, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.plan import ExpertsRule

Tensor = torch.Tensor


@dataclass(frozen=True)
class Rows:
    """What this rank sends.

    Args:
        token: [R] row of the tokens, sorted by expert, and by token where experts are equal.
        weight: [R, 1] what the expert's result is multiplied with.
        counts: [E] rows per expert.
        order: [R] for each row its (token, slot) as token * slots + slot, where every slot names an expert; else None.
    """

    token: Tensor
    weight: Tensor
    counts: Tensor
    order: Tensor | None

    def combined(self, results: Tensor, tokens: int) -> Tensor:
        """Results [R, H] in the order of the rows, added up by token: [tokens, H]."""
        if self.order is None or not tokens:
            return results.new_zeros((tokens, results.shape[1])).index_add(0, self.token, results)
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.order.shape[0], device=self.order.device)
        # one sum per token: adding row by row would be in no fixed order on an accelerator
        return results[inverse].view(tokens, -1, results.shape[1]).sum(1)


def chosen_rows(assignment: Tensor, weights: Tensor, rule: ExpertsRule, name: str) -> Rows:
    """The rows that an assignment asks for.

    Args:
        assignment: [N, ...slots] numbers of experts ("index"), or [N, ...slots, E] which is chosen ("mask"). A number out
            of 0..E-1 names none.
        weights: as many as slots.
        rule: kind of assignment and number of experts.
        name: of the module, for errors.

    Raises:
        UnsupportedError: weights and assignment do not go together.
    """
    n, experts = assignment.shape[0], rule.count
    masked = rule.assignment == "mask"
    slots = assignment.shape[1:-1].numel() if masked else assignment.shape[1:].numel()
    if weights.numel() != n * slots or (masked and assignment.shape[-1] != experts):
        raise UnsupportedError(
            f"experts {name!r} were called with an assignment of shape {list(assignment.shape)} and weights of shape "
            f"{list(weights.shape)}; they were planned for {experts} experts and one weight per chosen expert"
        )
    flat = weights.reshape(-1, 1)
    if masked:
        place, expert = assignment.reshape(n * slots, experts).nonzero(as_tuple=True)
    else:
        expert = assignment.reshape(-1)
        place = torch.arange(n * slots, device=assignment.device)
    legal = (expert >= 0) & (expert < experts)
    order = torch.argsort(torch.where(legal, expert, experts), stable=True)
    counts = torch.bincount(torch.where(legal, expert, experts), minlength=experts + 1)[:experts]
    order = order[: int(counts.sum())]
    place = place[order]
    whole = place.shape[0] == n * slots and not masked
    return Rows(place // max(slots, 1), flat[place], counts, place if whole else None)


def named_experts(assignment: Tensor, rule: ExpertsRule) -> Tensor:
    """How many (token, slot) name each expert: [E] of int64, for an assignment as `chosen_rows` takes it."""
    if rule.assignment == "mask":
        return (assignment.reshape(-1, rule.count) != 0).sum(0)
    expert = assignment.reshape(-1)
    legal = (expert >= 0) & (expert < rule.count)
    return torch.bincount(torch.where(legal, expert, rule.count), minlength=rule.count + 1)[: rule.count]
