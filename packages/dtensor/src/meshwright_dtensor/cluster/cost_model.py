"""What a cost model is asked, and what it answers: `Operation`, `Communication` and `CostModel`.  Torch-free.

A `CostModelSpec` of the hook `meshwright_cost_models` names a function or class that takes the `Cluster` planned for and
returns a `CostModel`; `plan(..., cost_model="name")` has the planner ask it in place of the cluster's own figures.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from meshwright_dtensor.cluster.links import CollectiveKind, Link


class Operation(NamedTuple):
    """One operation with the sizes that one rank has of it.

    Attributes:
        name: as recorded, "linear" or "aten.gelu.default"; of an optimizer's step the optimizer, "adamw".
        kind: "matmul", "attention-64" (by width of heads), "embedding", "norm", "softmax", "dropout", "function", "copy",
            "reduce", "pointwise", "view" (moves no data) or "update" (an optimizer's step).
        dtype: of its floating-point tensors, "float32".
        flops: floating-point operations of its forward pass.
        nbytes: bytes that its forward pass reads and writes.
        backward: whether a gradient flows back through it.
        gradients: how many of its inputs get one; of a product, of the tensors that it multiplies.
        made: bytes of each of its outputs; of an update those of the parameters.
        inputs, outputs: shapes of its tensors, in order.
        itemsize: bytes of an element of its first output.
        products: products of matrices that it is made of, 1 unless it is a batched one.
        table_bytes: of an embedding's table, whose gradient is as large however few rows are read.
        tensors: how many tensors it is done to: of an update the parameters, else 1.
        on_mesh: it is laid over a mesh, which costs the host something.
        backward_bytes: bytes that its backward pass reads and writes; None of products, whose operations say more.
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
        nbytes: of the full tensor on the axis; of an all_to_all what all ranks hold together, of a send what one sends.
        degree: ranks that take part.
        axis: the mesh axis, "tp"; of sums over several all of them, "dp+cp".
        link: what joins the ranks: latency, bandwidth, and the levels inside of it.
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
    """How long operations and collectives take on the cluster that it was made for.

    Equal questions are asked once a plan. Answers are numbers of seconds, 0 or more; anything else is an error that names
    the cost model and what it said.
    """

    def operation(self, operation: Operation) -> float:
        """Seconds that a rank is busy with an operation: its forward pass and, where `backward`, its backward pass; the host's
        part included where nothing hides it. A third of it is taken for the forward pass.
        """
        ...

    def collective(self, communication: Communication) -> float:
        """Seconds of a collective while nothing else communicates."""
        ...


__all__ = ["Communication", "CostModel", "Operation"]
