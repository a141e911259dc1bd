"""A device that only a plugin knows: ranks that hold its tensors train as one device does, and tests of the packages run on it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plan_once import plan_once
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plugins import DeviceSpec, discover
from meshwright_dtensor.testing.conformance import devices
from meshwright_dtensor.testing.conformance.report import Nonconformance, NotChecked, Tools
from meshwright_dtensor.testing.rank_pool import RankPool

ENABLED = "MESHWRIGHT_SHADOW_DEVICES"
ROOT = Path(__file__).parent.parent
LACKS = "integration_tests/plugin_device_lacks.txt"
"""What the device lacks, for which tests of the packages."""
IN_CI = (
    "packages/dtensor/tests/testing/test_on_device.py",
    "packages/dtensor/tests/tensor/test_distribute.py",
    "packages/dtensor/tests/tensor/test_stock_dtensor_errors.py",
    "packages/dtensor/tests/stored/test_permuted.py",
    "packages/dtensor/tests/stored/test_stored_writes.py",
    "packages/dtensor/tests/dispatch/test_call_forms.py",
    "packages/dtensor/tests/dispatch/test_planned_writes.py",
    "packages/dtensor/tests/dispatch/test_tiers.py",
    "packages/parallel/tests/optim/test_clip_grad.py::test_mixed_gradients[2-2.0-dtype0]",
)
"""Of the tests that run on it, those of a few seconds."""
PLANS = {"dp2": {"dp": 2}, "tp2": {"tp": 2}}


@pytest.fixture(scope="module")
def private_ranks() -> Iterator[RankPool]:
    # not those of other tests: torch keeps the device as long as a process lives
    with RankPool() as pool:
        yield pool


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def losses(rank: int, size: int, pins: dict[str, int], port: int) -> dict[str, list[float]]:
    """Of three steps on one CPU and on two devices of the plugin, and how many tensors are not there."""
    dist.destroy_process_group()
    started = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in started.items()}, **{ENABLED: str(size)})
    # the plugin's backend of collectives too
    device = mw.init("shadow")
    assert dist.get_backend() == "shadow_gloo"
    result: dict[str, list[float]] = {"elsewhere": []}
    for run in ("one", "many"):
        torch.manual_seed(0)
        model: Any = CASES["gpt2"].model()
        batch = CASES["gpt2"].batch()
        if run == "many":
            plan = plan_once(model, batch, cluster="laptop-cpu", **pins)
            model.to(device)
            # torch makes new parameters on a private device, one for each name of a tied one
            model.tie_weights()
            batch = {key: value.to(device) for key, value in batch.items()}
            model = mw.parallelize(model, plan, batch=batch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        result[run] = []
        torch.manual_seed(1)
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            mw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            result[run].append(float(loss.detach()))
        if run == "many":
            result["elsewhere"] = [0.0 for p in model.parameters() if p.device.type != "shadow"]
    return result


@pytest.mark.parametrize("name", PLANS)
def test_a_device_of_a_plugin_trains_as_one_device(private_ranks: RankPool, port: int, name: str) -> None:
    for result in private_ranks.run(2, losses, PLANS[name], port):
        assert not result["elsewhere"]
        assert result["many"] == pytest.approx(result["one"], rel=1e-5)


def conformance(rank: int, size: int) -> dict[str, str]:
    """Check of the conformance suite -> why it fails, or was not made; "" where the device passes it."""
    dist.destroy_process_group()
    os.environ[ENABLED] = "1"
    host = discover()
    tools = Tools(host, no_ranks, "")
    result = {}
    for check in devices.CHECKS:
        try:
            check(host.get(DeviceSpec, "shadow"), tools)
            result[check.__name__] = ""
        except (Nonconformance, NotChecked) as error:
            result[check.__name__] = str(error)
    return result


def no_ranks() -> RankPool:
    raise NotChecked("no ranks in this test")


def test_it_conforms(private_ranks: RankPool) -> None:
    (result,) = private_ranks.run(1, conformance)
    assert result == {check.__name__: "" for check in devices.CHECKS}


def test_without_it_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENABLED, raising=False)
    plugin = discover().get(DeviceSpec, "shadow")
    devices.check_class(plugin, Tools(discover(), no_ranks, ""))
    with pytest.raises(NotChecked, match="there is no shadow device here"):
        devices.check_tensors(plugin, Tools(discover(), no_ranks, ""))


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"device='shadow' is requested, and there is none here; .* cpu"):
        mw.init("shadow")
    with pytest.raises(UsageError, match="device 'shadows' is no type of device that torch or a plugin has"):
        mw.init("shadows")


def run_on_device(*files: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Tests of the packages with their tensors, models and process groups on the device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "shadow"]
    env = {name: value for name, value in os.environ.items() if name != ENABLED} | environment
    return subprocess.run(
        [*command, "--device-lacks", LACKS, *files], cwd=ROOT, env=env, capture_output=True, text=True
    )


@pytest.mark.slow
def test_tests_of_the_packages_run_on_it() -> None:
    done = run_on_device(*IN_CI, **{ENABLED: "8"})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 50
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", done.stdout, re.MULTILINE)
    assert reasons and all(re.match("of the CPU alone: |shadow lacks: ", reason) for reason in reasons)


def test_without_it_they_do_not() -> None:
    done = run_on_device(*IN_CI)
    assert done.returncode == 4 and "--device: device 'shadow': there is none here" in done.stderr
