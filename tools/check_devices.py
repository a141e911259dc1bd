"""No code names a type of device but the records of `meshwright_dtensor.devices`: run as `python tools/check_devices.py`.

What assumes that a device is the CPU or cuda works there and fails, or waits, on any other. Ask `device_of(device)` instead.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TYPES = frozenset({"cpu", "cuda", "xpu", "npu", "hpu", "xla", "mps"})
MODULES = frozenset({"cuda", "xpu", "mps", "npu", "hpu"})
METHODS = frozenset({"cpu", "cuda", "xpu", "is_cuda", "is_cpu", "is_xpu"})
ALLOWED = {
    "dtensor/src/meshwright_dtensor/devices": "the records",
    "dtensor/src/meshwright_dtensor/plugin.py": "registers them",
    "dtensor/src/meshwright_dtensor/_torch/accelerators.py": "torch's own lists of types",
    "dtensor/src/meshwright_dtensor/_torch/fake_gpu.py": "pretends that there is cuda",
    "dtensor/src/meshwright_dtensor/testing": "ranks of tests are on the CPU, or share the GPUs of a machine",
    "dtensor/src/meshwright_dtensor/drawing/gpu.py": "of the record of cuda: how its kernels draw",
    "dtensor/src/meshwright_dtensor/tensor/global_tensor.py": "answers is_cpu and is_cuda, which are torch's attributes",
    "dtensor/src/meshwright_dtensor/stages/functions.py": "is_cpu and is_cuda are torch's attributes",
    "meshwright/src/meshwright/integrations/accelerate.py": "a keyword of accelerate has that name",
}
"""Path under packages/ -> why it may."""


def assumptions(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each place that names a type of device."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.partition(":")[0] in TYPES:
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Attribute):
            of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if (of_torch and node.attr in MODULES) or (not of_torch and node.attr in METHODS):
                yield node.lineno, f"{'torch' if of_torch else ''}.{node.attr}"


def main() -> int:
    """Print each place, and return how many there are, at most 1."""
    wrong = []
    for file in sorted((ROOT / "packages").glob("*/src/**/*.py")):
        path = file.relative_to(ROOT / "packages").as_posix()
        if any(path == allowed or path.startswith(f"{allowed}/") for allowed in ALLOWED):
            continue
        wrong += [
            f"packages/{path}:{line}: {what}" for line, what in assumptions(file.read_text(encoding="utf-8"))
        ]
    for line in wrong:
        print(
            f"{line} assumes a type of device; ask meshwright_dtensor.devices (device_of, on_host, HOST, default_device)"
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
