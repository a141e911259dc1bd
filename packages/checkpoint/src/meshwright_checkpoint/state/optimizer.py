"""Load optimizer states by parameter name, in the present layout of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from meshwright_checkpoint._torch import local_of
from meshwright_checkpoint.errors import CorruptError
from meshwright_checkpoint.format.json_values import decode
from meshwright_checkpoint.format.manifest import OptimizerInfo
from meshwright_checkpoint.read.wanted import Wanted
from meshwright_checkpoint.shards.local_shards import local_shards
from meshwright_checkpoint.state.collect import OPTIMIZER, NamedTensors, parameter_names
from meshwright_checkpoint.state.optimizer_set import OptimizerSet, class_name
from meshwright_checkpoint.storage.checkpoint import Checkpoint
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.sharding.boxes import slice_of
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.stored.permuted import is_quantized_in_blocks

Options = dict[str, Any]


class GroupTargets(NamedTuple):
    """For one group on one rank: the saved groups of its parameters, and whether all of them are loaded."""

    saved_as: tuple[int, ...]
    whole: bool


@dataclass
class OptimizerTargets:
    """New states, not yet in the optimizer. `wanted` are the reads that fill them; `mismatched` is for MismatchError."""

    optimizer: torch.optim.Optimizer | OptimizerSet
    mismatched: list[str]
    states: list[tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    groups: list[GroupTargets] = field(default_factory=list)

    def match(self, checkpoint: Checkpoint, names: NamedTensors, chosen: Callable[[str], bool]) -> None:
        """Match the states of the optimizer with `checkpoint`, for parameters with a `chosen` name.

        Mismatches are added to `mismatched`. Group options follow in `take_options`.
        """
        info, optimizer = checkpoint.manifest.optimizer, self.optimizer
        if info is None:
            self.missing.append(f"the optimizer ({checkpoint.no_optimizer_reason})")
            return
        # the DCP format has no class
        if info.cls and info.cls != (given := class_name(optimizer)):
            self.mismatched.append(f"the optimizer: {info.cls} was saved, this is {given}")
            # do not report the states as unexpected too
            self.used.update(key for key in checkpoint.tensors if key.startswith(OPTIMIZER))
            return
        stored: dict[str, list[str]] = {}
        for key in checkpoint.tensors:
            if key.startswith(OPTIMIZER):
                parameter, _, state = key.removeprefix(OPTIMIZER).rpartition("/")
                stored.setdefault(parameter, []).append(state)
        aliases = checkpoint.manifest.model.aliases
        group_of = {name: number for number, group in enumerate(info.groups) for name in group.params}
        for group, params in zip(optimizer.param_groups, parameter_names(optimizer, names), strict=True):
            numbers: set[int] = set()
            partial = False
            for name, parameter in zip(params, group["params"], strict=True):
                tied_names = [name, *(n for n, first in names.aliases.items() if first == name)]
                if not any(map(chosen, tied_names)):
                    partial = True
                    continue
                saved = next((a for n in tied_names if (a := aliases.get(n, n)) in group_of), None)
                if saved is None:
                    self.missing.append(f"optimizer/{name}")
                    continue
                numbers.add(group_of[saved])
                entries = self._state(checkpoint, saved, stored.get(saved, []), parameter, group)
                for key, value in info.values.get(saved, {}).items():
                    entries[key] = decode(value, refuse_tensor)
                self.states.append((parameter, entries))
            self.groups.append(GroupTargets(tuple(sorted(numbers)), not partial))

    def _state(
        self, checkpoint: Checkpoint, name: str, keys: list[str], parameter: torch.Tensor, group: Options
    ) -> Options:
        entries: dict[str, Any] = {}
        current = self.optimizer.state.get(parameter, {})
        for key in keys:
            full = f"{OPTIMIZER}{name}/{key}"
            source = checkpoint.tensors[full]
            self.used.add(full)
            value = current.get(key)
            if isinstance(value, torch.Tensor) and is_quantized_in_blocks(local_of(value)):
                # a new one, which the next step quantizes
                value = None
            kind = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
            if kind != (source.shape, source.dtype):
                value = empty_state(source.shape, source.dtype, key, parameter, group)
            entries[key] = value
            part = local_shards(value, full, parameter)
            if part.shape != source.shape:
                shapes = f"shape {list(source.shape)} is stored, {list(part.shape)} is needed"
                self.mismatched.append(f"{full}: {shapes}")
                continue
            self.wanted += [Wanted(full, box, slice_of(part.local, local)) for box, local in part.boxes]
        return entries

    def take_options(self, info: OptimizerInfo, gathered: Sequence[Sequence[GroupTargets]]) -> None:
        """Find the options of each group that is loaded completely: those that its parameters were saved with.

        `gathered` are the groups of all ranks, each of which may have a part of the parameters. A group is loaded completely
        if it is on all ranks. A group without parameters on this rank takes the options from other ranks; one without any takes
        those of the saved group of its number, if that has none.
        """
        for number, group in enumerate(self.groups):
            same = [groups[number] for groups in gathered if number < len(groups)]
            saved = group.saved_as or tuple(sorted({index for other in same for index in other.saved_as}))
            if not saved and number < len(info.groups) and not info.groups[number].params:
                # without parameters on all ranks, as when it was saved
                saved = (number,)
            options = [info.groups[index].options for index in saved]
            self.options.append({})
            if not options or not all(other.whole for other in same):
                continue
            if all(other == options[0] for other in options):
                decoded = decode(options[0], scalar_from_text)
                self.options[-1] = decoded if isinstance(decoded, dict) else {}
            elif group.saved_as:
                self.mismatched.append(
                    f"the optimizer: its group {number} was saved as {len(saved)} groups, whose options differ"
                )

    def install(self) -> None:
        """Put states and options into the optimizer, after the read. Does nothing if no optimizer was saved."""
        if not self.options:
            return
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            for key, value in options.items():
                old = group.get(key)
                if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
                    # keep the tensor object: CUDA graphs refer to it
                    old.fill_(value.item())
                else:
                    group[key] = value
        for parameter, state in self.states:
            if state:
                self.optimizer.state[parameter] = state
            else:
                self.optimizer.state.pop(parameter, None)


def empty_state(
    shape: tuple[int, ...], dtype: torch.dtype, key: str, parameter: torch.Tensor, group: Options
) -> torch.Tensor:
    """An optimizer state of zeros, with the device and layout that the optimizer would use."""
    with torch.no_grad():
        if shape == tuple(parameter.shape) and shape:
            return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format).detach()
        if key == "step" and not (group.get("capturable") or group.get("fused")):
            # on the host
            return torch.zeros(shape, dtype=dtype, device=HOST)
        zeros = torch.zeros(shape, dtype=dtype, device=parameter.device)
        if not isinstance(parameter, DTensor) or not shape:
            return zeros
        mesh = parameter.device_mesh
        whole = DTensor.from_local(zeros, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return mesh_value(whole) if isinstance(parameter, MeshParameter) else whole


def scalar_from_text(text: str) -> torch.Tensor:
    """Decode a 0-dim tensor of group options. Raises CorruptError."""
    name, _, number = text.partition(":")
    dtype = getattr(torch, name, None)
    try:
        return torch.tensor(
            float.fromhex(number), dtype=dtype if isinstance(dtype, torch.dtype) else None, device=HOST
        )
    except (ValueError, OverflowError):
        raise CorruptError(f"an option of the optimizer is {ascii(text)[:60]}, not a number") from None


def refuse_tensor(key: str) -> torch.Tensor:
    """Raise CorruptError: states that are not tensors cannot refer to one."""
    raise CorruptError(f"an optimizer state refers to {ascii(key)[:60]}")
