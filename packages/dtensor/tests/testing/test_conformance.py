"""The conformance suite passes what is right, and names what is wrong, the rule and the fix. Each broken plugin breaks one rule."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_distributions import install

from meshwright_dtensor.devices import replaced
from meshwright_dtensor.devices.cpu import Cpu
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plugins import (
    DeviceSpec,
    OpRuleSpec,
    PlannerSpec,
    PluginHost,
    Registered,
    ScheduleSpec,
    StrategySpec,
    discover,
)
from meshwright_dtensor.testing.conformance import (
    devices,
    distributions,
    op_rules,
    planners,
    schedules,
    strategies,
)
from meshwright_dtensor.testing.conformance.report import Check, Nonconformance, NotChecked, Tools
from meshwright_dtensor.testing.conformance.selection import chosen
from meshwright_dtensor.testing.rank_pool import RankPool

pytestmark = pytest.mark.host("plugins and their checks")

EXAMPLES = "broken_plugins:examples"


def registered(kind: str, target: str, examples: str = EXAMPLES) -> Registered[Any]:
    """A record of the module next to this one."""
    target = f"broken_plugins:{target}"
    records: dict[str, Callable[[], Any]] = {
        "strategy": lambda: StrategySpec(name="acme", axis="acme", target=target),
        "schedule": lambda: ScheduleSpec(name="acme", target=target),
        "planner": lambda: PlannerSpec(name="acme", target=target),
        "op rule": lambda: OpRuleSpec(name="acme", target=target, examples=examples),
    }
    return Registered(records[kind](), "acme-plugins", "1.0", "acme")


def no_ranks() -> RankPool:
    raise NotChecked("no ranks in this test")


def tools_with(*plugins: Registered[Any]) -> Tools:
    """A host of these plugins alone."""
    kinds: dict[Any, dict[str, Registered[Any]]] = {}
    for plugin in plugins:
        kinds.setdefault(type(plugin.record), {})[plugin.name] = plugin
    return Tools(PluginHost(kinds), no_ranks, "")


def first_failure(plugin: Registered[Any], checks: tuple[Check, ...], tools: Tools) -> str:
    """The sentence of the first check that fails; "" if none does. What needs ranks is tried in integration_tests."""
    for check in checks:
        if check.__name__ == "check_on_ranks":
            continue
        try:
            check(plugin, tools)
        except NotChecked:
            continue
        except Nonconformance as error:
            return str(error)
    return ""


CHECKS = {
    "strategy": strategies.CHECKS,
    "schedule": schedules.CHECKS,
    "planner": planners.CHECKS,
    "op rule": op_rules.CHECKS,
}


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("strategy", "GoodStrategy"),
        ("schedule", "GoodSchedule"),
        ("planner", "GoodPlanner"),
        ("op rule", "GOOD_RULES"),
    ],
)
def test_what_is_right_passes(kind: str, target: str) -> None:
    tools = tools_with(registered("strategy", "GoodStrategy"))
    assert first_failure(registered(kind, target), CHECKS[kind], tools) == ""


BROKEN = [
    ("strategy", "NoStrategy", "does not derive from Strategy", "write class NoStrategy(Strategy)"),
    ("strategy", "Missing", "is not there", "correct the target"),
    ("strategy", "WithoutDegrees", "does not define degrees", "add it"),
    ("strategy", "OtherName", "OtherName.name is 'emca', and its record says 'acme'", "set name = 'acme'"),
    ("strategy", "OtherAxis", "its class has axis 'emca', its record 'acme'", "set axis = 'acme'"),
    ("strategy", "UnknownGradient", "gradient is 'partial'", 'set "complete" if autograd gives'),
    ("strategy", "ThreeRanks", "has 3, which does not divide the 1 ranks", "return divisors"),
    ("strategy", "AlwaysOn", "is [2]", "with 1 among them"),
    ("strategy", "RaisingDegrees", "raised KeyError: 'sequence'", "return the legal degrees"),
    ("strategy", "CostOfOne", "cost(request, 1, link) is 1 s", "return StrategyCost() where degree == 1"),
    ("strategy", "NotFinite", "exposed_seconds=nan", "give a finite number of 0 or more seconds"),
    ("strategy", "RandomCost", "two calls of cost(request, 2, link) differ", "depend on its arguments alone"),
    ("strategy", "UnknownCollective", "a collective with kind='broadcast'", "use the kinds all_reduce"),
    ("strategy", "NoSuchDim", "'wte.weight', (24, 16), plan, 2) is 2", "return a tensor dim of 0..1, or 'X'"),
    ("strategy", "CompleteGradient", "is 'I'", "or 'X': replicated, with gradient = 'deferred'"),
    ("strategy", "IgnoresThePlan", "and parameter_state() is 'X'", "call planned_state"),
    ("schedule", "GoodStrategy", "does not derive from Schedule", "from meshwright_dtensor.schedule"),
    ("schedule", "WithoutBackward", "B0 of stage 0 is missing", "every forward needs its backward"),
    ("schedule", "BackwardFirst", "would hang: rank", "move that action forward"),
    (
        "schedule",
        "RefusesAll",
        "it refuses every pipeline",
        "let refusal(shape) return None where it can run",
    ),
    ("schedule", "RefusesSilently", "returned False", "return a sentence"),
    (
        "schedule",
        "FirstRankOnly",
        "to the ranks [0, 0]",
        "give each of the ranks 0..1 as many stages, here 1",
    ),
    ("schedule", "NoStages", "stages_each is 0", "at least 1"),
    ("planner", "FourRanks", "4 ranks", "let the product of the degrees be request.world_size"),
    ("planner", "UnknownAxis", "a plan is not valid: plan field", "axes of installed strategies alone"),
    ("planner", "TooMany", "returned 5 plans for top_k=3", "return at most request.top_k plans"),
    ("planner", "NoList", "returned ParallelPlan(", "return a list of at least one ParallelPlan"),
    ("planner", "ChangesTheModel", "plan() changed mode", "work on a copy"),
    ("planner", "IgnoresMemory", "with memory_limit=1024 bytes plan() returned", "raise InfeasibleError"),
    ("planner", "RaisesMemoryError", "raised MemoryError: does not fit", "errors.InfeasibleError"),
    ("op rule", "WRONG_VALUES", "the row ('P', 'P') -> ('P',) of op aten.mul", "leave that row out"),
    (
        "op rule",
        "WRONG_COUNT",
        "yields ((0,), (0,)), and the op has 2 tensor inputs",
        "yield (states of the tensor",
    ),
    (
        "op rule",
        "WRONG_STATE",
        "yields state 'S' for a tensor of shape (6, 4)",
        "'R', 'P' or the number of a dim",
    ),
    ("op rule", "NO_ROWS", "no example has a row for aten.mul that shards anything", "yield rows with a dim"),
    ("op rule", "NO_SUCH_OP", "there is no op 'aten.mull' (did you mean aten.mul", "write 'namespace.op'"),
    (
        "op rule",
        "NOT_CALLED",
        "no example calls aten.sub",
        "yield a call of aten.sub in broken_plugins:examples",
    ),
    ("op rule", "NO_MAPPING", "its target has a int", "make it a mapping of op names to rules"),
]


@pytest.mark.parametrize(
    ("kind", "target", "wrong", "fix"), BROKEN, ids=[target for _, target, _, _ in BROKEN]
)
def test_a_broken_plugin_fails_with_a_sentence(kind: str, target: str, wrong: str, fix: str) -> None:
    tools = tools_with(registered("strategy", "GoodStrategy"))
    text = first_failure(registered(kind, target), CHECKS[kind], tools)
    assert text.startswith(
        (f"{kind} 'acme' of acme-plugins", f"{kind} 'acme': ", "schedule 'acme' would hang")
    ), text
    assert wrong in text and fix in text[text.index(wrong) :], text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("examples", "wrong"),
    [("", "its record names no examples"), ("broken_plugins:no_calls", "its examples are")],
)
def test_rules_need_examples(examples: str, wrong: str) -> None:
    text = first_failure(registered("op rule", "GOOD_RULES", examples), op_rules.CHECKS, tools_with())
    assert wrong in text and "give the record examples=" in text


def test_rows_are_compared_on_real_ranks(rank_pool: RankPool) -> None:
    """Rows that pass one by one are compared on two ranks too."""
    plugin = registered("op rule", "GOOD_RULES")
    tools = Tools(PluginHost({}), lambda: rank_pool, "")
    op_rules.check_on_ranks(plugin, tools)


def test_the_core_alone_skips_what_needs_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(NotChecked, match="needs meshwright-pipeline, which is not installed: pip install"):
        schedules.check_on_ranks(registered("schedule", "GoodSchedule"), tools_with())
    with pytest.raises(NotChecked, match="meshwright-planner, which is not installed"):
        strategies.check_on_ranks(registered("strategy", "GoodStrategy"), tools_with())
    with pytest.raises(NotChecked, match="meshwright-parallel, which is not installed"):
        planners.check_on_ranks(registered("planner", "GoodPlanner"), tools_with())


def test_plugins_are_chosen_by_distribution_entry_point_or_record() -> None:
    host = tools_with(registered("strategy", "GoodStrategy"), registered("schedule", "GoodSchedule")).host
    for name in ("acme_plugins", "acme", "Acme"):
        assert len(chosen(host, [name])[0]["acme-plugins"]) == 2
    assert len(chosen(host, [])[0]["acme-plugins"]) == 2
    with pytest.raises(UsageError, match=r"--plugin acne: no installed plugin .* did you mean 'acme'\?"):
        chosen(host, ["acne"])


def test_a_plugin_module_that_imports_torch_is_named() -> None:
    with pytest.raises(Nonconformance, match=r"its plugin module imports torch.*import torch in the modules"):
        distributions.check_import("acme-plugins", 3, "")
    with pytest.raises(Nonconformance, match=r"in a new process \(ValueError: no\); correct that"):
        distributions.check_import("acme-plugins", 1, "Traceback\nValueError: no")


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """The whole command, over a distribution whose schedule hangs and whose module declares no hook API."""
    source = """
        from meshwright_dtensor.plugins import ScheduleSpec
        @hookimpl
        def meshwright_schedules():
            yield ScheduleSpec(name="acme", target="broken_plugins:BackwardFirst")
        """
    install(tmp_path, "acme-plugins", {"acme": "acme_plugin"}, {"acme_plugin": source})
    folders = (str(tmp_path), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    suite = ("-q", "-p", "no:cacheprovider", "--pyargs", "meshwright_dtensor.testing.conformance")

    def run(name: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", *suite, "-k", "not on_ranks", "--plugin", name]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    status, text = run("acme-plugins")
    assert status == 1 and "2 failed, 3 passed" in text, text
    assert "does not say which hook API it is written for; add the line meshwright_hook_api = " in text
    assert "schedule 'acme' would hang" in text and "move that action forward" in text
    status, text = run("acne-plugins")
    assert status not in (0, 1) and "did you mean 'acme-plugins'?" in text, text


class _NoDevices(Cpu):
    def count(self) -> int:
        return 0


class _Elsewhere(Cpu):
    def select(self, index: int) -> torch.device:
        return torch.device("meta")


class _OtherNumbers(Cpu):
    def generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator()


class _NoBackend(Cpu):
    def backend(self) -> str | None:
        return "glue"


class _OtherBackend(Cpu):
    def start_backend(self) -> str:
        return "mpi"


class _FewBytes(Cpu):
    def pinned(self, nbytes: int, index: int | None) -> torch.Tensor | None:
        return torch.empty(nbytes // 4, dtype=torch.float32)


class _MoreThanAll(Cpu):
    def free_and_total(self, index: int) -> tuple[int, int] | None:
        return 2, 1


@pytest.mark.parametrize(
    ("record", "wrong", "fix"),
    [
        (_NoDevices, "count() is 0 where available() is True", "return at least 1"),
        (_Elsewhere, "select(0) returned device(type='meta')", "return torch.device(name, index)"),
        (_OtherNumbers, "torch.rand there does not advance generator()", "that operations there draw from"),
        (_NoBackend, "backend() is 'glue', which torch does not know", "register a backend"),
        (_OtherBackend, "start_backend() is 'mpi' and backend() is 'gloo'", "with that backend"),
        (_FewBytes, "is [1024] of torch.float32 on cpu", "return uint8 memory"),
        (_MoreThanAll, "free_and_total(0) is (2, 1)", "return (free, total)"),
    ],
)
def test_a_broken_device_is_named(record: type[Cpu], wrong: str, fix: str) -> None:
    plugin = discover().get(DeviceSpec, "cpu")
    assert first_failure(plugin, devices.CHECKS, tools_with()) == ""
    with replaced(record()):
        told = first_failure(plugin, devices.CHECKS, tools_with())
    assert wrong in told and fix in told
