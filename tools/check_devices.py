"""No code assumes a type of device but the records of `meshwright_dtensor.devices`: run as `python tools/check_devices.py`.

What names the CPU or cuda works there and fails, or waits, on any other: ask `device_of(device)` instead. A factory without a
device uses the user's (`torch.set_default_device`), and numbers of the host on another device are a copy that waits for it.

Tests of the core and of parallel run on any type of device (`pytest --device`): they make tensors on the default device, and ask
`meshwright_dtensor.testing.on_device` for its generators and meshes. Tests of the CPU alone are marked `host(reason)`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TYPES = frozenset({"cpu", "cuda", "xpu", "npu", "hpu", "xla", "mps"})
MODULES = frozenset({"cuda", "xpu", "mps", "npu", "hpu"})
METHODS = frozenset(
    {"cpu", "cuda", "xpu", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_pinned", "pin_memory"}
)
DEFAULTS = frozenset({"get_default_device", "set_default_device", "set_default_tensor_type"})
# gloo is the backend of the host, which every process has
BACKENDS = frozenset({"nccl", "mpi", "ucc", "xccl", "hccl"})
FACTORIES = frozenset(
    "tensor as_tensor zeros ones empty full arange eye linspace logspace rand randn randint randperm scalar_tensor "
    "empty_strided tril_indices triu_indices".split()
)
OF_NUMBERS = frozenset({"tensor", "as_tensor"})
TESTED = ("dtensor", "parallel")
"""Packages whose tests run on any type of device."""
OF_THE_HOST = frozenset({"numpy", "get_rng_state", "set_rng_state", "Generator"})
"""Names in tests that give the CPU's, without an argument."""
ALLOWED = {
    "dtensor/src/meshwright_dtensor/devices": "the records",
    "dtensor/src/meshwright_dtensor/utils/host.py": "the name of the host",
    "dtensor/src/meshwright_dtensor/plugin.py": "registers them",
    "dtensor/src/meshwright_dtensor/_torch/accelerators.py": "torch's own lists of types",
    "dtensor/src/meshwright_dtensor/_torch/inductor.py": "what torch's code generators need, by type",
    "dtensor/src/meshwright_dtensor/_torch/ownership.py": "counts references to a tensor of the host, once",
    "dtensor/src/meshwright_dtensor/_torch/fake_gpu.py": "pretends that there is cuda",
    "dtensor/src/meshwright_dtensor/testing": "ranks of tests are on the CPU, or share the GPUs of a machine",
    "dtensor/src/meshwright_dtensor/drawing/gpu.py": "of the record of cuda: how its kernels draw",
    "dtensor/src/meshwright_dtensor/tensor/global_tensor.py": "answers is_cpu and is_cuda, which are torch's attributes",
    "dtensor/src/meshwright_dtensor/stages/functions.py": "is_cpu and is_cuda are torch's attributes",
    "meshwright/src/meshwright/commands/doctor.py": "reports by name which backends torch has",
    "meshwright/src/meshwright/integrations/accelerate.py": "a keyword of accelerate has that name",
}
"""Path under packages/ -> why it may."""
MAY_MAKE = {
    "checkpoint/src/meshwright_checkpoint/rank_messages.py": "messages between ranks, on the device that their backend sends",
    "checkpoint/src/meshwright_checkpoint/state/replicas.py": "messages between ranks, of a save",
    "dtensor/src/meshwright_dtensor/comm/memory_order.py": "messages between ranks, once a layout",
    "dtensor/src/meshwright_dtensor/mesh/mesh.py": "messages between ranks, when a mesh is made",
    "dtensor/src/meshwright_dtensor/plugins/rank_check.py": "messages between ranks, when a model becomes parallel",
    "parallel/src/meshwright_parallel/data/local_rows.py": "messages between ranks, on the host where it has a backend",
    "meshwright/src/meshwright/trial.py": "messages between ranks, between trials",
    "parallel/src/meshwright_parallel/engine/buckets.py": "messages between ranks, in the first step",
    "parallel/src/meshwright_parallel/optim/clip_grad.py": "the norm of no tensors is where torch's is",
    "planner/src/meshwright_planner/calibration/collectives.py": "messages between ranks, between measurements",
    "planner/src/meshwright_planner/calibration/profile.py": "messages between ranks, between measurements",
}
"""Path under packages/ -> why tensors may be made there of numbers of the host, or on the user's default device."""


