"""Cases on the ranks of one plan: each on one device and in parallel, with one line for the parent when it is done."""

from __future__ import annotations

import faulthandler
import json
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.stages.whole_model import own_tensors

from .cases import Case
from .judge import difference, plain
from .registry import case_of
from .subjects import Subject, subject, tensors

SECONDS = 8.0
"""A case that takes longer hangs."""


@dataclass(frozen=True)
class Outcome:
    """Of a case under a plan.

    kind: "equal", "refused" (our error on every rank), "same error", "not tried" (one device refuses it, with these arguments),
    "SILENT" (other values, or no error), "internal" (an error that is not ours), "one rank" (it raises on some ranks), "hang".
    """

    plan: str
    key: str
    kind: str
    reason: str = ""


@dataclass
class _Told:
    """What a call gave: a value, or the error."""

    value: Any = None
    error: BaseException | None = None

    @property
    def text(self) -> str:
        return " ".join(f"{type(self.error).__name__}: {self.error}".split()) if self.error else ""

    def described(self) -> tuple[str, bool, str]:
        """The error as text, whether it is ours, and its class."""
        return self.text, isinstance(self.error, MeshwrightError), type(self.error).__name__


def run_cases(rank: int, size: int, plan: str, keys: Sequence[str], folder: str) -> None:
    """Write a line to `folder`/`plan`-results when a case begins, and its outcome when it ends."""
    warnings.simplefilter("ignore")
    ranks = Ranks(plan)
    with (
        open(Path(folder, f"{plan}-{rank}-stack"), "w") as stack,
        open(Path(folder, f"{plan}-{rank}"), "a") as lines,
    ):
        for key in keys:
            stack.seek(0)
            stack.truncate()
            print(json.dumps({"key": key}), file=lines, flush=True)
            faulthandler.dump_traceback_later(SECONDS, exit=True, file=stack)
            outcome = ranks.outcome(case_of(key))
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps(asdict(outcome)), file=lines, flush=True)


class Ranks:
    """The two models, which are made again once a case has changed one of them."""

    def __init__(self, plan: str) -> None:
        self.plan = plan
        self.group = dist.new_group()
        self.kept: dict[str, tuple[Subject, Subject, list[Any], list[Any]]] = {}

    def outcome(self, case: Case) -> Outcome:
        kind, reason = self._judge(case)
        return Outcome(self.plan, case.key, kind, reason)

    def agreed(self, mine: Any) -> list[Any]:
        """What every rank has, by a group of its own: a rank that still runs the case is waited for."""
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine, group=self.group)
        return told

    def _judge(self, case: Case) -> tuple[str, str]:
        if case.setup not in self.kept:
            models = [subject(self.plan, case.setup, many) for many in (False, True)]
            self.kept[case.setup] = (*models, *(_locals(each) for each in models))  # type: ignore[assignment]
        single, parallel, single_before, parallel_before = self.kept[case.setup]
        wanted = _attempt(case, single, lambda value: plain(value))
        end = _generators()
        got = _attempt(case, parallel, lambda value: value)
        ends = _generators()
        errors = self.agreed(got.described())
        if any(text for text, _, _ in errors):
            self.kept.pop(case.setup)
            return self._of_errors(errors, wanted)
        if wanted.error is not None:
            self.kept.pop(case.setup)
            if " | " in case.form:
                return "not tried", wanted.text[:200]
            return "SILENT", f"no error, where one device has {wanted.text}"[:300]
        told, errors = self._differences(lambda: self._result(case, got.value, wanted.value))
        if not any(errors):
            same = [_same(_locals(single), single_before), _same(_locals(parallel), parallel_before)]
            if not all(flag for each in self.agreed(same) for flag in each):
                self.kept.pop(case.setup)
                more, errors = self._differences(
                    lambda: difference(plain(tensors(parallel)), plain(tensors(single)))
                )
                told += [f"afterwards: {each}" for each in more]
        else:
            self.kept.pop(case.setup)
        if any(errors):
            return self._of_errors(errors, wanted, "read afterwards: ")
        told += [each for each in self.agreed("" if end == ends else "other state of the generator") if each]
        return ("SILENT", told[0]) if told else ("equal", "")

    @staticmethod
    def _result(case: Case, value: Any, wanted: Any) -> str:
        values = plain(value)
        return _typed(values, wanted) if case.typed else difference(values, wanted)

    def _differences(self, compare: Callable[[], str]) -> tuple[list[str], list[Any]]:
        """What the ranks say, and the errors in it, one for each rank, or none."""
        mine = _Told()
        try:
            mine.value = compare()
        except Exception as error:
            mine.error = error
        both = self.agreed((mine.value, mine.described()))
        errors = [error for _, error in both]
        return [words for words, _ in both if words], errors if any(text for text, _, _ in errors) else []

    def _of_errors(self, errors: list[Any], wanted: _Told, where: str = "") -> tuple[str, str]:
        text = next(text for text, _, _ in errors if text)
        if not all(text for text, _, _ in errors):
            at = [i for i, (text, _, _) in enumerate(errors) if text]
            return "one rank", f"{where}only rank {at[0]}: {text}"[:400]
        if all(ours for _, ours, _ in errors):
            return "refused", where + text
        if wanted.error is not None and all(kind == type(wanted.error).__name__ for _, _, kind in errors):
            return "same error", text[:200]
        other = next(text for text, ours, _ in errors if not ours)
        return "internal", f"{where}{other}{'; one device: ' + wanted.text if wanted.error else ''}"[:400]


def _attempt(case: Case, made: Subject, read: Callable[[Any], Any]) -> _Told:
    torch.manual_seed(5)
    random.seed(5)
    told = _Told()
    try:
        value = case.run(made)
        if case.trains:
            value = [value, made.step(), made.activation()]
        told.value = read(value)
    except Exception as error:
        told.error = error
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    return told


def _typed(values: Any, wanted: Any) -> str:
    return "" if type(values) is type(wanted) else f"{type(values).__name__} for {type(wanted).__name__}"


def _generators() -> tuple[bytes, Any]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def _locals(made: Subject) -> list[Any]:
    """This rank's parts, copied, with what can be metadata of each tensor without communication."""
    values: list[Any] = []
    with torch.no_grad():
        for name, x in tensors(made).items():
            if not isinstance(x, Tensor):
                values.append((name, x))
                continue
            metadata = (name, tuple(x.shape), x.dtype, x.requires_grad)
            with own_tensors([x]) as mine:
                local = mine[0] if mine else torch.empty(0)
                local = local.to_local() if hasattr(local, "to_local") else local
                values.append((*metadata, local.detach().clone()))
    return values


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(
        len(a) == len(b)
        and a[:-1] == b[:-1]
        and (torch.equal(a[-1], b[-1]) if len(a) == 5 else a[-1] is b[-1])
        for a, b in zip(now, before, strict=True)
    )
