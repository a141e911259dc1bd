"""Ranks with different plugins fail together, with the difference; ranks with the same ones do not."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import pytest
from plugin_distributions import install

from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.plugins import (
    ClusterSpec,
    PluginHost,
    Problem,
    Registered,
    compare_across_ranks,
    discover_on_all_ranks,
)
from meshwright_dtensor.plugins.rank_check import difference
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool


def host(*records: tuple[str, str, str], problems: tuple[Problem, ...] = ()) -> PluginHost:
    records_by_name = {
        name: Registered(ClusterSpec(name=name, target="a:b"), distribution, version, "point")
        for name, distribution, version in records
    }
    return PluginHost({ClusterSpec: records_by_name}, problems)


def outcome(check: Callable[[], object]) -> str:
    try:
        check()
    except PluginError as error:
        return str(error)
    return "agreed"


def same_everywhere(rank: int, world_size: int) -> str:
    return outcome(lambda: compare_across_ranks(host(("a", "acme", "1"), ("b", "acme", "1"))))


def one_lacks(rank: int, world_size: int) -> str:
    problem = Problem("bravo", "2", "b", "fails to import")
    mine = host(("a", "acme", "1")) if rank != 1 else host(problems=(problem,))
    return outcome(lambda: compare_across_ranks(mine))


def versions_differ(rank: int, world_size: int) -> str:
    return outcome(lambda: compare_across_ranks(host(("a", "acme", f"1.{rank}"))))


def other_torch(rank: int, world_size: int) -> str:
    """The error where rank 1 runs another torch."""
    import torch

    version = torch.__version__
    torch.__version__ = version if rank != 1 else "2.13.9"
    try:
        compare_across_ranks(host(("a", "acme", "1")))
    except UsageError as error:
        return str(error).replace(version, "2.13.0")
    finally:
        torch.__version__ = version
    return "agreed"


def test_another_torch_is_refused(rank_pool: RankPool) -> None:
    told = "ranks run different versions: torch 2.13.0 on ranks 0, 2, torch 2.13.9 on rank 1; install the same on every rank"
    assert rank_pool.run(3, other_torch) == [told] * 3


def settings_differ(rank: int, world_size: int, alike: bool) -> str:
    """The error where rank 1 has not asked for deterministic operations, or all have; and what is set."""
    import torch

    from meshwright_dtensor.mesh.mesh import init

    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        init(device_type(), deterministic=alike or rank != 1)
        if alike or rank != 1:
            assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        compare_across_ranks(host(("a", "acme", "1")))
    except UsageError as error:
        return str(error)
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
    return "agreed"


def test_other_settings_of_torch_are_refused(rank_pool: RankPool) -> None:
    told = (
        "ranks run different settings of torch: torch.are_deterministic_algorithms_enabled()=True on ranks 0, 2, "
        "torch.are_deterministic_algorithms_enabled()=False on rank 1; set the same on every rank"
    )
    assert rank_pool.run(3, settings_differ, False) == [told] * 3
    assert rank_pool.run(3, settings_differ, True) == ["agreed"] * 3


def precision(rank: int, world_size: int, way: str) -> str:
    """What ranks are told where a precision of float32 is set, here or on rank 1 alone, or cannot be read on rank 1."""
    import torch

    from meshwright_dtensor.plugins import rank_check

    of_products, read = attrgetter("cuda.matmul")(torch.backends), rank_check._settings
    before = of_products.fp32_precision
    if way == "alike" or (way == "rank 1" and rank == 1):
        of_products.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
    if way == "exact" and rank == 1:
        torch.set_float32_matmul_precision("highest")
    if way == "unreadable" and rank == 1:
        rank_check._settings = lambda: 1 / 0  # type: ignore[assignment]
    try:
        return outcome(lambda: compare_across_ranks(host(("a", "acme", "1"))))
    except UsageError as error:
        return str(error)
    finally:
        of_products.fp32_precision, rank_check._settings = before, read


def test_a_precision_of_float32_is_compared(rank_pool: RankPool) -> None:
    name = "torch.backends.cuda.matmul.fp32_precision"
    told = f"ranks run different settings of torch: {name}=ieee on rank 0, {name}=tf32 on rank 1; set the same on every rank"
    assert rank_pool.run(2, precision, "alike") == rank_pool.run(2, precision, "exact") == ["agreed"] * 2
    assert rank_pool.run(2, precision, "rank 1") == [told] * 2
    told = "settings of torch cannot be read: ZeroDivisionError: division by zero, on rank 1"
    assert rank_pool.run(2, precision, "unreadable") == [told] * 2


def groups_differ(rank: int, world_size: int) -> tuple[str, str]:
    """Ranks agree within each half, and differ between the halves."""
    import torch.distributed as dist

    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = host(("a", "acme", f"{rank // 2}"))
    within = outcome(lambda: compare_across_ranks(mine, halves[rank // 2]))
    return within, outcome(lambda: compare_across_ranks(mine))


def discover_where_one_is_broken(rank: int, world_size: int, site: str) -> str:
    """Only rank 1 sees a distribution whose hook is misspelt."""
    import sys

    if rank == 1:
        sys.path.insert(0, site)
    try:
        return outcome(discover_on_all_ranks)
    finally:
        if rank == 1:
            sys.path.remove(site)


def test_equal_ranks_agree(rank_pool: RankPool) -> None:
    assert rank_pool.run(3, same_everywhere) == ["agreed"] * 3


def test_a_rank_that_lacks_a_plugin_fails_every_rank(rank_pool: RankPool) -> None:
    results = rank_pool.run(3, one_lacks)
    assert len(set(results)) == 1
    assert "cluster 'a' of acme 1 is on ranks 0, 2 but not on rank 1" in results[0]
    assert "bravo 2 (entry point 'b'): fails to import, on rank 1" in results[0]
    assert "\n" not in results[0]


def test_version_differences_are_reported(rank_pool: RankPool) -> None:
    results = rank_pool.run(2, versions_differ)
    assert results[0] == results[1]
    assert "acme 1.0 is on rank 0" in results[0] and "acme 1.1 is on rank 1" in results[0]


def test_only_ranks_of_the_group_are_compared(rank_pool: RankPool) -> None:
    for within, over_all in rank_pool.run(4, groups_differ):
        assert within == "agreed"
        assert "ranks have different plugins" in over_all


def test_an_error_on_one_rank_is_raised_on_all(
    rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = tmp_path_factory.mktemp("site")
    source = "@hookimpl\ndef meshwright_stratgies():\n    yield 1\n"
    install(site, "acme-one-rank", {"one-rank": "acme_one_rank"}, {"acme_one_rank": source})
    results = rank_pool.run(2, discover_where_one_is_broken, str(site))
    assert results[0] == results[1]
    assert "did you mean 'meshwright_strategies'" in results[0] and results[0].endswith("on rank 1")


def test_without_a_process_group_nothing_is_compared() -> None:
    compare_across_ranks(host(("a", "acme", "1")))


def test_many_differences_make_one_short_line() -> None:
    many = {("cluster", f"c{index}", "acme", "1") for index in range(40)}
    text = difference([many, set()])
    assert text is not None and "and 34 more" in text and "\n" not in text
    assert difference([many, set(many)]) is None
