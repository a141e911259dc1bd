"""The outcomes as a page of docs/."""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version

from .judge import KINDS, Outcome, on_shards

TEXT = {
    "equal": "as on one device: values, gradients, shapes, dtypes, written objects, errors, random numbers",
    "refused": "refused by one of our errors on every rank, where one device has a result",
    "silent": "other values than one device, or no error where it raises",
    "internal": "an exception that is not one of ours",
    "hang": "ranks wait for each other for ever",
    "crash": "a rank dies",
}


def tally(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Kind -> how many cases."""
    return Counter(outcome.kind for outcome in outcomes)


def sharded(outcomes: Iterable[Outcome]) -> set[str]:
    """Operators that ran on shards, without gathering an input, in some layout."""
    return {o.op for o in outcomes if on_shards(o)}


def can_shard(outcomes: Iterable[Outcome]) -> set[str]:
    """Operators of which some input was sharded in a case that one device runs."""
    return {o.op for o in outcomes if o.sharded}


def page(names: Sequence[str], outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """The whole of docs/operators.md, from the outcomes of each mesh."""
    all_outcomes = [outcome for of_mesh in outcomes.values() for outcome in of_mesh]
    possible, local = can_shard(all_outcomes), sharded(all_outcomes)
    lines = [
        "# Operators",
        "",
        "Every operator of torch's own test database (`torch.testing._internal.common_methods_invocations.op_db`) on tensors",
        "of a mesh, compared with plain torch on one device: the function, the method, the in-place form and `out=`; activations,",
        "parameters and stored values (gradients, optimizer states); whole, sharded on every dim, partial, in mixtures, uneven,",
        "not contiguous. Inputs are float64 where it is possible. Written by `python -m integration_tests.operators`.",
        "",
        f"{datetime.datetime.now(tz=datetime.UTC).date()}; torch {version('torch')}, Python {platform.python_version()}, CPU, "
        f"gloo. {len(names)} operators.",
        "",
        "| outcome | " + " | ".join(f"mesh {mesh}" for mesh in outcomes) + " | meaning |",
        "|---|" + "---|" * (len(outcomes) + 1),
    ]
    counts = {mesh: tally(of_mesh) for mesh, of_mesh in outcomes.items()}
    lines += [
        f"| {kind} | " + " | ".join(str(counts[mesh][kind]) for mesh in outcomes) + f" | {TEXT[kind]} |"
        for kind in KINDS
    ]
    lines += [
        "",
        f"{len(local)} of the {len(possible)} operators with an input that can be sharded, {_percent(local, possible)},",
        "run on shards in some layout: by the communication log, no input is gathered.",
        "",
        "## Run on gathered values in every layout",
        "",
        ", ".join(f"`{name}`" for name in names if name in possible - local) or "None.",
        "",
    ]
    for kind in KINDS[1:]:
        lines += _section(
            kind, [(mesh, o) for mesh, of_mesh in outcomes.items() for o in of_mesh if o.kind == kind]
        )
    return "\n".join(lines).rstrip() + "\n"


def _section(kind: str, members_of_kind: Sequence[tuple[str, Outcome]]) -> list[str]:
    """A table of one kind: the first case of each operator and reason."""
    if not members_of_kind:
        return []
    groups: dict[tuple[str, str], list[tuple[str, Outcome]]] = {}
    for mesh, outcome in members_of_kind:
        groups.setdefault((outcome.op, outcome.reason[:60]), []).append((mesh, outcome))
    lines = [f"## {kind.capitalize()}", "", "| operator | cases | first case | reason |", "|---|---|---|---|"]
    for (op, _), members in groups.items():
        mesh, first = members[0]
        lines.append(f"| {op} | {len(members)} | mesh {mesh}, {first.case} | {_cell(first.reason)} |")
    return [*lines, ""]


def _percent(part: set[str], whole: set[str]) -> str:
    return f"{100 * len(part & whole) / max(len(whole), 1):.1f} %"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:240]
