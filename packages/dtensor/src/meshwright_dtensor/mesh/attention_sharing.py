"""How attention is shared by ranks that each hold a part of the sequence: a property of a mesh axis."""

from __future__ import annotations

from typing import Final, Literal

from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.utils.names import listing, suggestion

AttentionForm = Literal["all_gather", "ring", "all_to_all"]

FORMS: Final[tuple[AttentionForm, ...]] = ("all_gather", "ring", "all_to_all")
"""Keys and values are gathered; they travel around the ring; heads are spread in place of the sequence."""


def share_attention(mesh: DeviceMesh, axis: str, form: str) -> None:
    """Let attention run on parts of the sequence wherever queries, keys and values are all sharded on it over ``axis``.

    Args:
        axis: name of a mesh axis.
        form: one of :data:`FORMS`.

    Raises:
        UsageError: no such axis, or no such form.
    """
    context = MeshContext.of(mesh)
    if axis not in context.axes:
        raise UsageError(f"mesh axis {axis!r} does not exist; the axes are {listing(context.axes)}")
    if form not in FORMS:
        raise UsageError(f"attention form {form!r} is none of {listing(FORMS)}{suggestion(form, FORMS)}")
    context.attention[axis] = form
