"""Run the command line: as a user does, in processes of its own, or on ranks that have imported torch already."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from meshwright.cli import State, group
from meshwright_dtensor.testing.rank_pool import RankPool

HERE = Path(__file__).parent


def run_ranks(
    arguments: list[str], *, launcher: bool, timeout: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """`meshwright ARGUMENTS`, under torchrun with two ranks, or launching its ranks by itself."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if launcher else []
    return subprocess.run(
        [sys.executable, *torchrun, "-m", "meshwright", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=HERE,
    )


@dataclass(frozen=True)
class Done:
    """What one rank of a command returned and printed."""

    returncode: int
    stdout: str
    stderr: str


def run_on(
    pool: RankPool, size: int, arguments: list[str], folder: Path, *, inside: bool = False
) -> list[Done]:
    """`meshwright ARGUMENTS` on every rank of a pool, in the environment that torchrun gives them; what each did.

    The command makes its own world, as always. An error of the user's is raised, as it is; `meshwright.cli.main`, which
    prints it and ends the process, is for `run_ranks`. A `--model` is named by its whole path. `folder`: any new one.
    `inside`: the command runs in it.
    """
    store = Path(tempfile.mkdtemp(dir=folder)) / "after"
    # as torchrun's agent does: whoever is given the port of a server that runs cannot find it taken
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return pool.run(size, _command, arguments, agent.port, str(store), str(folder) if inside else ".")


def _command(rank: int, size: int, arguments: list[str], port: int, store: str, inside: str) -> Done:
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    before, here = dict(os.environ), os.getcwd()
    dist.destroy_process_group()  # the pool's
    os.environ.update({k: str(v) for k, v in job.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.chdir(inside)
    try:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = group.main(
                list(arguments), "meshwright", standalone_mode=False, obj=State(tuple(arguments))
            )
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(here)
        if dist.is_initialized():
            dist.destroy_process_group()
    # what the pool's next run on these ranks expects to find
    dist.init_process_group("gloo", store=FileStore(store, size), rank=rank, world_size=size)
    return Done(code or 0, out.getvalue(), err.getvalue())
