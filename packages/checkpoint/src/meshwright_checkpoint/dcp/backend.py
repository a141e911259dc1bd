"""The backend "dcp": load and save the format of torch.distributed.checkpoint.

A load finds the model and the optimizer by their names. A save uses torch's own writer and the structure of
``get_state_dict``, under "model" and "optim", so that stock FSDP2 reads it.
"""

from __future__ import annotations

import os
import re
import uuid
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright_checkpoint._torch import local_of, unwrapped
from meshwright_checkpoint.dcp.reader import DcpFiles
from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.json_values import decode, encode
from meshwright_checkpoint.format.manifest import Group, Manifest, ModelInfo, OptimizerInfo
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.read.wanted import ReadFile, Source
from meshwright_checkpoint.saving.background import merge_optimizers
from meshwright_checkpoint.state import collect
from meshwright_checkpoint.state.collect import EXTRA, MODEL, OPTIMIZER, NamedTensors, named_tensors
from meshwright_checkpoint.state.optimizer import scalar_from_text
from meshwright_checkpoint.storage.backend import ForeignStorage
from meshwright_checkpoint.storage.checkpoint import Checkpoint
from meshwright_checkpoint.storage.filesystem import staged_directory
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.stored.permuted import canonical


class DcpStorage(ForeignStorage):
    """Storage of a directory in DCP format, which may not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.fspath(path)))
        self.where = str(self.path)
        self.name = self.path.name

    def open_checkpoint(self, model: nn.Module) -> Checkpoint:
        return DcpCheckpoint(self.path, model)

    def write(self, model: nn.Module, optimizer: Optimizer | None, extra: Any, ranks: Ranks) -> None:
        """See ForeignStorage. Writes a staging directory next to the path and renames it."""
        with staged_directory(self.path, ranks.gather(uuid.uuid4().hex)[0], ranks) as staging:
            state = _state(model, optimizer, extra, ranks)
            with warnings.catch_warnings():
                # torch warns about a single process
                warnings.simplefilter("ignore")
                ranks.run_checked(lambda: _save(state, staging))


def _save(state: dict[str, Any], path: Path) -> None:
    try:
        torch_save(state, storage_writer=FileSystemWriter(path, sync_files=True))
    except CheckpointException as error:
        raise CheckpointError(f"torch could not write {path}: {error}") from error


def _names(model: nn.Module) -> NamedTensors:
    names = named_tensors(unwrapped(model))
    if names.extra_state:
        first = next(iter(names.extra_state))
        raise UnsupportedError(f"the extra state {first} cannot be saved in torch's format")
    return names


def _state(model: nn.Module, optimizer: Optimizer | None, extra: Any, ranks: Ranks) -> dict[str, Any]:
    names = ranks.run_checked(lambda: _names(model))
    tensors = {name: _stock(tensor, None) for name, tensor in names.tensors.items()}
    tensors.update({alias: tensors[name] for alias, name in names.aliases.items() if name in tensors})
    state: dict[str, Any] = {"model": tensors}
    if ranks.rank == 0 and extra is not None:
        state["extra"] = extra
    if optimizer is not None:
        collected = collect.CollectedState()
        about = ranks.run_checked(lambda: collect.collect_optimizer(optimizer, names, collected))
        merged = merge_optimizers(ranks.gather(about))
        states: dict[str, dict[str, Any]] = {}
        for parameter, entries in optimizer.state.items():
            states[names.names[id(parameter)]] = {
                key: _stock(value, parameter) if isinstance(value, torch.Tensor) else value
                for key, value in entries.items()
            }
        groups = [{**decode(g["options"], scalar_from_text), "params": g["params"]} for g in merged["groups"]]
        state["optim"] = {"state": states, "param_groups": groups}
    return state


def _stock(tensor: torch.Tensor, parameter: Any) -> torch.Tensor:
    """As stock DTensor or plain tensor, without autograd. A collective call for permuted layouts."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    stock = canonical(tensor, parameter)
    local, mesh, shape, stride = local_of(stock), stock.device_mesh, stock.shape, stock.stride()
    return DTensor.from_local(local, mesh, stock.placements, run_check=False, shape=shape, stride=stride)


