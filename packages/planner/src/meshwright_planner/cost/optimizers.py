"""Optimizers that compute with more than single elements: what they need whole on a rank, and what they keep.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Gupta et al., "Shampoo: Preconditioned
Stochastic Tensor Optimization", 2018; Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024; Dettmers et al.,
"8-bit Optimizers via Block-wise Quantization", 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from meshwright_dtensor.model.blocks import parameter_units
from meshwright_dtensor.sharding.balance import orthogonalization_cost, preconditioning_cost
from meshwright_planner.cost.operations import COPIES, OPTIMIZERS, Copies


@dataclass(frozen=True)
class Structure:
    """What an optimizer needs.

    Attributes:
        states: how many it keeps of a parameter's shape.
        bits: of each element of such a state, where it is quantized; None where it has the parameter's dtype.
        block: elements of a block with a scale of its own; 0 where there are none.
        cost: of a step for a matrix that it needs whole, by shape; None where it needs none whole.
        squares: square matrices that it keeps for each side of a matrix.
    """

    states: int
    bits: int | None = None
    block: int = 0
    cost: Callable[[Sequence[int]], float] | None = None
    squares: int = 0


STRUCTURES: Mapping[str, Structure] = MappingProxyType(
    {
        "muon": Structure(1, cost=orthogonalization_cost),
        "shampoo": Structure(1, cost=preconditioning_cost, squares=1),
        "soap": Structure(2, cost=preconditioning_cost, squares=2),
        "adamw8bit": Structure(2, bits=8, block=256),
        "adamw4bit": Structure(2, bits=4, block=128),
    }
)

NAMES = (*OPTIMIZERS, *STRUCTURES)
"""What `optimizer` of a request may be."""

FOR_THE_REST = "adamw"
"""Steps what an optimizer of whole matrices does not."""


def copies_of(optimizer: str) -> Copies:
    """Temporary copies of parameters in a step."""
    return COPIES.get(optimizer, COPIES[FOR_THE_REST])


def whole_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that Muon, Shampoo and SOAP step by convention: trained matrices of repeated blocks.

    A model without repeated blocks has those of all modules but embeddings.
    """
    *blocks, (_, _, rest) = parameter_units(model)
    named = [pair for _, _, parameters in blocks for pair in parameters]
    if not named:
        tables = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        named = [(name, p) for name, p in rest if id(p) not in tables]
    return {name: p for name, p in named if p.ndim == 2 and p.requires_grad and p.numel()}


def states_per_byte(optimizer: str, model: nn.Module) -> float:
    """Bytes of optimizer states per byte of the trained parameters of a model.

    States have the dtype of their parameter, but for those that are quantized: their size is the same for a parameter of any dtype.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    nbytes = sum(p.numel() * p.element_size() for p in trained)
    if optimizer in OPTIMIZERS or not nbytes:
        return float(OPTIMIZERS.get(optimizer, OPTIMIZERS[FOR_THE_REST]))
    structure = STRUCTURES[optimizer]
    if structure.bits is not None:
        # a scale in float32 for each block
        state = structure.bits / 8 + 4 / structure.block
        return structure.states * state * sum(p.numel() for p in trained) / nbytes
    part = sum(p.numel() * p.element_size() for p in whole_matrices(model).values()) / nbytes
    return structure.states * part + OPTIMIZERS[FOR_THE_REST] * (1 - part)


def preconditioner_bytes(optimizer: str, model: nn.Module) -> int:
    """Bytes of states without the shape of a parameter, which every rank has (`step_whole_matrices`)."""
    squares = STRUCTURES[optimizer].squares if optimizer in STRUCTURES else 0
    if not squares:
        return 0
    matrices = whole_matrices(model).values()
    return squares * sum(p.element_size() * sum(n * n for n in p.shape) for p in matrices)
