"""The store by which the ranks of one start of torchrun find each other.

When torchrun starts ranks again, its agent goes on with the same store, in which the addresses of the ranks before still are: a
rank that reads one of them connects to nobody. So rank 0 gives the ranks of each start a prefix of their own. It cannot just write
the prefix under a name, where the last one may be read before; each rank asks for it under a name that was never used.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from meshwright_dtensor.errors import UsageError

WAITING_SECONDS = 300.0
ENDING_SECONDS = 5.0
"""How long rank 0, at its end, still waits for ranks that have not joined."""
POLL_SECONDS = 0.02
_REQUEST, _ANSWER, _JOINED = "meshwright/request/", "meshwright/answer/", "meshwright/joined/"


def start_store() -> dict[str, Any]:
    """What `init_process_group` needs on a rank that torchrun has started: nothing, or the store, rank and number of ranks."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store, rank, ranks = next(rendezvous("env://"))
    return {"store": store_of_start(store, rank, ranks), "rank": rank, "world_size": ranks}


def store_of_start(store: Any, rank: int, ranks: int) -> Any:
    """The part of `store` that is of this start alone; every rank of it must call this.

    store: of torch.distributed, with clone().

    Raises UsageError: rank 0 does not come.
    """
    if rank:
        request = uuid.uuid4().hex
        store.set(f"{_REQUEST}{rank}", request)
        try:
            store.wait([_ANSWER + request], timedelta(seconds=WAITING_SECONDS))
        except RuntimeError as error:
            raise UsageError(
                f"rank {rank} has waited {WAITING_SECONDS:g} s for rank 0. Where another machine has become the first one, agents "
                "of torchrun use different stores: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started"
            ) from error
        prefix = store.get(_ANSWER + request).decode()
        store.set(f"{_JOINED}{prefix}/{rank}", "")
    else:
        prefix = uuid.uuid4().hex
        answering = threading.Thread(
            target=_answer, args=(store.clone(), prefix, ranks), name="meshwright start", daemon=True
        )
        answering.start()
        # a thread that comes back from the store while the interpreter ends aborts the process
        atexit.register(answering.join, ENDING_SECONDS)
    return PrefixStore(f"meshwright/start/{prefix}", store)


def _answer(store: Any, prefix: str, ranks: int) -> None:
    """Tell the prefix to every rank that asks, until all have it; a rank of an earlier start may have asked too."""
    answered: dict[int, bytes] = {}
    missing = set(range(1, ranks))
    # where the store ends first, so does the job
    with suppress(RuntimeError):
        while missing:
            for rank in sorted(missing):
                key = f"{_REQUEST}{rank}"
                request = store.get(key) if store.check([key]) else None
                if store.check([f"{_JOINED}{prefix}/{rank}"]):
                    # a request after that is one of the next start
                    missing.remove(rank)
                elif request is not None and answered.get(rank) != request:
                    answered[rank] = request
                    store.set(_ANSWER + request.decode(), prefix)
            time.sleep(POLL_SECONDS)
