"""The interface of cost models: `CostModel`, and the `Operation` and `Communication` that it gives times for. Torch-free.

A `CostModelSpec` of the hook `meshwright_cost_models` names a function or class that takes the `Cluster` planned for and
returns a `CostModel`; with `plan(..., cost_model="name")` the planner uses it instead of the cluster's own figures.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from meshwright_dtensor.cluster.links import CollectiveKind, Link


class Operation(NamedTuple):
    """One operation with the sizes of one rank.

    Attributes:
        name: as recorded, "linear" or "aten.gelu.default"; of an optimizer's step the optimizer, "adamw".
        kind: "matmul", "attention-64" (by width of heads), "embedding", "norm", "softmax", "dropout", "function", "copy",
            "reduce", "pointwise", "view" (moves no data) or "update" (an optimizer's step).
        dtype: of its floating-point tensors, "float32".
        flops: floating-point operations of its forward pass.
        nbytes: bytes that its forward pass reads and writes.
        backward: whether a gradient flows back through it.
        gradients: number of inputs that get a gradient; of a product, of its two factors.
        made: bytes of each output; of an update those of the parameters.
        inputs, outputs: shapes of its tensors, in order.
        itemsize: bytes of an element of its first output.
        products: number of matrix products, 1 unless it is batched.
        table_bytes: of an embedding's table; its gradient has this size, however few rows are read.
        tensors: number of tensors: the parameters of an update, else 1.
        on_mesh: it is dispatched over a mesh, which takes host time.
        backward_bytes: bytes that its backward pass reads and writes; of a product or a view only what comes on top: gradients
            that are added to those of other readers, that of a product's outputs where a bias gets one, zeros around the gradient
            of a part.
    """

    name: str
    kind: str
    dtype: str
    flops: float
    nbytes: float
    backward: bool
    gradients: int = 0
    made: tuple[float, ...] = ()
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    itemsize: int = 4
    products: int = 1
    table_bytes: float = 0.0
    tensors: int = 1
    on_mesh: bool = False
    backward_bytes: float | None = None


class Communication(NamedTuple):
    """One collective over one mesh axis.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "send_recv" (to the next rank of a pipeline).
        nbytes: of the full tensor on the axis; of an all_to_all the sum over all ranks, of a send what one rank sends.
        degree: ranks that take part.
        axis: the mesh axis, "tp"; of sums over several axes all of them, "dp+cp".
        link: the link between the ranks: latency, bandwidth, and the levels inside of it.
    """

    kind: CollectiveKind
    nbytes: float
    degree: int
    axis: str
    link: Link

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the levels of links that it crosses, innermost first: ("nvlink", "infiniband")."""
        return self.link.levels


class CostModel(Protocol):
    """Times of operations and collectives on the cluster that it was made for.

    Results are cached per plan. They are seconds, 0 or more; anything else is an error that names the cost model and its
    result.
    """

    def operation(self, operation: Operation) -> float:
        """Seconds of an operation on one rank: forward and, if `backward`, backward, with the host time that nothing
        hides. A third counts as the forward pass.
        """
        ...

    def collective(self, communication: Communication) -> float:
        """Seconds of a collective while nothing else communicates."""
        ...
