"""A cluster as numbers: devices, memory and links, and the interface of cost models. Torch-free."""

from meshwright_dtensor.cluster.cluster import Cluster, LinkLevel, MeasuredWork, SlowNode
from meshwright_dtensor.cluster.cost_model import Communication, CostModel, Operation
from meshwright_dtensor.cluster.links import CollectiveKind, Link, MeasuredCollective

__all__ = [
    "Cluster",
    "CollectiveKind",
    "Communication",
    "CostModel",
    "Link",
    "LinkLevel",
    "MeasuredCollective",
    "MeasuredWork",
    "Operation",
    "SlowNode",
]
