"""The workspace that a recurrent layer saves for its backward pass on a CPU: oneDNN tells its size only in a real run.

On fake tensors the workspace of ``aten.mkldnn_rnn_layer`` is empty. On real ones it holds the gates and states of every step:
most of what an LSTM saves. It is proportional to the rows, and linear in the steps, so four small real runs of the same layer
give the bytes of a row (0.3% too few from some hundred bytes a row on; pages are rounded up).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from meshwright_dtensor._torch.modes import without_modes
from meshwright_dtensor.devices import HOST

WORKSPACE = 3
"""Index of the workspace among the results of the operation."""

STEPS, ROWS = (8, 16), (16, 32)
"""Of the small runs; with fewer, rounding of memory shows."""

WIDEST = 1024
"""Features of the widest layer that is run; the workspace of a wider one is proportional to its width."""

Tensor = torch.Tensor


def is_layer(func: object) -> bool:
    """Whether an operation has such a workspace."""
    return func is torch.ops.aten.mkldnn_rnn_layer.default


def workspace_bytes(x: Tensor, weights: tuple[Tensor, ...], hidden: int, rest: tuple[Any, ...]) -> int:
    """Bytes of the workspace for x [steps, rows, features]; 0 if the layer cannot run here.

    `rest`: the arguments of the operation after its states.
    """
    steps, rows, features = x.shape
    shrunk = min(1.0, WIDEST / max(hidden, features))
    sizes = max(1, round(features * shrunk)), max(1, round(hidden * shrunk))
    gates = weights[0].shape[0] // hidden
    reverse, batch_sizes, mode, _, *others = rest
    given = tuple(batch_sizes) if isinstance(batch_sizes, (list, tuple)) else batch_sizes
    first, more = _per_row(sizes, gates, x.dtype, (reverse, given, mode, sizes[1], *others))
    return rows * max(0, round((first + more * (steps - STEPS[0])) / shrunk))


@functools.lru_cache(maxsize=64)
def _per_row(
    sizes: tuple[int, int], gates: int, dtype: torch.dtype, rest: tuple[Any, ...]
) -> tuple[float, float]:
    """Bytes of one row with the fewest steps, and of one more step."""
    features, hidden = sizes
    reverse, batch_sizes, *others = rest

    def kept(steps: int, rows: int, weights: list[Tensor]) -> int:
        x, state = (
            torch.zeros(steps, rows, features, dtype=dtype, device=HOST),
            torch.zeros(rows, hidden, dtype=dtype, device=HOST),
        )
        given = (x, *weights, state, state, reverse, list(batch_sizes), *others)
        return int(torch.ops.aten.mkldnn_rnn_layer(*given)[WORKSPACE].untyped_storage().nbytes())

    few, many = ROWS
    with without_modes(), torch.enable_grad():
        shapes = ((gates * hidden, features), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
        weights = [torch.zeros(shape, dtype=dtype, device=HOST) for shape in shapes]
        try:
            more = (kept(steps, many, weights) - kept(steps, few, weights) for steps in STEPS)
            first, last = (nbytes / (many - few) for nbytes in more)
        except RuntimeError:
            # no such kernel on this machine
            return 0.0, 0.0
    return first, (last - first) / (STEPS[1] - STEPS[0])
