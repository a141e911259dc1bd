"""What runs during training on behalf of a strategy: the bucketed gradient reduction of data-like axes."""

from __future__ import annotations

from meshwright_parallel.engine.grad_reduction import (
    DataReduction,
    attach_reduction,
    install_reduction,
    make_groups,
    partial_parameters,
    reduction_of,
)
from meshwright_parallel.engine.install import install_copies
from meshwright_parallel.engine.unshard import gathering_of

__all__ = [
    "DataReduction",
    "attach_reduction",
    "gathering_of",
    "install_copies",
    "install_reduction",
    "make_groups",
    "partial_parameters",
    "reduction_of",
]