def assumptions(source: str, may_make: bool = False) -> Iterator[tuple[int, str]]:
    """(line, text) of each place that assumes a type of device."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.partition(":")[0] in TYPES | BACKENDS:
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Attribute):
            of_torch = _is_torch(node.value)
            if (of_torch and node.attr in MODULES | DEFAULTS) or (not of_torch and node.attr in METHODS):
                yield node.lineno, f"{'torch' if of_torch else ''}.{node.attr}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports(node)
        elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
            yield node.lineno, "pin_memory="
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_torch(node.func.value)
        ):
            yield from _made(node, node.func.attr, may_make)


def assumptions_of_tests(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each place of a test module that assumes the CPU, if the module marks no test as one of the CPU."""
    tree = ast.parse(source)
    if any(_marks_host(node) for node in ast.walk(tree)):
        return
    yield from assumptions(source, may_make=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            if node.func.attr in OF_THE_HOST and not node.keywords:
                yield node.lineno, f".{node.func.attr}()"


def _marks_host(node: ast.AST) -> bool:
    """Whether this is `pytest.mark.host`."""
    return (
        isinstance(node, ast.Attribute) and node.attr == "host" and ast.unparse(node.value) == "pytest.mark"
    )


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str]]:
    """Modules of torch for one type of device, however they are imported."""
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for name in node.names:
        whole = f"{prefix}{name.name}".split(".")
        if whole[0] == "torch" and len(whole) > 1 and whole[1] in MODULES:
            yield node.lineno, f"import of {'.'.join(whole)}"


def _made(call: ast.Call, factory: str, may_make: bool) -> Iterator[tuple[int, str]]:
    """Tensors that are made on the user's default device, or copied from the host to another device."""
    if may_make or factory not in FACTORIES or any(keyword.arg in (None, "out") for keyword in call.keywords):
        return
    device = next((keyword.value for keyword in call.keywords if keyword.arg == "device"), None)
    if device is None and factory != "as_tensor":
        yield call.lineno, f"torch.{factory}() without a device, thus on the user's default device,"
    elif device is not None and factory in OF_NUMBERS and "HOST" not in ast.unparse(device):
        yield (
            call.lineno,
            f"torch.{factory}() of numbers of the host, which waits for the device (torch.full does not),",
        )


def main() -> int:
    """Print each place, and return how many there are, at most 1."""
    wrong = []
    for file in sorted((ROOT / "packages").glob("*/src/**/*.py")):
        path = file.relative_to(ROOT / "packages").as_posix()
        if any(path == allowed or path.startswith(f"{allowed}/") for allowed in ALLOWED):
            continue
        wrong += [
            f"packages/{path}:{line}: {what}"
            for line, what in assumptions(file.read_text(encoding="utf-8"), path in MAY_MAKE)
        ]
    for package in TESTED:
        for file in sorted((ROOT / "packages" / package / "tests").rglob("*.py")):
            wrong += [
                f"{file.relative_to(ROOT).as_posix()}:{line}: {what}"
                for line, what in assumptions_of_tests(file.read_text(encoding="utf-8"))
            ]
    for line in wrong:
        print(
            f"{line} assumes a type of device; ask meshwright_dtensor.devices (device_of, on_host, HOST, default_device), or "
            "in a test meshwright_dtensor.testing.on_device (device_type, seeded, random_state); or mark it host(reason)"
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
