"""The whole values of the tensors of a call, gathered where a rank has a part."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from meshwright_dtensor.comm.log import NOWHERE, Site
from meshwright_dtensor.parameter import layout_of_dtensor, parameter_local
from meshwright_dtensor.tensor.global_tensor import DetachedView, GlobalTensor, local_in


def whole(x: Any, site: Site = NOWHERE) -> Any:
    """The gathered value of a global tensor or mesh parameter, recorded by autograd; anything else as it is."""
    if isinstance(x, GlobalTensor):
        if isinstance(x, DetachedView):
            x.check_fresh()
        return local_in(x, x._layout.context.replicated, site)
    if isinstance(x, DTensor):
        return parameter_local(x, layout_of_dtensor(x).context.replicated, site)
    return x
