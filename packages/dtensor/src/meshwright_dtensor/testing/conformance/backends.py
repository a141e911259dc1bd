"""Checks of a checkpoint backend. Needs meshwright-checkpoint, whose interface a backend has."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright_dtensor.plugins import Registered
from meshwright_dtensor.plugins.records import BackendSpec
from meshwright_dtensor.testing.conformance.report import Check, NotChecked, Tools, require, sibling, told
from meshwright_dtensor.utils.host import HOST

PURPOSE = "checking a checkpoint backend"
INTERFACE = "meshwright_checkpoint.storage.backend"
FILE = "data-00001.safetensors"


def storage_of(plugin: Registered[Any], path: str) -> Any:
    """The backend's storage of a path, with every method of the interface."""
    interface = sibling(INTERFACE, PURPOSE)
    target = told(plugin, "loading its target", "correct the target", plugin.load)
    fix = f"write a function or class that takes a path and returns a {INTERFACE}.CheckpointStorage"
    require(callable(target), plugin, f"its target is {target!r}", fix)
    storage = told(plugin, f"its target, called with {path!r},", fix, lambda: target(path))
    if not isinstance(storage, interface.ForeignStorage):
        methods = [name for name, value in vars(interface.CheckpointStorage).items() if callable(value)]
        missing = [m for m in methods if not m.startswith("_") and not callable(getattr(storage, m, None))]
        missing += [name for name in ("where", "name") if not isinstance(getattr(storage, name, None), str)]
        require(not missing, plugin, f"{type(storage).__name__} has no {', '.join(missing)}", fix)
    return storage


def own_format(plugin: Registered[Any], path: str) -> Any:
    """The storage, of meshwright's format. NotChecked where the backend has another one, which it reads and writes itself."""
    storage = storage_of(plugin, path)
    if isinstance(storage, sibling(INTERFACE, PURPOSE).ForeignStorage):
        raise NotChecked(f"checkpoint backend {plugin.name!r} has a format of its own (ForeignStorage)")
    return storage


def errors() -> Any:
    """The errors that storages raise."""
    return sibling("meshwright_checkpoint.errors", PURPOSE)


