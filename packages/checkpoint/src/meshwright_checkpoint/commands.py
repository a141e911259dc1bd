"""`meshwright checkpoint`: inspect, verify, compare, export and reshard checkpoints."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from meshwright_checkpoint.convert import verify as checks
from meshwright_checkpoint.convert.export import export_checkpoint
from meshwright_checkpoint.convert.reshard_offline import rewrite
from meshwright_checkpoint.errors import CheckpointError
from meshwright_checkpoint.format.manifest import Manifest, StoredTensor
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_checkpoint.storage.backend import storage_of
from meshwright_checkpoint.storage.checkpoint import Checkpoint
from meshwright_dtensor.errors import MeshwrightError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.names import count_of, listing, suggestion

WIDEST = 16
"""Most parts of a dim that are drawn as a grid."""


@click.group("checkpoint")
def command() -> None:
    """Inspect, verify, compare, export and reshard checkpoints, without the model."""


_BACKEND_HELP = "Checkpoint backend; `meshwright plugins` lists them."
_BACKEND = click.option("--backend", default=DEFAULT, show_default=True, help=_BACKEND_HELP)


@command.command("inspect")
@click.argument("path")
@click.option("--tensor", default=None, help="Draw which file holds which part of this tensor.")
@_BACKEND
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: str, tensor: str | None, backend: str, as_json: bool) -> None:
    """Show the tensors, sizes, layout, plan and step of a checkpoint. Reads only the manifest."""
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
    with Checkpoint(storage_of(path, backend)) as checkpoint:
        total = sum(file.nbytes for file in checkpoint.manifest.files)
        with _progress("verify", total) as progress:
            problems = checks.verify(checkpoint, progress)
        count = len(checkpoint.tensors)
    data = {"path": path, "ok": not problems, "tensors": count, "problems": problems}
    sound = f"{path}: {count_of(count, 'tensor')}, {total} bytes, all as they were saved"
    click.echo(json.dumps(data) if as_json else "\n".join(problems) or sound)
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
    try:
        with Checkpoint(storage_of(a, backend)) as first, Checkpoint(storage_of(b, backend)) as second:
            differences = checks.compare(first, second)
        if as_json:
            click.echo(json.dumps([asdict(difference) for difference in differences]))
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
    export_checkpoint(path, target, backend)
    files = sorted(file.name for file in Path(target).iterdir())
    click.echo(json.dumps({"path": target, "files": files}) if as_json else f"{target}: {', '.join(files)}")


@command.command("reshard")
@click.argument("path")
@click.argument("target")
@click.option("--ranks", type=click.IntRange(1, 1 << 20), default=None, help="Number of ranks to load it.")
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), help="Plan of the ranks that will load it."
)
@_BACKEND
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reshard(
    path: str, target: str, ranks: int | None, plan_file: Path | None, backend: str, as_json: bool
) -> None:
    """Rewrite a checkpoint for other ranks, so that each finds its shards in one file.

    It is never needed, because any layout loads any checkpoint, but it makes later loads faster.
    """
    plan = None if plan_file is None else ParallelPlan.load(plan_file)
    if (ranks is None) == (plan is None):
        raise UsageError("reshard needs the number of loading ranks: pass either --ranks or --plan")
    count = plan.world_size if plan is not None else ranks or 1
    with Checkpoint(storage_of(path, backend)) as checkpoint:
        total = sum(stored.nbytes for stored in checkpoint.manifest.tensors.values())
        with _progress("reshard", total) as progress:
            rewrite(checkpoint, storage_of(target, backend), count, plan, progress)
    text = f"{target}: {count_of(count, 'file')}"
    click.echo(json.dumps({"path": target, "ranks": count}) if as_json else text)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if it is a terminal. Yields a function of the bytes done."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    with click.progressbar(length=total, label=what, file=sys.stderr) as bar:
        yield bar.update


def overview(manifest: Manifest) -> str:
    """Summary of a checkpoint; repeated layers are one line."""
    step = "no step" if manifest.step is None else f"step {manifest.step}"
    ranks = count_of(manifest.world_size, "rank")
    lines = [f"{manifest.model.cls or 'state'}: {step}, {manifest.created}, {ranks}"]
    degrees = (manifest.plan or {}).get("degrees")
    if isinstance(degrees, dict):
        lines.append("plan: " + " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()))
    if manifest.optimizer is not None:
        groups = count_of(len(manifest.optimizer.groups), "parameter group")
        lines.append(f"optimizer: {manifest.optimizer.cls}, {groups}")
    if manifest.extra is not None:
        text = "one value"
        if isinstance(manifest.extra, dict) and not any(key.startswith("$") for key in manifest.extra):
            text = listing(manifest.extra) if manifest.extra else "{}"
        lines.append(f"extra: {text}")
    lines.append(f"files: {len(manifest.files)}, {human_bytes(sum(file.nbytes for file in manifest.files))}")
    rows: dict[tuple[str, str, str, int], Counter[str]] = {}
    for key, stored in manifest.tensors.items():
        if key.startswith("rng/"):
            continue
        folded = re.sub(r"(?<=[./])\d+(?=[./])", "*", key)
        row = (folded, stored.dtype, str(list(stored.shape)), len(stored.parts))
        rows.setdefault(row, Counter()).update(count=1, nbytes=stored.nbytes)
    widths = [max((len(str(row[i])) for row in rows), default=0) for i in range(3)]
    for (name, dtype, shape, parts), sums in sorted(rows.items()):
        text = f"  {name:{widths[0]}}  {dtype:{widths[1]}}  {shape:{widths[2]}}"
        text += f"  {count_of(parts, 'part')}  {human_bytes(sums['nbytes'])}"
        lines.append(text + (f"  ({sums['count']} of them)" if sums["count"] > 1 else ""))
    for alias, name in manifest.model.aliases.items():
        lines.append(f"  model/{alias} is model/{name}")
    return "\n".join(lines)


def draw(key: str, stored: StoredTensor) -> str:
    """Which file holds which part: a grid of file numbers over the first two dims, with the start index of each part."""
    lines = [f"{key}: {stored.dtype} {list(stored.shape)}, {count_of(len(stored.parts), 'part')}"]
    cuts = [
        sorted({part.box[dim][0] for part in stored.parts} | {sum(part.box[dim]) for part in stored.parts})
        for dim in range(min(len(stored.shape), 2))
    ]
    cuts += [[0, 1]] * (2 - len(cuts))
    if any(len(c) > WIDEST + 1 for c in cuts) or len(stored.shape) > 2:
        for part in stored.parts:
            text = ", ".join(f"{start}:{start + length}" for start, length in part.box)
            lines.append(f"  file {part.file}: [{text}]")
        return "\n".join(lines)
    numbers = [*(part.file for part in stored.parts), *cuts[1][:-1]]
    width = max((len(str(number)) for number in numbers), default=1) + 2
    columns = "|".join(f"{column:^{width}}" for column in cuts[1][:-1])
    lines.append(f"  {'from':>8} |{columns}|")

    def cell(*at: int) -> str:
        parts = (p for p in stored.parts if all(a <= i < a + n for (a, n), i in zip(p.box, at, strict=False)))
        return f"{next((part.file for part in parts), '?'):^{width}}"

    for row in cuts[0][:-1]:
        lines.append(f"  {row:>8} |{'|'.join(cell(row, column) for column in cuts[1][:-1])}|")
    return "\n".join(lines)
