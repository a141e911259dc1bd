"""Show a manifest as text."""

from __future__ import annotations

import re
from collections import Counter

from meshwright_checkpoint.format.manifest import Manifest, StoredTensor
from meshwright_dtensor.utils.names import listing

WIDEST = 16


def overview(manifest: Manifest) -> str:
    """Summary of a checkpoint; repeated layers are one line."""
    about = [f"step {manifest.step}" if manifest.step is not None else "no step", manifest.created]
    about.append(f"{manifest.world_size} rank{'s' * (manifest.world_size != 1)}")
    lines = [f"{manifest.model.cls or 'state'}: {', '.join(about)}"]
    degrees = (manifest.plan or {}).get("degrees")
    if isinstance(degrees, dict):
        lines.append("plan: " + " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()))
    if manifest.optimizer is not None:
        lines.append(
            f"optimizer: {manifest.optimizer.cls}, {len(manifest.optimizer.groups)} parameter "
            f"group{'s' * (len(manifest.optimizer.groups) != 1)}"
        )
    if manifest.extra is not None:
        named = isinstance(manifest.extra, dict) and not any(key.startswith("$") for key in manifest.extra)
        lines.append(
            f"extra: {(listing(manifest.extra) if manifest.extra else '{}') if named else 'one value'}"
        )
    total = sum(file.nbytes for file in manifest.files)
    lines.append(f"files: {len(manifest.files)}, {_size(total)}")
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
        text += f"  {parts} part{'s' * (parts != 1)}  {_size(sums['nbytes'])}"
        lines.append(text + (f"  ({sums['count']} of them)" if sums["count"] > 1 else ""))
    for alias, name in manifest.model.aliases.items():
        lines.append(f"  model/{alias} is model/{name}")
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def draw(key: str, stored: StoredTensor) -> str:
    """Which file holds which part: a grid of file numbers over the first two dims, with the start index of each part."""
    count = len(stored.parts)
    lines = [f"{key}: {stored.dtype} {list(stored.shape)}, {count} part{'s' * (count != 1)}"]
    cuts = [
        sorted({part.box[dim][0] for part in stored.parts} | {sum(part.box[dim]) for part in stored.parts})
        for dim in range(min(len(stored.shape), 2))
    ]
    while len(cuts) < 2:
        cuts.append([0, 1])
    if any(len(c) > WIDEST + 1 for c in cuts) or len(stored.shape) > 2:
        for part in stored.parts:
            text = ", ".join(f"{start}:{start + length}" for start, length in part.box)
            lines.append(f"  file {part.file}: [{text}]")
        return "\n".join(lines)
    numbers = [*(part.file for part in stored.parts), *cuts[1][:-1]]
    width = max((len(str(number)) for number in numbers), default=1) + 2
    columns = "|".join(f"{column:^{width}}" for column in cuts[1][:-1])
    lines.append(f"  {'from':>8} |{columns}|")
    for row in cuts[0][:-1]:
        cells = []
        for column in cuts[1][:-1]:
            inside = (
                part.file
                for part in stored.parts
                if all(
                    start <= at < start + length
                    for (start, length), at in zip(part.box, (row, column), strict=False)
                )
            )
            cells.append(f"{next(inside, '?'):^{width}}")
        lines.append(f"  {row:>8} |{'|'.join(cells)}|")
    return "\n".join(lines)
