"""The line that ends a run of all tests adds up what every pytest said."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TOTAL = str(Path(__file__).parent.parent / "tools" / "total.py")
LOG = """
unit-dtensor: commands[0]> pytest packages/dtensor/tests
======================= 1145 passed in 277.98s (0:04:37) =======================
some text === 3 failed in it ===
\x1b[31m=================== 1 failed, 55 passed, 2 skipped in 26.07s ===================\x1b[0m
"""


@pytest.mark.parametrize(
    ("log", "code", "summary"),
    [
        (LOG, 1, "1 failed, 1200 passed, 2 skipped in 9.00s"),
        ("=== 5 passed, 1 error in 1.00s ===", 1, "5 passed, 1 errors in 9.00s"),
        ("== 2 passed in 1.00s ==\n== 3 passed in 0.10s ==", 0, "5 passed in 9.00s"),
        ("nothing", 1, "no tests ran in 9.00s"),
    ],
)
def test_total(log: str, code: int, summary: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert runpy.run_path(TOTAL)["main"](str(path), "9") == code
    line = capsys.readouterr().out.strip()
    assert line.strip("= ") == summary and line.startswith("=") and line.endswith("=")


def test_code_that_assumes_a_device_is_found() -> None:
    assumptions = runpy.run_path(str(Path(TOTAL).parent / "check_devices.py"))["assumptions"]
    lines = [
        'x.device.type == "cpu"',
        "torch.cuda.synchronize()",
        "x.cpu()",
        "x.is_cuda",
        'backend("cpu:gloo,cuda:nccl")',
        'device("cuda")',
        'f"cuda:{index}"',
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import amp",
        "torch.get_default_device()",
        "x.pin_memory()",
        "DataLoader(data, pin_memory=True)",
        'new_group(backend="nccl")',
        "torch.zeros(3, dtype=dtype)",
        "torch.randn(shape, generator=generator)",
        "torch.tensor(p, dtype=dtype, device=x.device)",
    ]
    for line in lines:
        assert len(list(assumptions(line))) == 1, line
    neutral = [
        'x.to(HOST); on_host(x.device); device_of("meta"); cluster = "laptop-cpu"',
        "torch.zeros(3, device=HOST); torch.tensor(1.0, device=HOST); torch.full((), p, device=x.device)",
        "torch.zeros_like(x); torch.zeros(3, **options); torch.as_tensor(x); torch.rand(3, out=x)",
    ]
    for line in neutral:
        assert not list(assumptions(line)), line
    of_tests = runpy.run_path(str(Path(TOTAL).parent / "check_devices.py"))["assumptions_of_tests"]
    for line in ('init_device_mesh("cpu", (2,))', "torch.Generator()", "torch.get_rng_state()", "x.numpy()"):
        assert len(list(of_tests(line))) == 1, line
        assert not list(of_tests(f'pytestmark = pytest.mark.host("files")\n{line}'))
    assert not list(
        of_tests("torch.zeros(3); init_device_mesh(device_type(), (2,)); torch.Generator(device)")
    )
    # the packages, and tests that run on any device, name no type of device
    assert runpy.run_path(str(Path(TOTAL).parent / "check_devices.py"))["main"]() == 0
