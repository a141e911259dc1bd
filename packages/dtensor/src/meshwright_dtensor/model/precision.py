"""Mixed precision: which tensors of a float32 model are computed in another dtype.

These are floating-point parameters (through compute copies), batch tensors, and the buffers that a checkpoint holds, as
`from_pretrained(dtype=...)` would load them. Running statistics are excluded, since they would lose small updates. Other
buffers, such as rotary frequencies, keep their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from meshwright_dtensor.plan.plan import ParallelPlan

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
"""Name in plans -> dtype."""


def computes_as_stored(plan: ParallelPlan) -> bool:
    """Whether a model is computed in the dtype of its parameters."""
    return plan.precision is None or plan.precision.parameters == "fp32"


def cast_buffers(model: nn.Module) -> set[int]:
    """Ids of the buffers that are computed in the precision of the plan."""
    ids: set[int] = set()
    for module in model.modules():
        if getattr(module, "track_running_stats", False):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                ids.add(id(buffer))
    return ids
