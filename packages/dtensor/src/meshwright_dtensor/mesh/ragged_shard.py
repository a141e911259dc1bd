"""RaggedShard: a shard whose borders are those of rows, blocks or whole tensors, as a torch placement.

    mw.distribute(weight, mesh, [RaggedShard.blocks(weight.shape, 2, 256)])

It is registered through the ``meshwright_placements`` hook as ``"ragged"``. Plans name it by its intervals
(``"S(0; 0:64 | 64:1)"``), or by the unit of `zero`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch.distributed.tensor import Shard

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.run_shard import RunShard
from meshwright_dtensor.sharding.ragged import rows_of_blocks, unit_lengths


class RaggedShard(RunShard):
    """Shard of tensor dim ``dim`` of which each rank of the axis owns the next ``lengths[rank]`` elements, some maybe none.

    Only global tensors have it: stock DTensor would shard in chunks. Where the lengths are those of torch.chunk, it is `Shard`.

    Args:
        dim: the tensor dim; negative counts from the end.
        lengths: per rank its elements of the dim.

    Raises UnsupportedError: a length is not a number from 0 on.
    """

    lengths: tuple[int, ...]

    def __new__(cls, dim: int, lengths: Sequence[int]) -> RaggedShard:
        return Shard.__new__(cls, dim)  # type: ignore[call-arg]

    def __init__(self, dim: int, lengths: Sequence[int]) -> None:
        wrong = [n for n in lengths if isinstance(n, bool) or not isinstance(n, int) or n < 0]
        if wrong or not lengths:
            raise UnsupportedError(
                f"RaggedShard takes one number of elements for each rank, from 0 on, not {wrong[0] if wrong else lengths!r}"
            )
        ends = itertools.accumulate(lengths, initial=0)
        super().__init__(dim, [((start, length),) for start, length in zip(ends, lengths)])
        self.lengths = tuple(lengths)

    @classmethod
    def units(cls, dim: int, size: int, ranks: int, unit: int) -> RaggedShard:
        """A dim of ``size`` cut at multiples of ``unit``, as evenly as those allow."""
        _check_positive("unit", unit)
        return cls(dim, unit_lengths(size, ranks, unit))

    @classmethod
    def blocks(cls, shape: Sequence[int], ranks: int, block: int) -> RaggedShard:
        """Rows (dim 0) of a tensor of ``shape``, cut where blocks of ``block`` elements end, in the order of its elements."""
        _check_positive("block", block)
        if not shape:
            raise UnsupportedError("a tensor without dims has no rows to shard; replicate it")
        return cls.units(0, shape[0], ranks, rows_of_blocks(shape, block))

    def __repr__(self) -> str:
        return f"RaggedShard({self.dim}, {self.lengths})"

    __str__ = __repr__


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedError(
            f"{name} is {value!r}; shards end at multiples of it, so it is an int from 1 on"
        )
