"""Load directories of transformers' `from_pretrained` directly into shards, with their key mapping.

Keys are mapped in two ways: by the prefix of the base model, and by the fused parameters of the model. transformers says
which stored tensors a model stacks or concatenates in one parameter (mostly experts). If nothing else happens to them, they
are boxes of the parameter, and are read directly into shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from meshwright_checkpoint.errors import CorruptError
from meshwright_checkpoint.format.manifest import NAME
from meshwright_checkpoint.format.safetensors_file import DTYPES, Entry, header_length, read_header
from meshwright_checkpoint.read.wanted import Fragment, ReadFile, Source
from meshwright_checkpoint.shards.write_shares import coverage_problem
from meshwright_checkpoint.state.collect import MODEL, named_tensors
from meshwright_checkpoint.storage.checkpoint import OpenFiles
from meshwright_checkpoint.storage.file_reader import Reader
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_dtensor.sharding.boxes import whole_box

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def is_pretrained(path: Path) -> bool:
    """Whether `path` is a from_pretrained directory, and not a checkpoint of meshwright."""
    return not (path / NAME).exists() and any((path / name).is_file() for name in (SINGLE, INDEX))


class Pretrained(OpenFiles):
    """An open from_pretrained directory, with the names and fused tensors of `model`. Sizes are checked; there are no checksums.

    Raises CorruptError: the index or a header is damaged.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        super().__init__()
        self._path = path
        self.where = str(path)
        try:
            entries = self._entries()
            wanted = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).tensors.items()}
            sources = {
                name: Source(
                    entry.shape,
                    DTYPES[entry.dtype],
                    (Fragment(whole_box(entry.shape), file, entry.offset),) if 0 not in entry.shape else (),
                )
                for name, (file, entry) in entries.items()
            }
            division = stages_of(model)
            elsewhere = frozenset() if division is None else frozenset(division.holders) - wanted.keys()
            prefix = getattr(model, "base_model_prefix", "")
            named_now = match_prefix(sources, wanted.keys() | elsewhere, prefix)
            self.tensors: Mapping[str, Source] = {
                MODEL + name: source for name, source in fuse(named_now, wanted, model, elsewhere).items()
            }
        except BaseException:
            self.close()
            raise

    def _entries(self) -> dict[str, tuple[str, Entry]]:
        """name -> (file, entry), of all files."""
        names = [SINGLE]
        if not (self._path / SINGLE).is_file():
            try:
                index = json.loads((self._path / INDEX).read_bytes())
                names = sorted(set(index["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                text = f"{self._path / INDEX} is not a valid index: {ascii(str(error))[:100]}"
                raise CorruptError(text) from None
        entries_by_name: dict[str, tuple[str, Entry]] = {}
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
                text = f"{self._path / INDEX} names the file {ascii(name)[:80]}; files must be next to it"
                raise CorruptError(text)
            try:
                file = self.file(name)
            except CorruptError as error:
                raise CorruptError(f"{error}; {INDEX} names it") from error
            first = bytearray(min(8, file.nbytes))
            file.read_into(memoryview(first), 0)
            head = bytearray(8 + header_length(bytes(first), file.nbytes, file.where))
            file.read_into(memoryview(head), 0)
            entries, _ = read_header(bytes(head), file.nbytes, file.where)
            entries_by_name.update({key: (name, entry) for key, entry in entries.items()})
        return entries_by_name

    def file(self, name: str) -> ReadFile:
        if name not in self._files:
            # download caches have links
            self._files[name] = Reader(self._path / name, follow=True)
        return self._files[name]


def match_prefix(sources: Mapping[str, Source], wanted: Collection[str], prefix: str) -> dict[str, Source]:
    """Add or remove the `prefix` of the base model, so that the names match those of the model."""
    if not prefix or any(name in wanted for name in sources):
        return dict(sources)
    dot = prefix + "."
    longer = {dot + name: source for name, source in sources.items()}
    if any(name in wanted for name in longer):
        return longer
    return {name.removeprefix(dot): source for name, source in sources.items()}


@dataclass
class _Fusion:
    """A fused parameter: its parts as (index of the pattern, index in the stack, source, stored name)."""

    operations: tuple[Any, ...]
    parts: list[tuple[int, int, Source, str]]


def fuse(
    sources: Mapping[str, Source],
    wanted: Mapping[str, tuple[int, ...]],
    model: nn.Module,
    elsewhere: Collection[str] = (),
) -> dict[str, Source]:
    """Join sources that `model` holds as one parameter. Sources that cannot be joined stay as they are.

    `elsewhere`: names of parameters that other stages of a pipeline hold.
    """
    model_names = wanted.keys() | set(elsewhere)
    result = {name: source for name, source in sources.items() if name in model_names}
    fusions: dict[str, _Fusion] = {}
    transforms = _conversions(model)
    for stored, source in sources.items():
        if stored in model_names:
            continue
        name = stored
        for patterns, targets, operations in transforms:
            if operations is None:
                name = re.sub(patterns[0], targets[0], name)
                continue
            matched = _match(name, patterns)
            if matched is not None and len(targets) == 1:
                pattern_index, match = matched
                target = name[: match.start()] + targets[0] + name[match.end() :]
                stack_index = int(match[1]) if match.re.groups else 0
                part = (pattern_index, stack_index, source, stored)
                fusions.setdefault(target, _Fusion(operations, [])).parts.append(part)
                break
        else:
            result[name] = source
    for name, fusion in fusions.items():
        whole = _fused_source(fusion)
        if whole is not None and (wanted.get(name) == whole.shape or name in elsewhere):
            result[name] = whole
        else:
            result.update({stored: source for _, _, source, stored in fusion.parts})
    return result


def _conversions(model: nn.Module) -> list[tuple[list[str], list[str], tuple[Any, ...] | None]]:
    """Conversions of transformers for this model: source patterns, target patterns, operations (None: only a renaming)."""
    if not hasattr(model, "base_model_prefix"):
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    return [
        (
            list(conversion.source_patterns),
            list(conversion.target_patterns),
            getattr(conversion, "operations", None) and tuple(conversion.operations),
        )
        for conversion in get_model_conversion_mapping(model)
        if getattr(conversion, "scope_prefix", None) is None
        and type(conversion).__name__ in ("WeightRenaming", "WeightConverter")
    ]


def _match(name: str, patterns: list[str]) -> tuple[int, re.Match[str]] | None:
    """The index of the first pattern that matches, and the match. Its group is the number at the star."""
    for index, pattern in enumerate(patterns):
        if match := re.search(re.escape(pattern).replace(r"\*", r"(\d{1,9})") + r"(?!\w)", name):
            return index, match
    return None


def _fused_source(fusion: _Fusion) -> Source | None:
    """The parameter as a source whose fragments are the stored tensors. None if the operations are more than stacking."""
    kinds = [type(operation).__name__ for operation in fusion.operations]
    if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"], ["Concatenate"]):
        return None
    stack = fusion.operations[0].dim if kinds[0] == "MergeModulelist" else None
    join = fusion.operations[-1].dim if kinds[-1] == "Concatenate" else None
    if any(len(source.fragments) != 1 for _, _, source, _ in fusion.parts):
        return None
    dtype = fusion.parts[0][2].dtype
    fragments: list[Fragment] = []
    size: list[int] = []
    start = 0
    for pattern_index in sorted({part[0] for part in fusion.parts}):
        length = 0
        of_pattern = (part for part in fusion.parts if part[0] == pattern_index)
        for _, stack_index, source, _ in sorted(of_pattern, key=lambda part: part[1]):
            box = list(source.fragments[0].box)
            if stack is not None:
                box.insert(stack, (stack_index, 1))
            if join is not None:
                length = box[join][1]
                box[join] = (start, length)
            fragments.append(Fragment(tuple(box), source.fragments[0].file, source.fragments[0].offset))
            size = [max(a, sum(b)) for a, b in zip(size or [0] * len(box), box, strict=True)]
            if source.dtype != dtype:
                return None
        start += length
    if coverage_problem(size, [fragment.box for fragment in fragments]):
        return None
    return Source(tuple(size), dtype, tuple(fragments))
