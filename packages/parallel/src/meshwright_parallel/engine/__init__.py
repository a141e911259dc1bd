"""The data-parallel engine: bucketed gradient reduction, and unsharding of parameters as in FSDP2."""

from __future__ import annotations

from meshwright_parallel.engine.grad_reduction import (
    DataReduction,
    attach_reduction,
    install_reduction,
    make_groups,
    partial_parameters,
    reduction_of,
)
from meshwright_parallel.engine.install import install_compute_copies
from meshwright_parallel.engine.unshard import unshard_engine_of

__all__ = [
    "DataReduction",
    "attach_reduction",
    "install_compute_copies",
    "install_reduction",
    "make_groups",
    "partial_parameters",
    "reduction_of",
    "unshard_engine_of",
]
