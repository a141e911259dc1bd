"""The page about the sweep: how many cases had which outcome under each plan, and what is refused, with the reason."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from .loop_cases import AREA as LOOPS
from .registry import area_of, untried
from .run import Outcome

KINDS = ("equal", "same error", "refused", "SILENT", "one rank", "hang", "internal")
HEADINGS = ("equal", "same error", "refused", "silent", "one rank", "hang", "internal")
_HEAD = """# What torch lets a user do with a model, done with a parallel one

Every public method and property of `torch.Tensor`, on parameters, gradients, optimizer states, values of a state dict, buffers,
activations and losses; every public method of `torch.nn.Module`, on the model and on a layer; `torch.nn.utils`, `torch.optim`,
`torch.amp`, `torch.autograd`, `torch.func`, `torch.serialization` and copies; what is written around a loop of training: on a
small model of one device, and on the same under a plan of two or four ranks. Compared: what is returned (whole), all parameters,
buffers, gradients and optimizer states afterwards, the state of the generator, and for modules, utilities, optimizers and loops a
step of training after it. Written by
`python -m integration_tests.border` ({cases} cases for each plan); `--only TEXT` and `--plan PLAN` choose, and write nothing.

| outcome | meaning |
|---|---|
| equal | the values of one device |
| same error | the exception of one device, on every rank |
| refused | an error of ours, on every rank |
| silent | other values or no error |
| one rank | an error on some ranks only |
| hang | a rank waits for ever, or dies |
| internal | another error than that of one device, on every rank |

"""


def page(outcomes: Iterable[Outcome]) -> str:
    """The text of docs/border.md."""
    outcomes = [each for each in outcomes if each.kind != "not tried"]
    text = _HEAD.format(cases=len({each.key for each in outcomes}))
    text += _summary(outcomes)
    text += "\n## Around the loop of training\n\n" + _by_case(outcomes)
    text += (
        "\n## What is refused\n\nBy the reason; after it the names and, if not all, the plans.\n\n"
        + _grouped(outcomes, ("refused",))
    )
    text += "\n## What is open\n\n" + (
        _grouped(outcomes, ("SILENT", "one rank", "hang", "internal")) or "Nothing.\n"
    )
    text += "\n## Not tried\n\nOne device takes none of the arguments that the sweep has for them, or they take no tensor: "
    return text + ", ".join(f"`{name}`" for name in untried()) + ".\n"


def _summary(outcomes: Sequence[Outcome]) -> str:
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for each in outcomes:
        counts[area_of(each.key), each.plan][each.kind] += 1
        counts["all", each.plan][each.kind] += 1
    rows = [f"| names | plan | {' | '.join(HEADINGS)} |", "|---|---|" + "---:|" * len(KINDS)]
    for area in dict.fromkeys(area for area, _ in counts):
        rows += [
            f"| {area} | {plan} | " + " | ".join(str(by_name[kind] or "") for kind in KINDS) + " |"
            for (named, plan), by_name in counts.items()
            if named == area
        ]
    return "\n".join(rows) + "\n"


def _by_case(outcomes: Sequence[Outcome]) -> str:
    """One line for each case, one column for each plan."""
    kinds = {(each.plan, each.key): each.kind for each in outcomes if area_of(each.key) == LOOPS}
    plans = list(dict.fromkeys(plan for plan, _ in kinds))
    rows = [f"| case | {' | '.join(plans)} |", "|---|" + "---|" * len(plans)]
    for key in dict.fromkeys(key for _, key in kinds):
        name = key.split(" | ")[0].removeprefix("loop.")
        rows.append(f"| {name} | {' | '.join(kinds.get((plan, key), '') for plan in plans)} |")
    return "\n".join(rows) + "\n"


def _grouped(outcomes: Sequence[Outcome], kinds: Sequence[str]) -> str:
    """One line for each reason."""
    plans = list(dict.fromkeys(each.plan for each in outcomes))
    names: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for each in outcomes:
        if each.kind in kinds:
            reason = (
                _general(each.reason) if kinds == ("refused",) else f"{each.kind}: {_general(each.reason)}"
            )
            names[reason][each.key.split(" | ")[0].removeprefix("Tensor.")].add(each.plan)
    lines = []
    for reason, by_name in sorted(names.items(), key=lambda pair: -len(pair[1])):
        several = set().union(*by_name.values())
        told = ", ".join(f"`{name}`" for name in by_name)
        where = (
            "" if len(several) == len(plans) else f" ({', '.join(plan for plan in plans if plan in several)})"
        )
        lines.append(f"- {reason}: {told}{where}\n")
    return "".join(lines)


def _general(reason: str) -> str:
    """The reason without what differs between cases and machines."""
    reason = re.sub(r'File "[^"]*/(packages|site-packages)/', r'File "\1/', reason)
    reason = re.sub(
        r"\[[\d, ]*\]|\(\d[\d, ]*\)|\d+(\.\d+)?(e[+-]?\d+)?", "..", reason.removeprefix("read afterwards: ")
    )
    reason = re.sub(r"`|\|", "'", reason)
    return reason if len(reason) <= 150 else reason[:147] + "..."
