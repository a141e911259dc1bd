"""python -m integration_tests.elastic.topology [--megabits 100]: a plan that knows the link between hosts, and one that does not.

Two hosts of two ranks (network namespaces; Linux, as root), whose link has a bandwidth (tc). One plan is for a cluster with that
link, one for four ranks of one host. Both train on the hosts, and the seconds of a step are printed. Latency is not shaped: that
takes netem, a module that kernels may lack.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshwright as mw
from meshwright_dtensor.cluster import Cluster, LinkLevel
from meshwright_planner.clusters.registry import named

from .hosts import hosts

STEPS = 6
PORT = 29500


def built() -> tuple[nn.Module, torch.Tensor]:
    """A model of 4 million parameters with few rows, so that its gradients are most of what is sent."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        for _ in range(8)
    ]
    return nn.Sequential(*blocks), torch.randn(16, 32, 256)


def clusters(megabits: int) -> dict[str, Cluster]:
    """Of the hosts as they are, and as one host."""
    like = named("laptop-cpu")
    inner = like.links[0]
    # both ranks of a host share its link
    between = LinkLevel("link between hosts", 0, 1e-3, megabits * 1e6 / 8 / 2)
    return {
        "two hosts": replace(like, devices_per_node=2, links=(replace(inner, size=2), between)),
        "one host": replace(like, devices_per_node=4, links=(replace(inner, size=4),)),
    }


def train(file: Path) -> None:
    """A rank: train under the plan of the file, and print the median of the seconds of a step."""
    mw.init(timeout=300)
    model, x = built()
    model = mw.parallelize(model, mw.ParallelPlan.load(file), batch=x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times = []
    for _ in range(STEPS):
        torch.distributed.barrier()
        start = time.perf_counter()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.barrier()
        times.append(time.perf_counter() - start)
    if torch.distributed.get_rank() == 0:
        print(f"{statistics.median(times[2:]):.3f} s a step", flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m integration_tests.elastic.topology", description=__doc__)
    parser.add_argument("--megabits", type=int, default=100)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train)
        return
    model, x = built()
    with tempfile.TemporaryDirectory() as folder:
        for name, cluster in clusters(arguments.megabits).items():
            plan: Any = mw.plan(model, x, world_size=4, cluster=cluster)
            file = Path(folder, f"{name}.json")
            plan.save(file)
            degrees = " x ".join(f"{axis} {n}" for axis, n in plan.degrees.items() if n > 1)
            print(f"planned for {name}: {degrees}: {_measured(file, arguments.megabits)}", flush=True)


def _measured(file: Path, megabits: int) -> str:
    """What rank 0 prints of a run on two hosts."""
    with hosts(2, megabits) as made:
        agents = []
        for host in (0, 1):
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
            words += [f"--node-rank={host}", f"--master-addr={made.addresses[0]}", f"--master-port={PORT}"]
            words += ["-m", "integration_tests.elastic.topology", "--train", str(file)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": made.interface}
            command = made.command(host, words)
            agents.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        told = [agent.communicate()[0] for agent in agents]
        assert all(agent.returncode == 0 for agent in agents)
    return told[0].strip()


if __name__ == "__main__":
    main()
