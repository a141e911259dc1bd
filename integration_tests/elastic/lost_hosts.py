"""A run on several hosts, of which one is lost and comes back, again and again."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Shape:
    """hosts: of the run, each with so many ranks. megabits: of each link and second; None for all there is."""

    hosts: int = 2
    ranks: int = 2
    megabits: int | None = None

    @property
    def all_ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.ranks


def lose_hosts(folder: Path, losses: int, seed: int, shape: Shape) -> list[str]:
    """How each host was lost ("killed" or "cut off"). AssertionError where the run does not go on by itself.

    The script is that of `kills`; torchrun of a lost host is started again by us, as a scheduler does. A host that was killed has
    lost its memory (/dev/shm), one that was cut off comes back with its memory.
    """
    choose, told = random.Random(seed), []
    everyone, rest = shape.all_ranks, shape.all_ranks - shape.ranks
    with hosts(shape.hosts + 1, shape.megabits) as made, _store(made, shape.hosts), _memories(made, shape):
        agents = {host: _agent(made, host, folder, shape) for host in range(shape.hosts)}
        try:
            for _ in range(losses):
                _wait(folder, everyone, agents)
                _wait_for_steps(folder, choose.randrange(1, 12))
                lost, kind = choose.randrange(shape.hosts), choose.choice(["killed", "cut off"])
                told.append(kind)
                if kind == "cut off":
                    made.cut(lost)
                else:
                    made.kill(lost)
                agent = agents.pop(lost)
                _wait(folder, rest, agents)
                made.kill(lost)
                agent.wait()
                if kind == "killed":
                    shutil.rmtree(_memory(made, lost))
                    _memory(made, lost).mkdir()
                made.mend(lost)
                _wait_for_steps(folder, choose.randrange(1, 4))
                # a busy machine takes long to start a host again, and the others would come to the end
                (folder / "slow").touch()
                agents[lost] = _agent(made, lost, folder, shape)
                # it is there again
                _wait(folder, everyone, agents)
                (folder / "slow").unlink()
            end = time.monotonic() + SECONDS
            while lines(folder)[-1] != {"done": True}:
                assert time.monotonic() < end, _last(folder)
                time.sleep(0.1)
        finally:
            for host, agent in agents.items():
                made.kill(host)
                agent.wait()
    return told


def check_lost_work(told: list[dict[str, Any]], most: int) -> int:
    """The most steps that a start has done again. AssertionError: more than `most`, or the losses of a step were not told."""
    worst, last = 0, -1
    for line in told:
        if "first" in line:
            assert line["first"] <= last + 1, f"step {last + 1} was left out"
            worst = max(worst, last + 1 - line["first"])
        last = line.get("step", last)
    assert worst <= most, f"{worst} steps were done again; {most} had no copy"
    return worst


def _memory(made: Hosts, host: int) -> Path:
    """What a host sees as /dev/shm."""
    return Path("/dev/shm", made.name(host))


@contextmanager
def _memories(made: Hosts, shape: Shape) -> Iterator[None]:
    try:
        for host in range(shape.hosts):
            _memory(made, host).mkdir()
        yield
    finally:
        for host in range(shape.hosts):
            shutil.rmtree(_memory(made, host), ignore_errors=True)


@contextmanager
def _store(made: Hosts, host: int) -> Iterator[None]:
    command = made.command(host, [sys.executable, "-c", STORE, made.addresses[host]])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as store:
        assert store.stdout is not None and store.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            made.kill(host)


def _agent(made: Hosts, host: int, folder: Path, shape: Shape) -> subprocess.Popen[bytes]:
    """torchrun on a host."""
    words = [sys.executable, "-m", "torch.distributed.run"]
    words += [f"--nnodes=1:{shape.hosts}", f"--nproc-per-node={shape.ranks}"]
    words += ["--max-restarts=10000", "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=run"]
    words += [f"--rdzv-endpoint={made.addresses[-1]}:{PORT}", f"--local-addr={made.addresses[host]}"]
    words += ["--rdzv-conf=is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": made.interface}
    # see docs/elastic.md
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / f"output-{host}").open("ab") as output:
        # `ip netns exec` gives the command mounts of its own
        memory = ["sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(_memory(made, host))]
        command = made.command(host, [*memory, *words, str(SCRIPT), str(folder)])
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def _wait(folder: Path, ranks: int, agents: dict[int, subprocess.Popen[bytes]]) -> None:
    """Until the run trains on so many ranks."""
    end = time.monotonic() + SECONDS
    while [line["ranks"] for line in lines(folder) if "ranks" in line][-1:] != [ranks]:
        if lines(folder)[-1:] == [{"done": True}]:
            raise AssertionError(
                "the run was over before the last host was back; give it more steps (STEPS=)"
            )
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
