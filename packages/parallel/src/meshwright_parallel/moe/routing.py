"""The router's choice as rows: one for each (token, slot) that names an expert, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.plan import ExpertsRule

Tensor = torch.Tensor


@dataclass(frozen=True)
class Rows:
    """The rows that this rank sends.

    Args:
        token: [R] index of the token, sorted by expert, then by token.
        weight: [R, 1] factor of the expert's result.
        counts: [E] rows per expert.
        order: [R] token * slots + slot of each row, where every slot names an expert; else None.
    """

    token: Tensor
    weight: Tensor
    counts: Tensor
    order: Tensor | None

    def combined(self, results: Tensor, tokens: int) -> Tensor:
        """Sum results [R, H], in the order of the rows, per token: [tokens, H]."""
        if self.order is None or not tokens:
            return results.new_zeros((tokens, results.shape[1])).index_add(0, self.token, results)
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.order.shape[0], device=self.order.device)
        # index_add has no fixed order of summation on an accelerator
        return results[inverse].view(tokens, -1, results.shape[1]).sum(1)


def chosen_rows(assignment: Tensor, weights: Tensor, rule: ExpertsRule, name: str) -> Rows:
    """The rows of an assignment.

    Args:
        assignment: [N, ...slots] numbers of experts ("index"), or [N, ...slots, E] of flags ("mask"). A number outside of
            0..E-1 names no expert.
        weights: one per slot.
        rule: kind of assignment and number of experts.
        name: of the module, for errors.

    Raises UnsupportedError: the shapes of weights and assignment do not match.
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


def rows_per_expert(assignment: Tensor, rule: ExpertsRule) -> Tensor:
    """Rows per expert: [E] of int64, for an assignment as in `chosen_rows`."""
    if rule.assignment == "mask":
        return (assignment.reshape(-1, rule.count) != 0).sum(0)
    expert = assignment.reshape(-1)
    legal = (expert >= 0) & (expert < rule.count)
    return torch.bincount(torch.where(legal, expert, rule.count), minlength=rule.count + 1)[: rule.count]
