"""Apply a parallel plan to an unmodified model, train it as on one device, and verify the result.

Names are loaded on first use (PEP 562), so that the plugin module imports without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright_dtensor.utils.exports import load_on_first_use

if TYPE_CHECKING:
    from meshwright_parallel.api.auto_parallelize import auto_parallelize as auto_parallelize
    from meshwright_parallel.api.distribute_module import distribute_module as distribute_module
    from meshwright_parallel.api.parallelize import parallelize as parallelize
    from meshwright_parallel.data.loader import shard_loader as shard_loader
    from meshwright_parallel.optim.clip_grad import clip_grad_norm_ as clip_grad_norm_
    from meshwright_parallel.optim.clip_grad import get_total_norm as get_total_norm
    from meshwright_parallel.optim.grad_scaler import GradScaler as GradScaler
    from meshwright_parallel.optim.whole_blocks import step_whole_blocks as step_whole_blocks
    from meshwright_parallel.optim.whole_matrices import step_whole_matrices as step_whole_matrices
    from meshwright_parallel.verification.report import VerificationReport as VerificationReport
    from meshwright_parallel.verification.verify import verify as verify

# module of this package -> the names that it defines
__all__, __getattr__, __dir__ = load_on_first_use(
    __name__,
    {
        ".api.auto_parallelize": "auto_parallelize",
        ".api.distribute_module": "distribute_module",
        ".api.parallelize": "parallelize",
        ".data.loader": "shard_loader",
        ".optim.clip_grad": "clip_grad_norm_, get_total_norm",
        ".optim.grad_scaler": "GradScaler",
        ".optim.whole_blocks": "step_whole_blocks",
        ".optim.whole_matrices": "step_whole_matrices",
        ".verification.report": "VerificationReport",
        ".verification.verify": "verify",
    },
)
