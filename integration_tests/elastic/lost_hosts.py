"""A run on two hosts of two ranks each, of which one is lost and comes back, again and again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .hosts import Hosts, hosts
from .kills import SCRIPT, SECONDS, lines

PORT = 29400
STORE = f"""
import sys, time
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], {PORT}, is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(100000)
"""
"""The store of the rendezvous, on a host of its own that is never lost."""


def lose_hosts(folder: Path, losses: int, seed: int) -> list[str]:
    """How each host was lost ("killed" or "cut off"). AssertionError where the run does not go on by itself.

    The script is that of `kills`; torchrun of a lost host is started again by us, as a scheduler does.
    """
    choose, told = random.Random(seed), []
    with hosts(3) as made, _store(made):
        agents = {host: _agent(made, host, folder) for host in (0, 1)}
        try:
            for _ in range(losses):
                _wait(folder, 4, agents)
                _wait_for_steps(folder, choose.randrange(1, 4))
                lost, kind = choose.choice([0, 1]), choose.choice(["killed", "cut off"])
                told.append(kind)
                if kind == "cut off":
                    made.cut(lost)
                else:
                    made.kill(lost)
                agent = agents.pop(lost)
                _wait(folder, 2, agents)
                made.kill(lost)
                agent.wait()
                made.mend(lost)
                _wait_for_steps(folder, choose.randrange(1, 4))
                agents[lost] = _agent(made, lost, folder)
            end = time.monotonic() + SECONDS
            while lines(folder)[-1] != {"done": True}:
                assert time.monotonic() < end, _last(folder)
                time.sleep(0.1)
        finally:
            for host, agent in agents.items():
                made.kill(host)
                agent.wait()
    return told


@contextmanager
def _store(made: Hosts) -> Iterator[None]:
    command = made.command(2, [sys.executable, "-c", STORE, made.addresses[2]])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as store:
        assert store.stdout is not None and store.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            made.kill(2)


def _agent(made: Hosts, host: int, folder: Path) -> subprocess.Popen[bytes]:
    """torchrun on a host."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2"]
    words += ["--max-restarts=10000", "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=run"]
    words += [f"--rdzv-endpoint={made.addresses[2]}:{PORT}", f"--local-addr={made.addresses[host]}"]
    words += ["--rdzv-conf=is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": made.interface}
    # see docs/elastic.md
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / f"output-{host}").open("ab") as output:
        command = made.command(host, [*words, str(SCRIPT), str(folder)])
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def _wait(folder: Path, ranks: int, agents: dict[int, subprocess.Popen[bytes]]) -> None:
    """Until the run trains on so many ranks."""
    end = time.monotonic() + SECONDS
    while [line["ranks"] for line in lines(folder) if "ranks" in line][-1:] != [ranks]:
        if lines(folder)[-1:] == [{"done": True}]:
            raise AssertionError("the run was over before the last host was lost; give it more steps")
        assert all(agent.poll() is None for agent in agents.values()), _last(folder)
        assert time.monotonic() < end, _last(folder)
        time.sleep(0.1)


def _wait_for_steps(folder: Path, steps: int) -> None:
    """Until it has done so many more steps."""
    end, begun = time.monotonic() + SECONDS, len(lines(folder))
    while sum("step" in line for line in lines(folder)[begun:]) < steps:
        assert time.monotonic() < end, _last(folder)
        time.sleep(0.02)


def _last(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-2500:]}" for path in folder.glob("output-*"))
