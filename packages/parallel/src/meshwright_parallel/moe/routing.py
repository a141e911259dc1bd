"""The router's choice as rows: one for each (token, slot) that names an expert, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright_dtensor.devices import on_host
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

    def first(self, count: int) -> Rows:
        """The rows whose number names an expert: the first `count`, the sum of `counts`, which the caller has read."""
        if count == self.token.shape[0]:
            return self
        return Rows(self.token[:count], self.weight[:count], self.counts, None)

    def of(self, tokens: Tensor) -> Tensor:
        """The token of [N, H] of each row: [R, H]."""
        # the gradient of an index has a fixed order of summation on an accelerator too, and takes twice as long on the host
        return tokens.index_select(0, self.token) if on_host(tokens.device) else tokens[self.token]

    def combined(self, results: Tensor, tokens: int) -> Tensor:
        """Sum results [R, H], in the order of the rows, per token: [tokens, H]."""
        if self.order is None or not tokens:
            return results.new_zeros((tokens, results.shape[1])).index_add(0, self.token, results)
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.order.shape[0], device=self.order.device)
        # index_add has no fixed order of summation on an accelerator
        return results.index_select(0, inverse).view(tokens, -1, results.shape[1]).sum(1)


def chosen_rows(assignment: Tensor, weights: Tensor, rule: ExpertsRule, name: str) -> Rows:
    """The rows of an assignment; those whose number names no expert come last, see `Rows.first`.

    Of an assignment by numbers nothing is read, so that the host does not wait for an accelerator.

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
    numbers = _numbers(expert, experts)
    place = place[torch.argsort(numbers, stable=True)]
    return Rows(place // max(slots, 1), flat[place], _counts(numbers, experts), None if masked else place)


def _numbers(expert: Tensor, count: int) -> Tensor:
    """Numbers of experts, int64; `count` for a number that names none."""
    return torch.where((expert >= 0) & (expert < count), expert, count).long()


def _counts(numbers: Tensor, count: int) -> Tensor:
    """How often each number comes, [count]. Not by bincount, which waits for an accelerator to size its result."""
    counts = numbers.new_zeros(count + 1)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))[:count]


def rows_per_expert(assignment: Tensor, rule: ExpertsRule) -> Tensor:
    """Rows per expert: [E] of int64, for an assignment as in `chosen_rows`."""
    if rule.assignment == "mask":
        return (assignment.reshape(-1, rule.count) != 0).sum(0)
    return _counts(_numbers(assignment.reshape(-1), rule.count), rule.count)
