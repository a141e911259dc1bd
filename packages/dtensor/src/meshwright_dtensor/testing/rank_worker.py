"""The process of one rank of a `RankPool`: it waits for a function, runs it in its world, and sends the outcome."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from meshwright_dtensor._torch.groups import fake_store, forget_failed_join, forget_meshes
from meshwright_dtensor.mesh.mesh import destroy_groups, live_process_groups
from meshwright_dtensor.testing.on_device import pickled, use

_MANY_OBJECTS = 20_000


@dataclass
class Outcome:
    """The end of a call: `result` (pickled), or `traceback` and, if it can be pickled, `exception`; `finished` on the
    monotonic clock; `joined` is false if the process group could not be created, so that no rank ran the function.
    """

    result: bytes = b""
    traceback: str = ""
    exception: bytes | None = None
    finished: float = 0.0
    joined: bool = True


def run_worker(
    rank: int,
    pipe: Connection,
    folder: str,
    environment: dict[str, str],
    backend: str = "gloo",
    device: str = "cpu",
) -> None:
    """Serve jobs (sys.path, module and file of the function, world size, rendezvous file, payload) until end of file."""
    # a fork has that of its server
    os.environ.clear()
    os.environ.update(environment)
    _choose_device(rank, backend)
    use(device, rank)
    # the parent handles Ctrl-C and closes the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(Path(folder) / f"stack-{os.getpid()}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        current = ""
        frozen = False
        while True:
            try:
                path, source, world_size, rendezvous, payload = pipe.recv()
            except (EOFError, OSError):
                break
            joined = False
            try:
                sys.path[:] = path
                if not frozen:
                    _freeze_imports(*source)
                    frozen = True
                if rendezvous != current:
                    current = rendezvous
                    _join(rank, world_size, rendezvous, backend)
                else:
                    # those of the function before, from which every rank has returned
                    destroy_groups(live_process_groups())
                    _collect()
                joined = True
                # before modules are imported, which may make tensors
                use(device, rank)
                _import(*source)
                fn, args = pickle.loads(payload)
                _reset()
                outcome = Outcome(result=pickled(fn(rank, world_size, *args)), finished=time.monotonic())
            except BaseException as error:
                # sent to the parent; the time is taken before the others fail too
                finished = time.monotonic()
                outcome = Outcome(b"", traceback.format_exc(), _pickled(error), finished, joined)
                current = ""
            if not current:
                # closes the connections, so that waiting ranks fail at once; the error, which holds models, is gone by now
                _leave()
            try:
                pipe.send(outcome)
            except OSError:
                break
        _leave()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo threads that still hold tensors would abort the interpreter at shutdown (see utils.process)
    os._exit(0)


def _freeze_imports(name: str, file: str | None) -> None:
    """Import the module of the first function, and take all modules out of garbage collections.

    An import of transformers makes hundreds of thousands of objects. This runs before the first function: what a
    function leaves must not be frozen.
    """
    with suppress(Exception):
        _import(name, file)
    gc.collect()
    gc.freeze()


def _choose_device(rank: int, backend: str) -> None:
    """Divide the GPUs of this machine among the ranks, several ranks on one where there are more ranks."""
    if not torch.cuda.is_available():
        return
    os.environ["LOCAL_RANK"] = str(rank % torch.cuda.device_count())
    if "nccl" in backend:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        if rank >= torch.cuda.device_count():
            # NCCL refuses two ranks of one host on one GPU; ranks of two hosts talk over sockets
            os.environ["NCCL_HOSTID"] = f"host-{rank}"


def _join(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    _leave()
    if "fake" in backend:
        # the import registers it
        fake_store()
    # the pool has its own timeout
    store, timeout = FileStore(rendezvous, world_size), timedelta(hours=1)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    # no rank starts before all have joined, so that a failed world can be tried again
    dist.barrier()


def _leave() -> None:
    if dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group()
        forget_meshes()
        _collect()
    forget_failed_join()


def _collect() -> None:
    """Free the models of a function: they hold process groups, whose threads wake up a hundred times a second.

    Once a lot is left, such as modules that functions have imported, it is taken out of the next collections.
    """
    gc.collect()
    if len(gc.get_objects()) > _MANY_OBJECTS:
        # with what was taken out before and may be garbage by now
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def _reset() -> None:
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _import(name: str, file: str | None) -> None:
    """Make `name` importable for pickle: by name if that is the same file, else from the file."""
    module: Any = sys.modules.get(name)
    if module is None:
        with suppress(ImportError):
            module = importlib.import_module(name)
    if file is None or (module is not None and getattr(module, "__file__", None) == file):
        return
    if name == "__main__":
        # multiprocessing has prepared it
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _pickled(error: BaseException) -> bytes | None:
    """The exception, if it survives a round trip."""
    with suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    return None
