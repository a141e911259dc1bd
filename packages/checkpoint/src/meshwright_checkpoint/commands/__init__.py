"""`meshwright checkpoint`: inspect, verify, compare, export and reshard checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from meshwright_checkpoint.commands.drawing import draw, overview
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_dtensor.utils.names import count_of


@click.group("checkpoint")
def command() -> None:
    """Inspect, verify, compare, export and reshard checkpoints, without the model."""


_PATH = click.Path(path_type=Path)
_BACKEND = click.option(
    "--backend",
    default=DEFAULT,
    show_default=True,
    help="Checkpoint backend; `meshwright plugins` lists them.",
)


@command.command("inspect")
@click.argument("path")
@click.option("--tensor", default=None, help="Draw which file holds which part of this tensor.")
@_BACKEND
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: str, tensor: str | None, backend: str, as_json: bool) -> None:
    """Show the tensors, sizes, layout, plan and step of a checkpoint. Reads only the manifest."""
    from meshwright_checkpoint.storage.backend import storage_of
    from meshwright_dtensor.errors import UsageError
    from meshwright_dtensor.utils.names import suggestion

    manifest = storage_of(path, backend).manifest()
    if tensor is not None:
        name = tensor.removeprefix("model/")
        wanted = (tensor, f"model/{tensor}", f"model/{manifest.model.aliases.get(name, name)}")
        key = next((k for k in wanted if k in manifest.tensors), None)
        if key is None:
            hint = suggestion(tensor, [k.removeprefix("model/") for k in manifest.tensors])
            raise UsageError(f"--tensor {tensor} is not in {path}; `inspect {path}` lists the tensors{hint}")
        entry = manifest.tensors[key]
        click.echo(json.dumps({"key": key, **entry.model_dump(mode="json")}) if as_json else draw(key, entry))
    elif as_json:
        data = manifest.model_dump(mode="json")
        data["tensors"] = {
            key: {"shape": list(t.shape), "dtype": t.dtype, "nbytes": t.nbytes, "parts": len(t.parts)}
            for key, t in manifest.tensors.items()
        }
        click.echo(json.dumps(data))
    else:
        click.echo(overview(manifest))


@command.command("verify")
@click.argument("path")
@_BACKEND
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(path: str, backend: str, as_json: bool) -> int:
    """Read a checkpoint and verify all checksums. Exit code 4 if something is damaged."""
    from meshwright_checkpoint.convert.verify import verify as check
    from meshwright_checkpoint.storage.backend import storage_of
    from meshwright_checkpoint.storage.checkpoint import Checkpoint

    with Checkpoint(storage_of(path, backend)) as checkpoint:
        total = sum(file.nbytes for file in checkpoint.manifest.files)
        with _progress("verify", total) as progress:
            problems = check(checkpoint, progress)
        count = len(checkpoint.tensors)
    if as_json:
        click.echo(
            json.dumps({"path": str(path), "ok": not problems, "tensors": count, "problems": problems})
        )
    else:
        click.echo(
            "\n".join(problems)
            or f"{path}: {count_of(count, 'tensor')}, {total} bytes, all as they were saved"
        )
    return 4 if problems else 0


@command.command("diff")
@click.argument("a")
@click.argument("b")
@_BACKEND
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(a: str, b: str, backend: str, as_json: bool) -> int:
    """Show the differences of two checkpoints of any layout. Values are compared bit for bit.

    Exit codes as diff(1): 0 if they are equal, 1 if they differ, 2 if they could not be compared (one is missing or damaged).
    """
    from meshwright_checkpoint.convert.verify import compare
    from meshwright_checkpoint.errors import CheckpointError
    from meshwright_checkpoint.storage.backend import storage_of
    from meshwright_checkpoint.storage.checkpoint import Checkpoint
    from meshwright_dtensor.errors import MeshwrightError

    try:
        with Checkpoint(storage_of(a, backend)) as first, Checkpoint(storage_of(b, backend)) as second:
            differences = compare(first, second)
        if as_json:
            click.echo(json.dumps([difference.to_dict() for difference in differences]))
        else:
            lines = [f"{d.kind:9} {d.name}{f': {d.detail}' if d.detail else ''}" for d in differences]
            click.echo("\n".join(lines) or "the checkpoints hold the same")
    except MeshwrightError as error:
        # also for damage, which has exit code 4 in other commands
        error.exit_code = 2
        raise
    except Exception as error:
        # exit code 1 would mean a difference
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{a} and {b} could not be compared: {kind}{error}") from error
    return 1 if differences else 0


@command.command("export")
@click.argument("path")
@click.argument("target")
@_BACKEND
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def export(path: str, target: str, backend: str, as_json: bool) -> None:
    """Export the model of a checkpoint to a directory for transformers' from_pretrained."""
    from meshwright_checkpoint.convert.export import export_checkpoint

    export_checkpoint(path, target, backend)
    files = sorted(file.name for file in Path(target).iterdir())
    click.echo(json.dumps({"path": target, "files": files}) if as_json else f"{target}: {', '.join(files)}")


@command.command("reshard")
@click.argument("path")
@click.argument("target")
@click.option("--ranks", type=click.IntRange(1, 1 << 20), default=None, help="Number of ranks to load it.")
@click.option("--plan", "plan_file", type=_PATH, default=None, help="Plan of the ranks that will load it.")
@_BACKEND
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reshard(
    path: str, target: str, ranks: int | None, plan_file: Path | None, backend: str, as_json: bool
) -> None:
    """Rewrite a checkpoint for other ranks, so that each finds its shards in one file.

    It is never needed, because any layout loads any checkpoint, but it makes later loads faster.
    """
    from meshwright_checkpoint.convert.reshard_offline import rewrite
    from meshwright_checkpoint.storage.backend import storage_of
    from meshwright_checkpoint.storage.checkpoint import Checkpoint
    from meshwright_dtensor.errors import UsageError
    from meshwright_dtensor.plan import ParallelPlan

    plan = None if plan_file is None else ParallelPlan.load(plan_file)
    if (ranks is None) == (plan is None):
        raise UsageError("reshard needs the number of loading ranks: pass either --ranks or --plan")
    count = plan.world_size if plan is not None else ranks or 1
    with Checkpoint(storage_of(path, backend)) as checkpoint:
        total = sum(stored.nbytes for stored in checkpoint.manifest.tensors.values())
        with _progress("reshard", total) as progress:
            rewrite(checkpoint, storage_of(target, backend), count, plan, progress)
    click.echo(
        json.dumps({"path": str(target), "ranks": count})
        if as_json
        else f"{target}: {count} file{'s' * (count != 1)}"
    )


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if it is a terminal. Yields a function of the bytes done."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    with click.progressbar(length=total, label=what, file=sys.stderr) as bar:
        yield bar.update
