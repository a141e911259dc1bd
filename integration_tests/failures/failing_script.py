"""A training loop for four ranks of torchrun, of which one fails: failing_script.py PLAN FAILURE FOLDER.

Writes FOLDER/failed when that happens.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan

RANK, STEP, STEPS = 2, 2, 5
"""The rank that fails, in which step, of how many."""
TIMEOUT = 12.0
"""Seconds that a collective waits for other ranks."""
PLANS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "dp": {"dp": 4, "zero": 0},
        "tp": {"tp": 4},
        "pp": {"pp": 4},
        "ep": {"ep": 2, "dp": 2, "zero": 0},
        "zero3": {"dp": 4, "zero": 3},
    }
)
"""Of four ranks."""
ROWS, TOKENS, VOCABULARY = 8, 8, 64


class Failure(RuntimeError):
    """What the failing rank raises."""


def build() -> Any:
    """A mixture of experts with a layer for each pipeline stage."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.MixtralConfig(vocab_size=VOCABULARY, use_cache=False, **sizes, **heads)
    return transformers.MixtralForCausalLM(config).train()


def batch(step: int) -> dict[str, torch.Tensor]:
    """The batch of a step."""
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


class Failing:
    """Lets this rank fail in one place, once its step has come."""

    def __init__(self, kind: str, folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.kind, self.folder, self.model, self.optimizer = kind, folder, model, optimizer
        self.here = dist.get_rank() == RANK

    def prepare(self) -> None:
        """Set what fails later in the step; code of the model on all ranks, as a pipeline demands."""
        layer = self.model.model.layers[RANK]
        everywhere: dict[str, Callable[[], object]] = {
            "forward": lambda: self._before_forward(type(layer.mlp)),
            "hook": lambda: layer.self_attn.register_forward_hook(lambda *_: self._raise_here()),
            "backward": lambda: layer.register_forward_hook(self._in_backward),
        }
        here: dict[str, Callable[[], object]] = {
            "optimizer": lambda: self._replace(self.optimizer, "step"),
            "checkpoint thread": lambda: self._replace(os, "fsync"),
            "full disk": self._fill_disk,
        }
        places = everywhere | here if self.here else everywhere
        if self.kind in places:
            places[self.kind]()

    def now(self) -> None:
        """Fail between two steps."""
        signals = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}
        if self.kind in signals:
            self._tell()
            os.kill(os.getpid(), signals[self.kind])
        if self.kind == "out of memory":
            self._tell()
            torch.zeros(1 << 50)

    def batches(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """The batches of the steps."""
        for step in range(STEPS):
            if self.kind == "data loader" and self.here and step == STEP:
                self._raise()
            yield step, batch(step)

    def _tell(self) -> None:
        (self.folder / "failed").touch()

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        self._tell()
        raise Failure(f"this is the failure in the {self.kind}")

    def _raise_here(self, *_: Any) -> None:
        if self.here:
            self._raise()

    def _before_forward(self, kind: Any) -> None:
        forward = kind.forward

        def failing(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._raise_here()
            return forward(module, *args, **kwargs)

        kind.forward = failing

    def _replace(self, owner: Any, name: str) -> None:
        setattr(owner, name, self._raise)

    def _in_backward(self, module: Any, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        # stages are also tried without gradients
        if tensor.requires_grad:
            tensor.register_hook(self._raise_here)

    def _fill_disk(self) -> None:
        self._tell()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, 1 << 10))


def main(plan: Path, kind: str, folder: Path) -> None:
    """Train until the failure."""
    mw.init(timeout=TIMEOUT)
    transformers.logging.set_verbosity_error()
    model: Any = mw.parallelize(build(), ParallelPlan.from_json(plan.read_text()), batch=batch(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    failing = Failing(kind, folder, model, optimizer)
    for step, values in failing.batches():
        fails = failing.here and step == STEP
        if step == STEP:
            failing.prepare()
        if fails:
            failing.now()
            if kind == "early return":
                failing._tell()
                return
        model(**values).loss.backward()
        if kind == "fewer collectives" and fails:
            failing._tell()
        else:
            dist.all_reduce(torch.ones(3))
        optimizer.step()
        optimizer.zero_grad()
        saving = mw.save(folder / f"step-{step}", model=model, optimizer=optimizer)
    saving.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
