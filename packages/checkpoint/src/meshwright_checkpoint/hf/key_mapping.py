"""Key mapping of `from_pretrained` directories: prefixes of base models, and fused parameters.

transformers says which stored tensors a model stacks or concatenates in one parameter (mostly experts). If nothing else
happens to them, they are boxes of the parameter, and are read directly into shards.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright_checkpoint.read.wanted import Fragment, Source
from meshwright_checkpoint.shards.coverage import coverage_problem

Shapes = Mapping[str, tuple[int, ...]]


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
    sources: Mapping[str, Source], wanted: Shapes, model: nn.Module, elsewhere: Collection[str] = ()
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
            match = _match(name, patterns)
            if match is not None and len(targets) == 1:
                pattern_index, stack_index, start, end = match
                target = name[:start] + targets[0] + name[end:]
                fusions.setdefault(target, _Fusion(operations, [])).parts.append(
                    (pattern_index, stack_index, source, stored)
                )
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


def _match(name: str, patterns: list[str]) -> tuple[int, int, int, int] | None:
    """(index of the pattern, number that matches its star, start, end), or None."""
    for index, pattern in enumerate(patterns):
        text = re.escape(pattern).replace(r"\*", r"(\d{1,9})") + r"(?!\w)"
        match = re.search(text, name)
        if match:
            return index, int(match[1]) if match.re.groups else 0, match.start(), match.end()
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
        for _, stack_index, source, _ in sorted(
            (p for p in fusion.parts if p[0] == pattern_index), key=lambda p: p[1]
        ):
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
