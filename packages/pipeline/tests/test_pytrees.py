"""Leaves of trees: those of pytree in its order, with objects that have tensors in fields taken apart."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright_pipeline._torch import pytree
from meshwright_pipeline.pytrees import leaves_of, tensors_of

Pair = namedtuple("Pair", "first second")
LEAVES = (
    None,
    True,
    2,
    0.5,
    "text",
    torch.ones(2),
    torch.nn.Parameter(torch.ones(1)),
    torch.float32,
    object(),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists, tuples, dicts and their subclasses."""
    items = st.lists(inner, max_size=3)
    named = st.dictionaries(st.sampled_from("cab"), inner)
    return items | items.map(tuple) | named | named.map(OrderedDict) | st.builds(Pair, inner, inner)


@given(st.recursive(st.sampled_from(LEAVES), containers, max_leaves=8))
def test_leaves_are_those_of_pytree(tree: Any) -> None:
    assert list(map(id, leaves_of(tree))) == list(map(id, pytree.tree_leaves(tree)))


def test_fields_and_sizes() -> None:
    x, size = torch.ones(1), torch.Size([2, 3])
    assert leaves_of([size, {"a": SimpleNamespace(x=x, n=1)}]) == [size, x, 1]
    assert tensors_of((SimpleNamespace(x=[x]), None)) == [x]
