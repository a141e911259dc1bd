"""What a process holds while and after a model is built in files, and models that are built without values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright_dtensor.deferred import page_release
from meshwright_dtensor.deferred.mapped_files import MappedFiles
from meshwright_dtensor.deferred.materialize import deferred_init, has_values, is_deferred, local_values
from meshwright_dtensor.deferred.page_release import Resident
from meshwright_dtensor.sharding.boxes import whole_box

pytestmark = pytest.mark.host("pages of the host's memory")

MIB = 1 << 20

# Fills a tensor of 0.75 GiB in one call, and others: prints the peak of resident memory above the start.
BUILD = """
import sys, torch
from pathlib import Path
from meshwright_dtensor.deferred.materialize import deferred_init

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

torch.empty(1 << 20).uniform_()
before = status("VmRSS:")
with deferred_init(values=sys.argv[1] == "values"):
    weights = [torch.empty(1 << 26).uniform_() for _ in range(3)]
    big = torch.empty(3 << 26).fill_(1.5)
print(status("VmHWM:") - before, status("VmRSS:") - before, float(big[7]), float(weights[0][:100].sum() > 0))
"""
BUILT = 6 * (1 << 28)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the system does not say what a process holds"
)
@pytest.mark.parametrize(("how", "values"), [("values", [1.5, 1.0]), ("none", [0.0, 0.0])])
def test_resident_memory_is_bounded_while_building(how: str, values: list[float]) -> None:
    done = subprocess.run([sys.executable, "-c", BUILD, how], capture_output=True, text=True, check=True)
    peak, left, *read = (float(word) for word in done.stdout.split())
    assert read == values
    assert left < 64 * MIB
    assert (
        peak < BUILT * 0.75
    )  # 256 MiB, and what is written between two looks on a machine that has other work


def test_sweep_loses_no_data_and_keeps_no_storage_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[int] = []
    monkeypatch.setattr(page_release, "unmap", lambda storage: swept.append(storage.nbytes()))
    resident, files = Resident(ceiling=0), MappedFiles(tmp_path)
    kept, dropped = (files.zeros((n,), (1,), torch.float32) for n in (1 << 20, 1 << 19))
    for tensor in (kept, dropped):
        resident.add(tensor.untyped_storage())
    del dropped, tensor
    resident.sweep()
    assert swept == [kept.nbytes]
    monkeypatch.undo()
    kept.uniform_()
    before = kept.clone()
    resident.sweep()
    assert torch.equal(kept, before)


def test_local_values_leave_no_pages_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(
        "meshwright_dtensor.deferred.materialize.release", lambda storage: released.append(storage.nbytes())
    )
    with deferred_init():
        weight = torch.randn(256, 256)
    part = local_values(weight, whole_box((256, 256)))
    assert torch.equal(part, weight) and released == [weight.nbytes]


class Built(nn.Module):
    """A constructor that makes values of every kind and reads some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 512)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.orthogonal_(nn.init.zeros_(nn.Parameter(torch.empty(8, 8))) + torch.eye(8))
        self.scale = nn.Parameter(0.5 * torch.randn(256, 256).abs())
        self.small = nn.Parameter(torch.full((16,), 3.0))
        self.embedding = nn.Embedding(1024, 64, padding_idx=0)
        self.register_buffer("mask", torch.ones(300, 300, dtype=torch.bool).tril())
        self.register_buffer("places", torch.arange(1 << 15))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_without_values_keeps_shapes_and_integers() -> None:
    torch.manual_seed(0)
    plain = Built()
    with deferred_init(values=False):
        hollow = Built()
    state, other = plain.state_dict(), hollow.state_dict()
    assert {name: (t.shape, t.stride(), t.dtype) for name, t in state.items()} == {
        name: (t.shape, t.stride(), t.dtype) for name, t in other.items()
    }
    assert torch.equal(hollow.mask, plain.mask) and torch.equal(hollow.places, plain.places)
    assert hollow.small.tolist() == [3.0] * 16 and hollow.rates == plain.rates
    filled = {name for name, t in other.items() if has_values(t)}
    assert filled == {"small", "linear.bias", "mask", "places"}
    assert is_deferred(hollow)
    assert all(has_values(t) for t in state.values())
    assert not has_values(torch.empty(2, device="meta"))


def test_without_values_takes_no_disk_space(tmp_path: Path) -> None:
    with deferred_init(directory=tmp_path, values=False):
        huge = nn.Linear(1 << 20, 1 << 19, bias=False)  # 2 TiB: more than there is of anything
        nn.init.normal_(huge.weight)
        doubled = huge.weight.detach().to(torch.bfloat16) * 2
    assert not has_values(huge.weight) and not has_values(doubled) and doubled.dtype == torch.bfloat16
