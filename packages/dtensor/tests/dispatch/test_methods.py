"""Methods and operators of global tensors find a known program without torch, and leave every other call to torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from meshwright_dtensor.api import distribute
from meshwright_dtensor.dispatch.methods import METHODS, OPERATORS
from meshwright_dtensor.dispatch.planned_calls import Target
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.tensor.global_tensor import DetachedView, GlobalTensor
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import fake_group
from meshwright_dtensor.trace.module_stack import FRAMES, Frame, Frames


class _Asked(Tensor):
    """Gives back what torch asks a class for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func, args, kwargs


OPERANDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys("expand view repeat reshape roll permute".split(), (1,)),
    **dict.fromkeys("gather masked_fill index_select".split(), (0, torch.zeros(1, dtype=torch.int64), 1)),
    **dict.fromkeys("addmm baddbmm".split(), (torch.ones(1), torch.ones(1))),
    **dict.fromkeys(
        "add div expand_as ge gt le lt matmul mm bmm mul ne pow sub type_as view_as".split(), (torch.ones(1),)
    ),
    **dict.fromkeys("chunk cumsum prod select softmax unsqueeze to".split(), (0,)),
    **dict.fromkeys("movedim transpose".split(), (0, 0)),
    "gather": (0, torch.zeros(1, dtype=torch.int64)),
    "index_select": (0, torch.zeros(1, dtype=torch.int64)),
    "masked_fill": (torch.ones(1, dtype=torch.bool), 1),
    "select": (0, 0),
    "to": (torch.float64,),
    "__matmul__": (torch.ones(1),),
}


@pytest.mark.parametrize("name", [*METHODS, *OPERATORS, "__neg__"])
def test_functions_are_those_that_torch_asks_for(name: str) -> None:
    probe = torch.ones(1).as_subclass(_Asked)
    operands = OPERANDS.get(name, () if name in METHODS or name == "__neg__" else (1,))
    func, args, kwargs = getattr(probe, name)(*operands)
    expected = OPERATORS.get(name, Tensor.neg if name == "__neg__" else getattr(Tensor, name))
    assert func is expected
    assert len(args) == 1 + len(operands) and all(map(operator.is_, args, (probe, *operands)))
    assert not kwargs
    assert getattr(DetachedView, name) is getattr(Tensor, name) is not getattr(GlobalTensor, name)


@pytest.fixture
def x() -> Iterator[GlobalTensor]:
    with fake_group(2):
        mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
        yield distribute(torch.arange(8.0).view(4, 2), mesh, ["I"])


CALLS: dict[str, Callable[[Any], Any]] = {
    "operator": lambda x: x * x + 2,
    "reflected": lambda x: 1 - (3 + x),
    "index": lambda x: x[1:, None] - x[..., :1],
    "method": lambda x: x.transpose(0, 1).mean(-1, keepdim=True),
    "names": lambda x: x.transpose(dim0=0, dim1=1).contiguous().view(8),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_known_calls_do_not_come_through_torch(
    call: Callable[[Any], Any], x: GlobalTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = call(x.full_tensor())
    assert torch.equal(call(x).full_tensor(), expected)
    calls = []
    ask = GlobalTensor.__torch_function__

    def counted(cls: type, func: Any, *rest: Any) -> Any:
        calls.append(func)
        return ask(func, *rest)

    monkeypatch.setattr(GlobalTensor, "__torch_function__", classmethod(counted))
    result = call(x)
    assert not calls
    # another form of the call is new
    monkeypatch.undo()
    assert torch.equal(result.full_tensor(), expected)
    MeshContext.of(x.device_mesh).programs.clear()
    monkeypatch.setattr(GlobalTensor, "__torch_function__", classmethod(counted))
    call(x)
    assert calls


def test_function_modes_see_known_calls(x: GlobalTensor) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    x * 2, -x, x.view(8)
    with Mode():
        x * 2, -x, x.view(8)
    assert seen == [Tensor.mul, Tensor.neg, Tensor.view]


def test_equal_arguments_of_other_types_have_programs_of_their_own(x: GlobalTensor) -> None:
    whole = x.to(torch.int64)
    for _ in range(2):
        for number in (1, True, 1.0, 0.0, -0.0, 0, False):
            ours, expected = (whole * number).full_tensor(), whole.full_tensor() * number
            assert ours.dtype == expected.dtype and torch.equal(ours.signbit(), expected.signbit())
        assert x.clamp(3.0).full_tensor().max() == 7 and x.clamp(max=3.0).full_tensor().max() == 3
        assert x.sum(0).shape == x.sum(dim=0).shape == (2,) and x.sum((0,), True).shape == (1, 2)
        # a slice is not the numbers that it has
        for index in (
            (slice(0, 1),),
            (0, 1, None),
            (slice(None),),
            (None, None, None),
            (slice(0, 1, None), 0),
        ):
            assert torch.equal(x[index].full_tensor(), x.full_tensor()[index])


def test_unknown_operands_get_their_turn(x: GlobalTensor) -> None:
    class Other:
        def __rmul__(self, left: Any) -> str:
            return "theirs"

    x * 2
    assert x * Other() == "theirs"
    assert (x == None) is False  # noqa: E711
    with pytest.raises(TypeError):
        x + "text"


def test_a_planned_call_is_counted_once(x: GlobalTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frames, "with_rules", True)
    target = Target(((("tp", 0),),))
    for _ in range(2):
        # in the first forward no program is known
        frame = Frame("m", {"mul": {1: target}})
        FRAMES.stack.append(frame)
        try:
            layouts = [(x * number).global_layout.states for number in (2, 3, 2, 3)]
        finally:
            FRAMES.stack.pop()
        assert layouts == [("I",), (0,), ("I",), ("I",)]
        assert frame.counts["mul"] == 4
