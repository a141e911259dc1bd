"""Names of `from_pretrained` directories: a base model inside another, and tensors that the model holds fused.

transformers itself says which stored tensors a model keeps stacked or side by side in one parameter (experts above all).
Where that is all that happens to them, they are boxes of the parameter, and are read straight into shards.
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
    """The sources under the names of a model whose base model is called `prefix`, or that is itself a base model."""
    if not prefix or any(name in wanted for name in sources):
        return dict(sources)
    dot = prefix + "."
    longer = {dot + name: source for name, source in sources.items()}
    if any(name in wanted for name in longer):
        return longer
    return {name.removeprefix(dot): source for name, source in sources.items()}


@dataclass
class _Fusion:
    """What is known of one parameter: its parts as (number of the pattern, place in the stack, source, stored name)."""

    operations: tuple[Any, ...]
    parts: list[tuple[int, int, Source, str]]


def fuse(
    sources: Mapping[str, Source], wanted: Shapes, model: nn.Module, elsewhere: Collection[str] = ()
) -> dict[str, Source]:
    """The sources with those put together that `model` holds as one parameter; what cannot be stays as it is.

    `elsewhere`: names of parameters that other stages of a pipeline hold.
    """
    model_names = wanted.keys() | set(elsewhere)
    result = {name: source for name, source in sources.items() if name in model_names}
    fusions: dict[str, _Fusion] = {}
    transforms = _transforms(model)
    for stored, source in sources.items():
        if stored in model_names:
            continue
        name = stored
        for patterns, targets, operations in transforms:
            if operations is None:
                name = re.sub(patterns[0], targets[0], name)
                continue
            match = _matched(name, patterns)
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
        whole = _put_together(fusion)
        if whole is not None and (wanted.get(name) == whole.shape or name in elsewhere):
            result[name] = whole
        else:
            result.update({stored: source for _, _, source, stored in fusion.parts})
    return result


def _transforms(model: nn.Module) -> list[tuple[list[str], list[str], tuple[Any, ...] | None]]:
    """(source patterns, target patterns, operations; None for a plain renaming) that transformers has for this model."""
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


def _matched(name: str, patterns: list[str]) -> tuple[int, int, int, int] | None:
    """(number of the pattern, the number that its star stands for, start and end of the match), or None."""
    for index, pattern in enumerate(patterns):
        text = re.escape(pattern).replace(r"\*", r"(\d{1,9})") + r"(?!\w)"
        match = re.search(text, name)
        if match:
            return index, int(match[1]) if match.re.groups else 0, match.start(), match.end()
    return None


def _put_together(fusion: _Fusion) -> Source | None:
    """The parameter as a source whose fragments are the stored tensors; None where more is done to them than laying out."""
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
