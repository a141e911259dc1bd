"""`meshwright calibrate`: measure this machine, and write it as a cluster that can be planned for."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright import ranks
from meshwright.cli import State
from meshwright.commands.options import check_folder, file
from meshwright_dtensor.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshwright_dtensor.cluster import Cluster


@click.command("calibrate")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("machine.json"),
    show_default=True,
    help="Where to write the profile.",
)
@click.option(
    "--ranks",
    "text",
    metavar="N,N",
    help="Numbers of ranks to start here and measure collectives with; 1 measures none. [2,4, as far as there are "
    "devices; a job's own under torchrun]",
)
@click.option("--name", default="this-machine", show_default=True, help="Name of the cluster, for reports.")
@file("--part", hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON on stdout.")
@click.pass_obj
def command(state: State, output: Path, text: str | None, name: str, part: Path | None, as_json: bool) -> int:
    """Measure this machine: operations by size and dtype, memory, launches, collectives by size and number of ranks.

    Plan with it as `meshwright plan --cluster FILE`. It takes one to two minutes; other work on the machine spoils it.
    """
    check_folder("--output", output)
    if ranks.is_rank():
        return _as_rank(output, name, part, as_json)
    import torch

    from meshwright_dtensor.devices import default_device

    # one rank for each accelerator, and as many as are sensible without any
    record = default_device()
    most = ranks.MAX_LOCAL_RANKS if record.on_host else record.count()
    numbers = _numbers(text, most)
    from meshwright_planner.calibration.profile import RankMeasurements, combined_profile, measure_one_rank

    with tempfile.TemporaryDirectory(prefix="meshwright-calibrate-") as folder:
        measured = []
        for number in numbers:
            path = Path(folder) / f"{number}.json"
            code = ranks.launch(number, ["calibrate", "--output", str(output), "--part", str(path)])
            if code:
                return code
            measured.append(RankMeasurements.load(path))
    threads = torch.get_num_threads()
    # as many threads as the ranks that are started here have
    torch.set_num_threads(1)
    try:
        cluster = combined_profile(measure_one_rank(name), measured)
    finally:
        torch.set_num_threads(threads)
    _finish(cluster, output, as_json)
    return 0


def _as_rank(output: Path, name: str, part: Path | None, as_json: bool) -> int:
    import torch.distributed as dist

    import meshwright as mw
    from meshwright_planner.calibration.profile import combined_profile, measure_one_rank, measure_ranks

    mw.init()
    together = measure_ranks(_divided)
    dist.barrier()
    if ranks.rank() == 0 and part is not None:
        together.save(part)
    elif ranks.rank() == 0:
        # the others wait, so that one rank is alone on the machine
        _finish(combined_profile(measure_one_rank(name), [together]), output, as_json)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _divided(model: nn.Module, batch: Tensor) -> nn.Module:
    """The model with the rows of its batch divided over the ranks."""
    import meshwright as mw

    size = ranks.world_size()
    plan = mw.ParallelPlan(world_size=size, degrees={"dp": size}, strategies={"dp": "data"})
    return mw.parallelize(model, plan, batch=batch)


def _numbers(text: str | None, most: int) -> list[int]:
    if text is None:
        return [n for n in (2, 4) if n <= most] or [1]
    sizes = [int(word) for word in text.split(",") if word.strip().isdigit()]
    if len(sizes) != len(text.split(",")) or any(not 1 <= n <= most for n in sizes):
        raise UsageError(
            f"--ranks {text} is no list of numbers from 1 to {most}, the ranks that this machine can run; write for example "
            f"{'2,4' if most >= 4 else most}"
        )
    return sorted(set(sizes))


def _finish(cluster: Cluster, output: Path, as_json: bool) -> None:
    from meshwright_planner.clusters.file import write

    write(cluster, output)
    if as_json:
        click.echo(output.read_text(encoding="utf-8"))
        return
    best = {m.dtype: max(size / s for size, s in m.forward) for m in cluster.work if m.kind == "matmul"}
    lines = [
        f"matrix products: {', '.join(f'{dtype} {rate / 1e9:.0f} GFLOP/s' for dtype, rate in best.items())}",
        f"memory: {cluster.memory_bandwidth / 1e9:.1f} GB/s",
        f"one operation: {1e6 * cluster.launch_s:.1f} us forward, {1e6 * cluster.backward_launch_s:.1f} backward, "
        f"{1e6 * cluster.host_s:.1f} of the model's own code, "
        f"{1e6 * cluster.dispatch_s:.1f} more on a mesh",
        "slower with ranks: " + ", ".join(f"{n}: {f:.2f} x" for n, f in cluster.crowding),
    ]
    for m in cluster.collectives:
        (small, latency), (large, seconds) = m.points[0], m.points[-1]
        lines.append(
            f"{m.kind} over {m.degree} of {m.ranks}: {1e6 * latency:.0f} us at {small:.0f} B, "
            f"{large / seconds / 1e9:.2f} GB/s at {large / 2**20:.0f} MiB"
        )
    click.echo("\n".join(lines) + f"\nsaved to {output}")
