"""Models built in `deferred_init` have the values of one device, are stored in files, and leave no file on the disk."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrizations, spectral_norm

from meshwright_dtensor.deferred import materialize
from meshwright_dtensor.deferred.mapped_files import PREFIX
from meshwright_dtensor.deferred.materialize import deferred_init, is_deferred, local_values
from meshwright_dtensor.sharding.boxes import chunk_box, slice_of
from meshwright_dtensor.testing.on_device import random_state, seeded

SMALL = 256  # bytes: makes nearly every tensor of these models a large one


class Initialised(nn.Module):
    """One weight per initialiser of `torch.nn.init`."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(37, 21)) for _ in range(10))
        rules: list[Callable[[torch.Tensor], Any]] = [
            nn.init.trunc_normal_,
            lambda t: nn.init.trunc_normal_(t, 0.0, 1.0, 1.5, 3.0),  # the rejection branch
            nn.init.orthogonal_,
            nn.init.xavier_uniform_,
            nn.init.xavier_normal_,
            nn.init.kaiming_uniform_,
            nn.init.kaiming_normal_,
            nn.init.eye_,
            lambda t: nn.init.sparse_(t, 0.3),
            nn.init.ones_,
        ]
        for weight, rule in zip(self.weights, rules, strict=True):
            rule(weight)


