"""`meshwright doctor`: what is installed, what this machine offers, and the calls of a model that have no local form.

With --model, the model is planned, takes one training step on ranks of this machine, and every call that could not run as
itself on the local tensors is named: tier 2 runs operation by operation, or moves an input between dims or ranks that share
the work; tier 3 gathers an input and runs replicated.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from meshwright import ranks
from meshwright.cli import State
from meshwright.commands import options as opt
from meshwright_dtensor.errors import VerificationError
from meshwright_dtensor.strategy import PlanRequest
from meshwright_dtensor.utils.console import Table, show

_PARTS = "dtensor parallel pipeline planner checkpoint".split()
PRINT_SECONDS = 2.0
"""For rank 0 to print the checks, where one of them has failed."""
DISTRIBUTIONS = ("meshwright", *(f"meshwright-{part}" for part in _PARTS), "transformers")


@click.command("doctor")
@click.option("--model", metavar="MODEL", help="Also look for lost sharding in this model, as for plan.")
@opt.number("--world-size", help="Ranks to start for --model and --health. [default: 2]")
@opt.DEGREE
@opt.COMPILE
@opt.batch_options
@click.option("--health", is_flag=True, help="Also measure what makes a run slow or end early.")
@click.option("--folder", default=".", show_default=True, help="Where checkpoints go, for --health.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(
    state: State,
    model: str | None,
    world_size: int | None,
    degrees: tuple[str, ...],
    compile: bool | str | None,
    batch_size: int | None,
    sequence_length: int | None,
    health: bool,
    folder: str,
    as_json: bool,
) -> int:
    """Report the environment: versions, devices, backends, threads, ranks, and the problems of plugins.

    With --model, also every call of that model that has no local form (it runs op by op, or on gathered values), with the reason.
    With --health, limits, memory, disk, clocks, processors, links, versions and plugins of hosts and ranks, each with what to do;
    the exit code is 4 where a run would fail: ranks that do not reach each other or differ, a folder that cannot be written to.
    With --compile, three steps are run, and each kind of module is listed with the calls that ran compiled, and why others did not.
    """
    pins = opt.parse_degrees(degrees, state.host)
    sizes = {"--batch-size": batch_size, "--sequence-length": sequence_length}
    opt.check_needs(
        "--model",
        model is not None,
        {"--degree": degrees, "--compile": compile, **sizes},
    )
    opt.check_needs("--model or --health", model is not None or health, {"--world-size": world_size})
    if model is not None or health:
        size = ranks.check_world_size(world_size, default=2)
        if size > 1 and not ranks.is_rank():
            return ranks.launch(size, state.arguments)
    facts = environment() | {"plugin problems": list(map(str, state.host.problems))}
    facts["plugins turned off"] = list(state.host.disabled)
    failed = False
    if health:
        from meshwright.commands.health import checks_of_job

        checks = checks_of_job(Path(folder), state.host)
        facts["health"], failed = list(map(asdict, checks)), any(check.failed for check in checks)
    if model is not None:
        facts["programs"] = programs(opt.ModelChoice(model, batch_size, sequence_length), pins, compile)
    if ranks.rank() == 0:
        click.echo(json.dumps(facts, indent=2)) if as_json else print_facts(facts)
    if failed and ranks.rank():
        # the launcher ends all ranks once one has left with a code, and rank 0 prints
        time.sleep(PRINT_SECONDS)
    return VerificationError.exit_code if failed else 0


def print_facts(facts: dict[str, Any]) -> None:
    """Print the facts as tables."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts.items():
        if name not in ("programs", "health"):
            table.add_row(name, ", ".join(value) or "none" if isinstance(value, list) else str(value))
    console = show(table)
    for check in facts.get("health", ()):
        console.print(
            f"\n{check['name']}: {check['value']}", highlight=False, markup=False, soft_wrap=True, end=""
        )
        if check["advice"]:
            console.print(f"\n  {check['advice']}", highlight=False, markup=False, soft_wrap=True, end="")
    if "health" in facts:
        console.print()
    if "programs" not in facts:
        return
    programs = facts["programs"]
    tiers = programs["tiers"]
    console.print(
        f"\n{programs['model']} on {programs['mesh']}: {tiers['1']} calls run as they are on local tensors, "
        f"{tiers['2']} operation by operation or on moved inputs, {tiers['3']} replicated on gathered inputs",
        highlight=False,
    )
    for entry in programs["lost"]:
        line = f"  tier {entry['tier']}: {entry['function']} on {entry['layouts']}: {entry['reason']}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for note in programs["compile"]:
        console.print(f"  {note}", highlight=False, markup=False, soft_wrap=True)
    for row in programs["regions"]:
        line = f"  compiled: {row['modules']} like {row['module']}: {row['compiled']} calls compiled, {row['other']} not"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
        for reason, count in row["reasons"]:
            console.print(f"    {count}: {reason}", highlight=False, markup=False, soft_wrap=True)


def programs(chosen: opt.ModelChoice, pins: dict[str, int], compile: bool | str | None) -> dict[str, Any]:
    """A step of the model on the ranks of this job: programs by tier, each of tier 2 and 3 with its reason, compiled regions."""
    import meshwright as mw
    from meshwright_dtensor.mesh.context import MeshContext
    from meshwright_dtensor.model.batch_size import call_arguments

    mw.init()
    source = chosen.source()
    with mw.deferred_init():
        instance = source.make()
    instance, plan = opt.apply_request(
        instance, source.batch, PlanRequest(**opt.pinning(pins), compile=compile)
    )
    args, keywords = call_arguments(source.batch)
    # the first two calls of a region show what its code reads
    for _ in range(3 if plan.compile else 1):
        output: Any = instance(*args, **keywords)
        loss = getattr(output, "loss", output)
        if loss.ndim == 0 and loss.requires_grad:
            loss.backward()
    parameter: Any = next(instance.parameters())
    report = MeshContext.of(parameter.device_mesh).report
    return {
        "model": type(instance).__name__,
        "mesh": " x ".join(f"{axis} {n}" for axis, n in plan.degrees.items() if n > 1) or "one rank",
        "tiers": {str(tier): count for tier, count in report.tiers.items()},
        "lost": [asdict(entry) for entry in report.entries],
        "compile": [note for note in plan.provenance.notes if note.startswith("compile=")],
        "regions": [asdict(row) for row in mw.debug.regions(instance).rows],
    }


def environment() -> dict[str, Any]:
    """Names and values worth quoting when something goes wrong."""
    import torch
    import torch.distributed as dist

    from meshwright_dtensor._torch.inductor import inductor_lacks
    from meshwright_dtensor.devices import default_device, types_here

    facts: dict[str, Any] = dict.fromkeys(DISTRIBUTIONS, "not installed")
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return facts | {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 0,
        "devices": "; ".join(map(_device_text, types_here())),
        "compile=": inductor_lacks(default_device().name) or "torch's inductor generates code here",
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        "launched by torchrun": ranks.is_rank(),
        "ranks": ranks.world_size(),
    }


def _device_text(kind: str) -> str:
    """A type of device, how many there are, their backend, and the kernels that torch's optimizers have there."""
    from meshwright_dtensor.devices import device_of

    record = device_of(kind)
    kernels = [name for name, there in (("foreach", record.foreach), ("fused", record.fused)) if there]
    with_kernels = f", {' and '.join(kernels)} optimizers" if kernels else ""
    return f"{record.count()} {kind} over {record.backend()}{with_kernels}"
