"""The ranks of one host build a model together: each large tensor is made once, with the values of one device on every rank."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright_dtensor._torch.modes import dispatch_modes
from meshwright_dtensor.deferred import host_ranks, materialize, shared_build
from meshwright_dtensor.deferred.host_ranks import join_host, this_job
from meshwright_dtensor.deferred.mapped_files import is_shared
from meshwright_dtensor.deferred.materialize import deferred_init, is_deferred, local_values
from meshwright_dtensor.errors import MeshwrightError, UsageError
from meshwright_dtensor.sharding.boxes import chunk_box, slice_of
from meshwright_dtensor.testing.rank_pool import RankError, RankPool

pytestmark = pytest.mark.host("memory that ranks of a host share")

SMALL = 256
FILLS = {"aten::normal_", "aten::uniform_", "aten::copy_", "aten::fill_", "aten::mul_", "aten::linalg_qr"}


class Counting(TorchDispatchMode):
    """Counts the calls that fill large tensors, below `deferred_init`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in FILLS and args[0].nbytes >= SMALL and not args[0].is_meta:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """Initialisation of many kinds: random, from another module, from values that it reads, through numpy, in place, nested."""

    def __init__(self, before: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.ring = nn.Linear(24, 24, bias=False)
        nn.init.orthogonal_(self.ring.weight)
        nn.init.trunc_normal_(self.linear.weight, std=0.5)
        self.scale = nn.Parameter(torch.ones(3) * self.linear.weight.detach().std())
        self.small = nn.Parameter(torch.randn(5))
        generator = torch.Generator().manual_seed(11)
        self.noise = nn.Parameter(torch.empty(40, 10).normal_(generator=generator))
        with torch.no_grad():
            self.noise[::2].mul_(3)
            # past torch, and in place after that
            self.noise.detach().numpy()[3] += 1
            self.noise.mul_(2)
            if before is not None:
                self.ring.weight.copy_(before.linear.weight.t() @ before.ring.weight)
        # control that depends on values
        if self.linear.weight.detach().mean().item() > 0:
            self.extra = nn.Parameter(torch.randn(30, 30))
        self.register_buffer("mask", torch.ones(32, 32).tril())
        self.register_buffer("table", torch.from_numpy(np.arange(400.0).reshape(20, 20)).clone())
        self.register_buffer("drawn", torch.multinomial(torch.ones(200), 150))
        self.names = [round(number, 4) for number in self.noise.detach()[3].tolist()]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24, padding_idx=1)
        self.first = Layer()
        with deferred_init(min_bytes=SMALL):
            self.second = Layer(self.first)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self.scaled)

    def scaled(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.uniform_(-0.1, 0.1)


def built(
    shared: bool = True, seed: int = 3, model: type[nn.Module] = Model
) -> tuple[nn.Module, Counter[str]]:
    torch.manual_seed(seed)
    with Counting() as counting, deferred_init(min_bytes=SMALL, shared=shared):
        result = model()
    return result, counting.calls


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def shares(rank: int, size: int, shared: bool) -> Any:
    model, calls = built(shared)
    end = torch.get_rng_state()
    assert is_deferred(model) and model.head.weight is model.embed.weight
    assert is_shared(model.embed.weight.untyped_storage()) == (shared and size > 1)
    assert (model.first.names, model.second.names) != ([], [])
    whole = state(model)
    box = chunk_box((50, 24), (size,), (rank,), (0,))
    part = local_values(model.embed.weight, box)
    # a rank's writes are its own
    with torch.no_grad():
        model.first.linear.weight.fill_(rank)
    dist.barrier()
    assert bool((model.first.linear.weight == rank).all())
    local_values(model.first.linear.weight, chunk_box((24, 24), (1,), (0,), (0,)))
    assert bool((model.first.linear.weight == rank).all())
    return whole, end, calls, part, os.getpid()


def check(results: list[Any]) -> None:
    torch.manual_seed(3)
    plain = Model()
    end, want = torch.get_rng_state(), state(plain)
    for rank, (whole, got_end, _, part, _) in enumerate(results):
        assert whole.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(whole[name], tensor) and whole[name].stride() == tensor.stride(), name
        assert torch.equal(got_end, end)
        assert torch.equal(
            part, slice_of(want["embed.weight"], chunk_box((50, 24), (len(results),), (rank,), (0,)))
        )


def test_ranks_build_once_and_have_the_values_of_one_device(rank_pool: RankPool) -> None:
    results = rank_pool.run(3, shares, True)
    check(results)
    counts = [calls for _, _, calls, _, _ in results]
    busy = [sum(c.values()) for c in counts]
    assert sum(total > 0 for total in busy) == 1, counts
    (alone,) = rank_pool.run(1, shares, True)
    assert max(busy) == sum(alone[2].values()) > 10


def test_ranks_that_do_not_share_build_each_on_their_own(rank_pool: RankPool) -> None:
    """The negative control of the counts."""
    results = rank_pool.run(2, shares, False)
    check(results)
    first, second = (sum(calls.values()) for _, _, calls, _, _ in results)
    assert first == second > 10


def hosts(rank: int, size: int) -> Any:
    identity = host_ranks.host_identity()
    host_ranks.host_identity = lambda: f"{identity} {rank // 2}"  # type: ignore[assignment]
    try:
        return shares(rank, size, True)
    finally:
        host_ranks.host_identity = _IDENTITY  # type: ignore[assignment]


_IDENTITY = host_ranks.host_identity


def test_each_host_has_a_builder(rank_pool: RankPool) -> None:
    results = rank_pool.run(4, hosts)
    check(results)
    busy = [sum(calls.values()) > 0 for _, _, calls, _, _ in results]
    assert sum(busy[:2]) == sum(busy[2:]) == 1


def leaves(rank: int, size: int, what: str) -> tuple[str, str, float]:
    """The error on this rank, and the seconds it took."""
    start = time.monotonic()
    torch.manual_seed(rank if what == "seed" else 0)
    try:
        with deferred_init(min_bytes=SMALL):
            if what == "raises first" and rank == 1:
                raise ValueError("no such layer")
            nn.Linear(32, 32)
            if what == "raises" and rank == 1:
                raise ValueError("no such layer")
            if what == "shape":
                nn.Linear(32, 32 + 32 * (rank == 1))
            if what == "more" and rank == 1:
                nn.Linear(32, 32)
            if what == "value":
                torch.zeros(32, 32).fill_(float(rank))
            if what == "own":
                torch.zeros(32, 32).copy_(torch.full((32,), float(rank)))
            if what == "late result":
                torch.cat([torch.full((9,), float(rank))] * 30)
            if what == "same" and rank < size:
                torch.zeros(8, 32) @ torch.zeros(8, 32)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


@pytest.mark.parametrize(
    ("what", "kind", "pieces"),
    [
        ("raises", MeshwrightError, ["rank 1 has failed: ValueError: no such layer"]),
        ("raises first", MeshwrightError, ["rank 1 has failed: ValueError: no such layer"]),
        ("seed", UsageError, ["from the random state", "seed every rank alike"]),
        ("shape", UsageError, ["[32, 32]", "[64, 32]", "aten::empty", "shared=False"]),
        ("more", UsageError, ["the end of deferred_init", "[32, 32]"]),
        ("value", UsageError, ["is at aten::fill_(float32 [32, 32], "]),
        ("own", UsageError, ["float32 [32] with the checksum"]),
        ("late result", UsageError, ["the result float32 [270] with the checksum", "of aten::cat"]),
    ],
)
def test_a_difference_or_failure_ends_the_build_on_all_ranks(
    rank_pool: RankPool, what: str, kind: type[Exception], pieces: list[str]
) -> None:
    results = rank_pool.run(3, leaves, what)
    for rank, (name, text, seconds) in enumerate(results):
        if what.startswith("raises") and rank == 1:
            assert name == "ValueError"
            continue
        assert name == kind.__name__
        assert all(piece in text for piece in pieces), text
        assert "\n" not in text
        # not the limit on waiting, which is minutes
        assert seconds < 60


def test_an_error_of_a_call_is_that_of_torch_on_every_rank(rank_pool: RankPool) -> None:
    """And ranks that catch it go on together."""
    assert [name for name, _, _ in rank_pool.run(2, leaves, "same")] == ["RuntimeError"] * 2
    assert rank_pool.run(2, catches) == [True, True]


def catches(rank: int, size: int) -> bool:
    with deferred_init(min_bytes=SMALL):
        first = torch.zeros(8, 32)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            first @ torch.zeros(8, 32)
        second = torch.rand(16, 16)
    return is_deferred(second)


def only_some(rank: int, size: int, builders: list[int]) -> Any:
    """Whether this rank's model is shared, what was logged, and its values."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshwright").addHandler(handler)
    materialize.JOIN_SECONDS = 0.5
    usual = materialize.join_host
    materialize.join_host = lambda job, where: join_host(job, where, 0.5)  # type: ignore[assignment]
    try:
        if rank not in builders:
            return None
        model, _ = built()
        return is_shared(model.embed.weight.untyped_storage()), records, state(model)
    finally:
        materialize.join_host = usual
        materialize.JOIN_SECONDS = host_ranks.JOIN_SECONDS
        logging.getLogger("meshwright").removeHandler(handler)
        dist.barrier()


def test_ranks_that_do_not_come_are_not_waited_for(rank_pool: RankPool) -> None:
    torch.manual_seed(3)
    want = state(Model())
    first, second, third = rank_pool.run(3, only_some, [0, 2])
    assert second is None and first[0] and third[0]
    logged = [*first[1], *third[1]]
    assert len(logged) == 1 and "did not come in 0.5 s" in logged[0] and "shared=False" in logged[0]
    (is_one, logged, got), *_ = rank_pool.run(3, only_some, [0])
    assert not is_one and len(logged) == 1
    for values in (first[2], third[2], got):
        assert all(torch.equal(values[name], tensor) for name, tensor in want.items())


def no_sockets(rank: int, size: int) -> Any:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshwright").addHandler(handler)
    usual = materialize.join_host

    def refused(*args: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    materialize.join_host = refused  # type: ignore[assignment]
    try:
        model, calls = built()
        return is_shared(model.embed.weight.untyped_storage()), records, sum(calls.values()), state(model)
    finally:
        materialize.join_host = usual
        logging.getLogger("meshwright").removeHandler(handler)


def test_ranks_that_cannot_connect_build_each_on_their_own(rank_pool: RankPool) -> None:
    torch.manual_seed(3)
    want = state(Model())
    for is_one, records, calls, got in rank_pool.run(2, no_sockets):
        assert not is_one and calls > 10
        assert (
            len(records) == 1 and "cannot connect" in records[0] and "Operation not permitted" in records[0]
        )
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def several(rank: int, size: int) -> Any:
    """Tensors of other contexts are each rank's own in a later one, and those of one inside without values stay hollow."""
    torch.manual_seed(0)
    with deferred_init(min_bytes=SMALL):
        first = torch.rand(20, 20)
    with deferred_init(min_bytes=SMALL, shared=False):
        alone = torch.rand(20, 20)
    with deferred_init(min_bytes=SMALL):
        first.mul_(2).add_(rank)
        alone.mul_(3).add_(rank)
        with deferred_init(min_bytes=SMALL, values=False):
            torch.rand(1 << 40).mul_(2)
            with deferred_init(min_bytes=SMALL):
                inner = torch.rand(20, 20).mul_(2)
        last = torch.rand(20, 20)
    dist.barrier()
    return [tensor.clone() for tensor in (first - rank, alone - rank, inner, last)], torch.get_rng_state()


def unusual(rank: int, size: int) -> Any:
    """Calls whose results cannot be sent, that write into memory of both kinds, that change a shape."""
    torch.manual_seed(1)
    with Counting() as counting, deferred_init(min_bytes=SMALL):
        base = torch.randn(20, 20)
        sparse = base.relu().to_sparse()
        values, indices = torch.empty(20, 20), torch.zeros(20, dtype=torch.long)
        torch.max(base, 0, out=(values[0], indices))
        sums = torch.zeros(20)
        torch.sum(base, 0, out=sums)
        view = torch.ops.aten._unsafe_view(base, [400])
        base.mul_(2)
        parts = torch._foreach_mul([base, base + 1], 3)
        values[1:].zero_()
        transposed = base.t().clone()
        changed = ""
        try:
            torch.add(torch.zeros(2, 3), 1, out=torch.zeros(20, 20))
        except MeshwrightError as error:
            changed = str(error)
    tensors = [sparse.to_dense(), values, indices, sums, view, *parts, transposed]
    return [tensor.clone() for tensor in tensors], changed, sum(counting.calls.values())


def test_unusual_calls_have_the_results_of_one_device(rank_pool: RankPool) -> None:
    ((want, _, _),) = rank_pool.run(1, unusual)
    results = rank_pool.run(2, unusual)
    for got, _, _ in results:
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, want, strict=True))
    # on the rank that does not write
    changed = [text for _, text, calls in results if not calls]
    assert len(changed) == 1 and "changes the shape of a tensor from (20, 20) to (2, 3)" in changed[0]