class Made(nn.Module):
    """One buffer per way of making a tensor."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.rand(40, 30)
        made = [
            torch.zeros(50, 20),
            torch.ones(50, 20, dtype=torch.bfloat16),
            torch.full((50, 20), 3.5),
            torch.full((50, 20), 7),
            torch.empty(50, 20).fill_(2),
            torch.empty_strided((20, 50), (1, 20)).normal_(),
            torch.rand(50, 20),
            torch.rand(50, 20, generator=seeded(3)),
            torch.randn(50, 20, dtype=torch.float64),
            torch.randint(3, 90, (50, 20)),
            torch.randperm(999),
            torch.normal(1.0, 2.0, (50, 20)),
            torch.normal(base, 0.5),
            torch.arange(1000),
            torch.linspace(0, 1, 1000),
            torch.eye(40),
            base.new_zeros(50, 20),
            base.new_full((50, 20), 4.0),
            base.new_empty(50, 20).uniform_(),
            torch.zeros_like(base),
            torch.ones_like(base.t()),
            torch.full_like(base, 8),
            torch.rand_like(base),
            torch.randn_like(base.t()),
            torch.randint_like(base, 50),
            torch.empty_like(base).exponential_(),
            torch.bernoulli(base),
            torch.tensor([[0.5] * 30] * 40),
            base * 0.02 + 1,
            base.t() @ base,
            base.half(),
            base.t().contiguous(),
            torch.outer(torch.arange(40.0), torch.arange(30.0)),
            torch.cat([base, base]),
            torch.where(base > 0.5, base, -base),
            base.cumsum(0),
            base[:5].expand(8, 5, 30).clone(),
            base.to(torch.float64, copy=True),
            torch.tril(torch.ones(40, 40)),
            (base > 0.3) | (base < 0.1),
            torch.linalg.qr(torch.randn(30, 30))[0],
        ]
        for index, tensor in enumerate(made):
            self.register_buffer(f"made_{index}", tensor)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 24, padding_idx=3)
        self.head = nn.Linear(24, 60, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(128)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "initialised": Initialised,
    "made": Made,
    "tied": Tied,
    "mlp": lambda: nn.Sequential(nn.Linear(33, 65), nn.ReLU(), nn.LayerNorm(65), nn.Linear(65, 7)),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(3, 17, 5), nn.BatchNorm2d(17), nn.ConvTranspose2d(17, 4, 3)
    ),
    "channels last": lambda: nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last),
    "recurrent": lambda: nn.LSTM(19, 23, num_layers=2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(24, 4, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 40, batch_first=True),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(33, 21)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(33, 21)),
    "old spectral norm": lambda: spectral_norm(nn.Linear(33, 21)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(33, 21)),
    "bfloat16": lambda: nn.Linear(33, 21, dtype=torch.bfloat16),
    "cast": lambda: nn.Linear(33, 21).to(torch.bfloat16),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(20), nn.Linear(20, 20)),
    "copies": lambda: nn.ModuleList(
        copy.deepcopy(layer) for layer in [nn.Linear(20, 20), nn.BatchNorm1d(99)] * 2
    ),
}


def mapped_here() -> int:
    """How many of our files this process has mapped."""
    return sum(PREFIX in line for line in Path("/proc/self/maps").read_text().splitlines())


def same(model: nn.Module, other: nn.Module) -> None:
    a = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    b = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        if isinstance(tensor, nn.UninitializedParameter):
            continue
        got = b[name]
        assert type(got) is type(tensor)
        assert (got.dtype, got.stride(), got.requires_grad) == (
            tensor.dtype,
            tensor.stride(),
            tensor.requires_grad,
        ), name
        assert torch.equal(got, tensor), name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("min_bytes", [1, SMALL])
def test_values_strides_and_generator_equal_one_device(name: str, min_bytes: int) -> None:
    torch.manual_seed(5)
    plain = MODELS[name]()
    end = random_state()
    torch.manual_seed(5)
    with deferred_init(min_bytes=min_bytes):
        model = MODELS[name]()
    same(plain, model)
    assert torch.equal(random_state(), end)
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, nn.UninitializedParameter) and not isinstance(model, nn.ModuleList):
            assert is_deferred(tensor) == (tensor.nbytes >= min_bytes), tensor.shape
    assert is_deferred(model)
    assert not is_deferred(plain)


def test_tied_parameters_share_one_file() -> None:
    with deferred_init(min_bytes=SMALL):
        model = Tied()
    assert model.head.weight is model.embedding.weight


def test_small_tensors_stay_in_memory() -> None:
    with deferred_init():
        model = nn.Linear(16, 16)
    assert not is_deferred(model)


def test_tensors_after_the_context_stay_in_memory() -> None:
    with deferred_init():
        inside = torch.empty(1 << 16)
    assert is_deferred(inside)
    assert not is_deferred(torch.empty(1 << 16))
    assert not is_deferred(inside.clone())


def test_deferred_model_trains() -> None:
    torch.manual_seed(2)
    plain = MODELS["mlp"]()
    torch.manual_seed(2)
    with deferred_init(min_bytes=SMALL):
        model = MODELS["mlp"]()
    batch = torch.randn(9, 33)
    for trained in (plain, model):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            trained(batch).square().mean().backward()
            optimizer.step()
    same(plain, model)
    assert is_deferred(next(model.parameters()))
    assert model.state_dict().keys() == plain.state_dict().keys()
    same(plain, copy.deepcopy(model))


@pytest.mark.parametrize("states", [(0,), (1,), ("I",)])
def test_local_values_are_a_detached_copy_of_the_box(states: tuple[str | int, ...]) -> None:
    with deferred_init(min_bytes=SMALL):
        weight = nn.Parameter(torch.randn(14, 10))
        strided = torch.randn(10, 14).t()
    for tensor in (weight, strided):
        box = chunk_box(tensor.shape, (4,), (3,), states)
        local = local_values(tensor, box)
        assert torch.equal(local, slice_of(tensor.detach(), box))
        assert not is_deferred(local)
        assert not local.requires_grad
        assert local.untyped_storage().nbytes() == local.nbytes
        before = tensor.detach().clone()
        local.zero_()
        assert torch.equal(tensor, before)
    assert local.t().is_contiguous()  # the memory order of the whole tensor


def test_files_are_unlinked_and_freed_with_their_tensors(tmp_path: Path) -> None:
    start = mapped_here()
    with deferred_init(directory=tmp_path, min_bytes=SMALL):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
        assert mapped_here() - start == 5
    assert list(tmp_path.iterdir()) == []
    for index, layer in enumerate(model):
        box = chunk_box((64, 64), (4,), (1,), (0,))
        layer.weight = nn.Parameter(local_values(layer.weight, box))
        assert mapped_here() - start == 4 - index
    assert not is_deferred(model)


def test_contexts_nest_and_end_on_exception() -> None:
    start = mapped_here()
    torch.manual_seed(1)
    want = torch.rand(100, 100)
    torch.manual_seed(1)
    with deferred_init(min_bytes=SMALL):
        with deferred_init(min_bytes=SMALL):
            inner = torch.rand(100, 100)
        outer = torch.zeros(100, 100)
    assert is_deferred(inner) and is_deferred(outer)
    assert torch.equal(inner, want)
    with pytest.raises(ZeroDivisionError), deferred_init(min_bytes=SMALL):
        lost = torch.zeros(100, 100)
        raise ZeroDivisionError
    assert not is_deferred(torch.zeros(100, 100))
    del inner, outer, lost
    assert mapped_here() == start


def test_model_errors_are_raised_by_torch() -> None:
    with deferred_init(min_bytes=1):
        with pytest.raises(RuntimeError, match="must match the size"):
            torch.zeros(100, 3) + torch.zeros(100, 4)
        with pytest.raises(RuntimeError, match="negative dimension"):
            torch.empty(-1, 1 << 20)


def test_other_devices_and_subclasses_are_not_mapped() -> None:
    with deferred_init(min_bytes=1):
        assert torch.empty(100, 100, device="meta").is_meta
        assert torch.rand(10, 10).to("meta").is_meta
        with torch.device("meta"):
            assert nn.Linear(100, 100).weight.is_meta
        sparse = torch.eye(50).to_sparse()
    assert torch.equal(sparse.to_dense(), torch.eye(50))


def test_fake_tensors_stay_fake_in_either_order() -> None:
    with deferred_init(min_bytes=1), FakeTensorMode():
        inside = nn.Linear(30, 30)
    with FakeTensorMode(), deferred_init(min_bytes=1):
        outside = nn.Linear(30, 30)
    assert isinstance(inside.weight.data, FakeTensor) and isinstance(outside.weight.data, FakeTensor)
    assert not is_deferred(inside) and not is_deferred(outside)


def test_deferred_model_is_saved_and_loaded() -> None:
    with deferred_init(min_bytes=1):
        model = MODELS["mlp"]()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = MODELS["mlp"]()
    other.load_state_dict(torch.load(file))
    same(model, other)
    with pytest.raises(RuntimeError, match="not resizable"):  # and not silently something else
        next(model.parameters()).data.resize_(1000, 1000)


@pytest.mark.host("the test sets the default device")
def test_a_default_device_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Tensors without a device would take its memory at once."""
    with torch.device("meta"), deferred_init():
        pass
    with deferred_init():
        pass
    assert not caplog.records
    monkeypatch.setattr(materialize, "unnamed_device", lambda: torch.device("cuda", 1))
    with deferred_init():
        pass
    (record,) = caplog.records
    assert "default device is cuda:1" in record.getMessage()
    assert "inside of torch.device('cpu')" in record.getMessage()
