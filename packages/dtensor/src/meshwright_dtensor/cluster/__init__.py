"""A cluster as numbers: devices, memory and links, and the interface of cost models. Torch-free."""

from meshwright_dtensor.cluster.chip import Chip as Chip
from meshwright_dtensor.cluster.cluster import Cluster as Cluster
from meshwright_dtensor.cluster.cluster import LinkLevel as LinkLevel
from meshwright_dtensor.cluster.cluster import MeasuredWork as MeasuredWork
from meshwright_dtensor.cluster.cluster import SlowNode as SlowNode
from meshwright_dtensor.cluster.cost_model import Communication as Communication
from meshwright_dtensor.cluster.cost_model import CostModel as CostModel
from meshwright_dtensor.cluster.cost_model import Operation as Operation
from meshwright_dtensor.cluster.links import CollectiveKind as CollectiveKind
from meshwright_dtensor.cluster.links import Link as Link
from meshwright_dtensor.cluster.links import MeasuredCollective as MeasuredCollective
from meshwright_dtensor.cluster.links import Protocol as Protocol