def test_tensors_of_other_contexts_are_each_ranks_own(rank_pool: RankPool) -> None:
    torch.manual_seed(0)
    drawn = [torch.rand(20, 20) for _ in range(4)]
    first, alone, inner, last = drawn
    for got, end in rank_pool.run(2, several):
        assert torch.equal(got[2], inner * 2) and torch.equal(got[3], last)
        torch.testing.assert_close(got[:2], [first * 2, alone * 3])
        assert torch.equal(end, torch.get_rng_state())


def full(rank: int, size: int) -> tuple[str, str]:
    """The builder's disk is full."""

    def refuse(number: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    usual = os.posix_fallocate
    os.posix_fallocate = refuse
    try:
        with deferred_init(min_bytes=SMALL):
            nn.Linear(32, 32)
    except MeshwrightError as error:
        return type(error).__name__, str(error)
    finally:
        os.posix_fallocate = usual
    return "", ""


def test_a_full_disk_is_an_error_of_every_rank(rank_pool: RankPool) -> None:
    for name, text in rank_pool.run(2, full):
        assert name == "MeshwrightError" and "No space left" in text and "4096 bytes" in text


def killed(rank: int, size: int, directory: str, builder: bool) -> str:
    try:
        with deferred_init(min_bytes=SMALL, directory=directory):
            nn.Linear(64, 64)
            if dispatch_modes()[-1].build.builds == builder:
                os.kill(os.getpid(), signal.SIGKILL)
            nn.Linear(64, 64)
    except MeshwrightError as error:
        (Path(directory) / "seen").write_text(str(error))
        raise
    return ""


@pytest.mark.parametrize("builder", [True, False])
def test_a_killed_rank_ends_the_build_and_leaves_no_file(tmp_path: Path, builder: bool) -> None:
    with RankPool() as pool:
        with pytest.raises((MeshwrightError, RankError)):
            pool.run(2, killed, str(tmp_path), builder)
    assert "has ended" in (tmp_path / "seen").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]


def test_a_job_of_one_rank_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    assert this_job() is None
    job = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for key, value in job.items():
        monkeypatch.setenv(key, value)
    launched = this_job()
    assert launched is not None and launched.rank == 1 and launched.of_host() == 2
    monkeypatch.setenv("MASTER_PORT", "2")
    other = this_job()
    assert other is not None and other.name != launched.name
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert this_job() is None


def waits(rank: int, size: int) -> str:
    shared_build.WAIT_SECONDS = 0.5
    try:
        with deferred_init(min_bytes=SMALL):
            if not dispatch_modes()[-1].build.builds:
                time.sleep(1.5)
            nn.Linear(32, 32)
    except MeshwrightError as error:
        return str(error)
    finally:
        shared_build.WAIT_SECONDS = 300.0
    return ""


def test_a_rank_that_waits_for_others_inside_stops_the_build(rank_pool: RankPool) -> None:
    for text in rank_pool.run(2, waits):
        assert "has not made the call aten::empty" in text and "a barrier" in text and "shared=False" in text