def must_raise(plugin: Registered[Any], error: str, doing: str, call: Any) -> None:
    """`call` has to raise an error of meshwright_checkpoint."""
    fix = f"raise meshwright_checkpoint.errors.{error}, with what is wrong and what to do"
    try:
        answer = call()
    except getattr(errors(), error):
        return
    except Exception as other:
        require(False, plugin, f"{doing} raised {type(other).__name__}: {other}", fix)
    else:
        require(False, plugin, f"{doing} returned {answer!r} and raised nothing", fix)


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer after one step."""
    made = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(2, 5, device=HOST)).sum().backward()
    optimizer.step()
    return made, optimizer


def saved(plugin: Registered[Any], path: str) -> dict[str, torch.Tensor]:
    """Save a small model and return its state."""
    checkpoint = sibling("meshwright_checkpoint", PURPOSE)
    made, optimizer = small()
    fix = "see the order of calls of a save in the docstring of CheckpointStorage"
    told(
        plugin,
        "mw.save(path, model=..., optimizer=..., extra=...)",
        fix,
        lambda: checkpoint.save(
            path, model=made, optimizer=optimizer, extra={"epoch": 3}, backend=plugin.name
        ).wait(),
    )
    return {name: value.clone() for name, value in made.state_dict().items()}


def check_interface(plugin: Registered[Any], tools: Tools) -> None:
    """The target takes a path and returns a storage with every method."""
    storage_of(plugin, tools.place(plugin, "interface"))


def check_save_and_load(plugin: Registered[Any], tools: Tools) -> None:
    """What was saved is loaded: model, optimizer, extra."""
    checkpoint = sibling("meshwright_checkpoint", PURPOSE)
    path = tools.place(plugin, "step-1")
    state = saved(plugin, path)
    other, optimizer = small()
    fix = "let open() read exactly the bytes that writer() was given, under the same name"
    extra = told(
        plugin,
        "mw.load(path, model=..., optimizer=...)",
        fix,
        lambda: checkpoint.load(path, model=other, optimizer=optimizer, backend=plugin.name),
    )
    wrong = [name for name, value in other.state_dict().items() if not torch.equal(value, state[name])]
    require(not wrong, plugin, f"loading gives other values for {', '.join(wrong)}", fix)
    require(extra == {"epoch": 3}, plugin, f"extra={{'epoch': 3}} was loaded as {extra!r}", fix)


def check_bytes(plugin: Registered[Any], tools: Tools) -> None:
    """A file has the bytes that were written, in any number of writes; one that is missing is an error."""
    path = tools.place(plugin, "bytes")
    storage = own_format(plugin, path)
    content = bytes(range(256)) * 5 + b"odd"
    _begin(plugin, storage, "one")
    writer = storage.writer(FILE)
    for begin, end in ((0, 1), (1, 1000), (1000, len(content))):
        writer.write(memoryview(content)[begin:end])
    writer.close()
    storage.commit(b"{}")
    storage.end()
    storage.finish()
    reading = own_format(plugin, path)
    size = reading.nbytes(FILE)
    fix = "store the bytes of all write() calls in order, and nothing else"
    require(size == len(content), plugin, f"a file of {len(content)} bytes has nbytes()={size!r}", fix)
    file, buffer = reading.open(FILE), bytearray(1203)
    file.read_into(memoryview(buffer), 77)
    require(
        bytes(buffer) == content[77 : 77 + 1203], plugin, "read_into() at offset 77 gives other bytes", fix
    )
    must_raise(
        plugin, "CorruptError", "read_into() past the end", lambda: file.read_into(memoryview(buffer), 900)
    )
    file.close()
    require(
        reading.nbytes("missing.safetensors") is None,
        plugin,
        f"nbytes() of a file that is not there is {reading.nbytes('missing.safetensors')!r}",
        "return None",
    )
    must_raise(
        plugin,
        "CorruptError",
        "open() of a file that is not there",
        lambda: reading.open("missing.safetensors"),
    )
    reading.remove("two")


def check_commit(plugin: Registered[Any], tools: Tools) -> None:
    """Nobody sees a checkpoint before its commit, a save that ends without one leaves nothing, and the next one can begin."""
    path = tools.place(plugin, "commit")
    for save_id in ("first", "second"):
        storage = own_format(plugin, path)
        _begin(plugin, storage, save_id)
        writer = storage.writer(FILE)
        writer.write(b"half")
        writer.close()
        must_raise(
            plugin,
            "CheckpointError",
            "manifest() before commit()",
            lambda: own_format(plugin, path).manifest(),
        )
        visible = [child.name for child in own_format(plugin, path).parent().children()]
        require(
            storage.name not in visible,
            plugin,
            f"parent().children() lists {storage.name!r} before commit()",
            "write elsewhere, and move the whole to its place in commit(), manifest last",
        )
        storage.end()
        storage.finish()
        outcome = own_format(plugin, path).outcome(save_id)
        require(
            outcome is False,
            plugin,
            f"outcome() of a save that ended without commit() is {outcome!r}",
            "return False once the save has ended without a checkpoint: other ranks wait until it is not None",
        )


def check_no_overwrite(plugin: Registered[Any], tools: Tools) -> None:
    """A save to a path that has a checkpoint is refused; removing it removes it for readers."""
    path = tools.place(plugin, "whole")
    own_format(plugin, path)
    saved(plugin, path)
    storage = own_format(plugin, path)
    names = [child.name for child in storage.parent().children()]
    require(
        storage.name in names,
        plugin,
        f"parent().children() is {names} after a save to {storage.name!r}",
        "list every committed checkpoint: mw.latest and keep_last go by it",
    )
    must_raise(
        plugin, "CheckpointError", "begin() where there is a checkpoint", lambda: storage.begin("again")
    )
    own_format(plugin, path).remove("gone")
    must_raise(
        plugin, "CheckpointError", "manifest() after remove()", lambda: own_format(plugin, path).manifest()
    )


def check_other_jobs(plugin: Registered[Any], tools: Tools) -> None:
    """A second job that saves to the same path is refused while the first one saves."""
    path = tools.place(plugin, "shared")
    own_format(plugin, path)
    _, refused = tools.pool().run(2, second_job, plugin.record, path)
    require(
        refused,
        plugin,
        "begin() succeeds on one process while another one saves to the same path",
        "lock the path in begin() and release it in finish(), and raise CheckpointError where it is locked",
    )


def second_job(rank: int, world_size: int, record: BackendSpec, path: str) -> bool:
    """Rank 0 saves; whether rank 1 is refused meanwhile."""
    storage = record.load()(path)
    if rank == 0:
        storage.begin("first")
        storage.claim("first", 0)
    dist.barrier()
    refused = False
    if rank == 1:
        try:
            storage.begin("second")
            storage.finish()
        except importlib.import_module("meshwright_checkpoint.errors").CheckpointError:
            refused = True
    dist.barrier()
    if rank == 0:
        storage.end()
        storage.finish()
    return refused


def check_ranks(plugin: Registered[Any], tools: Tools) -> None:
    """Two ranks save shards, and load them into another layout."""
    path = tools.place(plugin, "ranks")
    storage_of(plugin, path)
    fix = "let all ranks write to one place: claim(), writer() and write_note() are called on every rank"
    equal = told(
        plugin,
        "saving and loading on two ranks",
        fix,
        lambda: tools.pool().run(2, resharded, plugin.name, path),
    )
    require(all(equal), plugin, "what two ranks saved in shards is loaded with other values", fix)


def resharded(rank: int, world_size: int, name: str, path: str) -> bool:
    """Save a weight that is sharded on dim 0, load it sharded on dim 1 and replicated."""
    checkpoint = importlib.import_module("meshwright_checkpoint")
    mesh = init_device_mesh("cpu", (world_size,))
    values = torch.arange(30.0, device=HOST).view(6, 5)

    def layer(placement: Any, start: torch.Tensor) -> nn.Module:
        made = nn.Linear(5, 6, bias=False)
        made.weight = nn.Parameter(distribute_tensor(start, mesh, [placement]))
        return made

    checkpoint.save(path, model=layer(Shard(0), values), backend=name).wait()
    dist.barrier()
    answers = []
    for placement in (Shard(1), Replicate()):
        other = layer(placement, torch.zeros_like(values))
        checkpoint.load(path, model=other, backend=name)
        weight = other.weight
        assert isinstance(weight, DTensor)
        answers.append(torch.equal(weight.full_tensor(), values))
    return all(answers)


def _begin(plugin: Registered[Any], storage: Any, save_id: str) -> None:
    fix = "begin() makes a place for a save and removes leftovers of those that ended without commit()"
    told(plugin, f"begin({save_id!r})", fix, lambda: storage.begin(save_id))
    told(
        plugin,
        f"claim({save_id!r}, 0)",
        "claim() follows begin() on every rank",
        lambda: storage.claim(save_id, 0),
    )


CHECKS: tuple[Check, ...] = (
    check_interface,
    check_save_and_load,
    check_bytes,
    check_commit,
    check_no_overwrite,
    check_other_jobs,
    check_ranks,
)