class DcpCheckpoint(Checkpoint):
    """An open DCP directory, with the names of `model`.

    Raises:
        CheckpointError: there is no checkpoint.
        CorruptError: the checkpoint is damaged.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        self._dcp = DcpFiles(path)
        self.where = self._dcp.where
        try:
            names = named_tensors(model)
            model_names = {*names.tensors, *names.aliases}
            # the prefix before "state." in the names of optimizer states
            states = (re.fullmatch(r"(|.*?\.)state\.(.+)\.\w+", name) for name in self._dcp.tensors)
            optim = next((match[1] for match in states if match and match[2] in model_names), None)
            numbered = (re.search(r"(?:^|\.)(state\.\d+\.\w+)$", name) for name in self._dcp.tensors)
            if optim is None and any(match and match[1] not in model_names for match in numbered):
                self.no_optimizer_reason = (
                    "its states have numbers for names, which depend on the model; save the result of "
                    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict instead"
                )
            prefix = _model_prefix(self._dcp, model_names, optim)
            tensors: dict[str, Source] = {}
            rest: list[str] = []
            for name, source in self._dcp.tensors.items():
                if optim is not None and name.startswith(f"{optim}state."):
                    tensors[OPTIMIZER + "/".join(name[len(optim) + 6 :].rsplit(".", 1))] = source
                elif name.startswith(prefix) and (
                    prefix or name in model_names or len(self._dcp.paths.get(name, ("",))) == 1
                ):
                    tensors[MODEL + name[len(prefix) :]] = source
                else:
                    rest.append(name)
                    tensors[EXTRA + name] = source
            self.tensors = MappingProxyType(tensors)
            optimizer, extra = None if optim is None else self._optimizer(optim), self._extra(rest, optim)
            self.manifest = Manifest.model_construct(
                id="", created="", model=ModelInfo(), optimizer=optimizer, rng=None, extra=extra
            )
        except BaseException:
            self.close()
            raise

    def _optimizer(self, prefix: str) -> OptimizerInfo:
        """Parameter groups. Flattened state dicts have options per parameter, others per group number."""
        options: dict[str, dict[str, Any]] = {}
        values: dict[str, dict[str, Any]] = {}
        for name in sorted(self._dcp.values):
            if name.startswith(f"{prefix}param_groups."):
                group, _, option = name[len(prefix) + 13 :].rpartition(".")
                options.setdefault(group, {})[option] = self._dcp.value(name)
            elif name.startswith(f"{prefix}state."):
                parameter, _, key = name[len(prefix) + 6 :].rpartition(".")
                values.setdefault(parameter, {})[key] = encode(self._dcp.value(name), _refuse_tensor, name)
        groups: dict[str, tuple[list[str], Any]] = {}
        for group, group_options in options.items():
            params = group_options.pop("params", [group])
            group_options.pop("param_names", None)
            if not isinstance(params, list) or not all(isinstance(p, str) for p in params):
                text = f"{self.where}: parameters of the optimizer are not names; save it with torch's get_state_dict"
                raise CorruptError(text)
            encoded = encode(group_options, _refuse_tensor, "options")
            group_key = group if group.isdigit() else repr(encoded)
            groups.setdefault(group_key, ([], encoded))[0].extend(params)
        made = tuple(Group(params=tuple(params), options=encoded) for params, encoded in groups.values())
        return OptimizerInfo(cls="", groups=made, values=values)

    def _extra(self, tensors: list[str], optim: str | None) -> Any:
        """All other values, nested as they were saved."""
        extra: dict[Any, Any] = {}
        skipped = []
        for name in [*tensors, *sorted(self._dcp.values)]:
            if optim is not None and name.startswith((f"{optim}state.", f"{optim}param_groups.")):
                continue
            try:
                value: Any = {"$tensor": EXTRA + name}
                if name not in tensors:
                    value = encode(self._dcp.value(name), _refuse_tensor, name)
            except (CorruptError, UnsupportedError):
                skipped.append(name)
                continue
            parent = extra
            *outer, last = self._dcp.paths.get(name, (name,))
            for key in outer:
                parent = parent.setdefault(str(key), {})
            parent[str(last)] = value
        if skipped:
            text = f"{self.where} has values that are not plain data, which are left out: {', '.join(skipped)[:200]}"
            warnings.warn(text, stacklevel=2)
        return extra.get("extra", extra) if set(extra) <= {"extra"} else extra

    def file(self, name: str) -> ReadFile:
        return self._dcp.file(name)

    def close(self) -> None:
        """Close its files."""
        self._dcp.close()


def _refuse_tensor(path: str, tensor: torch.Tensor) -> str:
    raise UnsupportedError(f"{path} is a tensor inside another value")


def _model_prefix(files: DcpFiles, model_names: set[str], optim: str | None) -> str:
    """The most common prefix before the names of the model."""
    count: dict[str, int] = {}
    for name in files.tensors:
        if optim is not None and name.startswith(f"{optim}state."):
            continue
        for at in [0, *(i + 1 for i, c in enumerate(name) if c == ".")]:
            if name[at:] in model_names:
                count[name[:at]] = count.get(name[:at], 0) + 1
    return max(count, key=lambda prefix: (count[prefix], -len(prefix)), default="")
