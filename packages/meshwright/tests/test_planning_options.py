"""What commands are asked, in options: every keyword of `plan`, nothing ignored, and what a plan keeps of it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import cli
from meshwright.commands import options, plan
from meshwright.sources import resolve
from meshwright_dtensor.plan import ParallelPlan
from meshwright_planner.api import plan as plan_function
from meshwright_planner.clusters.file import write
from meshwright_planner.clusters.registry import LAPTOP_CPU
from meshwright_planner.planners.eager import EagerPlanner

Run = Callable[..., tuple[int, str, str]]

MODEL = """
import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def make():
    return Model(), {"x": torch.randn(8, 64)}


def sized(batch_size):
    return Model(), {"x": torch.randn(batch_size, 64)}


def other():
    return torch.nn.Linear(64, 2), {"input": torch.randn(8, 64)}


def huge():
    return torch.nn.Sequential(*(torch.nn.Linear(1 << 17, 1 << 17) for _ in range(4))), torch.randn(8, 1 << 17)
"""


PEAK = """
import resource, sys
from meshwright import cli

try:
    cli.main(sys.argv[1:])
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    # an editable environment has the sample plugin, which adds a mesh axis to plans
    monkeypatch.setenv("MESHWRIGHT_DISABLE_PLUGINS", "meshwright-sample-vocabulary")

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        printed = capsys.readouterr()
        code = exit_.value.code
        assert isinstance(code, int)
        return code, printed.out, printed.err

    return call


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def test_every_keyword_of_plan_has_an_option() -> None:
    keywords = {
        name
        for name, keyword in inspect.signature(plan_function).parameters.items()
        if keyword.kind is keyword.KEYWORD_ONLY
    }
    offered = {parameter.name for parameter in plan.command.params}
    assert keywords <= offered
    assert set(options.NAMES) <= offered and set(options.NAMES) <= keywords


def asked(run: Run, file: str, *more: str) -> ParallelPlan:
    code, out, error = run("plan", "--model", f"{file}:make", "--cluster", "dgx-h100", "--json", *more)
    assert code == 0, error
    return ParallelPlan.from_json(out)


PINS: dict[str, tuple[list[str], Callable[[ParallelPlan], object]]] = {
    "tp": (["--tp", "2"], lambda p: p.degree("tp") == 2),
    "degree": (["--degree", "tp=4"], lambda p: p.degree("tp") == 4),
    "zero": (["--zero", "3", "--dp", "4"], lambda p: p.zero is not None and p.zero.stage == 3),
    "zero unit": (
        ["--zero", "3", "--zero-unit", "256", "--dp", "4"],
        lambda p: p.zero.unit == 256 and "blocks of 256 elements" in p.explain(200),
    ),
    "no zero": (["--zero", "0"], lambda p: p.zero is None),
    "schedule": (
        ["--pp", "2", "--schedule", "gpipe"],
        lambda p: p.pipeline is not None and p.pipeline.schedule == "gpipe",
    ),
    "microbatches": (
        ["--pp", "2", "--microbatches", "4"],
        lambda p: p.pipeline is not None and p.pipeline.microbatches == 4,
    ),
    "compile": (["--compile", "blocks"], lambda p: [r.pattern for r in p.compile] == ["blocks.*"]),
    "random numbers": (
        ["--rng", "fast"],
        lambda p: p.rng == "fast" and p.degree("pp") == 1 and "a stream for each shard (fast)" in p.explain(),
    ),
    "compile what is faster": (
        ["--compile", "auto"],
        lambda p: (
            [r.pattern for r in p.compile] == ["blocks.*"]
            and "predicted to save" in " ".join(p.provenance.notes)
        ),
    ),
    "compile a module": (["--compile", "blocks.1"], lambda p: [r.pattern for r in p.compile] == ["blocks.1"]),
    "recompute": (["--recompute", "blocks.*"], lambda p: [r.pattern for r in p.recompute] == ["blocks.*"]),
    "precision": (
        ["--precision", "bf16"],
        lambda p: p.precision is not None and p.precision.parameters == "bf16",
    ),
    "no sequence": (["--tp", "4", "--no-sequence-parallel"], lambda p: not p.sequence_parallel),
    "rows": (["--global-batch-size", "32"], lambda p: p.provenance.batch["rows"] == 32),
    "limit": (
        ["--memory-limit", "2 GiB"],
        lambda p: p.predicted is not None and p.predicted.limit_bytes == 2 << 30,
    ),
}


@pytest.mark.parametrize("pin", PINS)
def test_pins_are_kept(run: Run, file: str, pin: str) -> None:
    arguments, holds = PINS[pin]
    answer = asked(run, file, "--world-size", "4", *arguments)
    assert holds(answer), answer.explain()
    assert answer.provenance.request


# what is asked -> what the one line says: the value, the rule, the fix
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "schedule without stages": (["--schedule", "gpipe"], ["schedule='gpipe'", "needs a pipeline", "pp"]),
    "schedule on one stage": (
        ["--schedule", "gpipe", "--pp", "1"],
        ["schedule='gpipe'", "needs a pipeline", "pp"],
    ),
    "schedule's name": (["--schedule", "1f1B", "--pp", "2"], ["'1f1B'", "did you mean '1f1b'"]),
    "microbatches": (
        ["--pp", "2", "--microbatches", "3"],
        [
            "microbatches",
            "3",
            "the 8 rows of a pipeline in a step with tp 2 cannot",
            "nearest legal: 2",
        ],
    ),
    "zero": (["--zero", "5"], ["zero=5", "1, 2 or 3", "nearest is 3"]),
    "zero unit": (
        ["--zero-unit", "rows"],
        ["zero_unit='rows'", "did you mean 'row'", "or a number of elements"],
    ),
    "zero unit of nothing": (["--zero", "0", "--zero-unit", "-4"], ["zero_unit=-4 is less than 1"]),
    "zero unit without zero": (
        ["--zero", "0", "--zero-unit", "64"],
        ["zero_unit=64 with zero=0", "leave one of them out"],
    ),
    "recompute": (["--recompute", "ful"], ["recompute='ful'", "did you mean 'full'"]),
    "recomputed module": (["--recompute", "block.0"], ["recompute='block.0'", "did you mean 'blocks.0'"]),
    "precision": (["--precision", "bf-16"], ["'bf-16'", "did you mean 'bf16'"]),
    "optimizer": (["--optimizer", "adamv"], ["'adamv'", "did you mean 'adam"]),
    "planner": (["--planner", "egaer"], ["'egaer'", "did you mean 'eager'"]),
    "cluster": (["--cluster", "dgx-h10"], ["'dgx-h10'", "did you mean 'dgx-h100'"]),
    "sequence": (
        ["--sequence-parallel", "--tp", "1"],
        ["sequence_parallel=True needs a tensor axis with a degree above 1, and tp=1 leaves it none"],
    ),
    "random numbers": (["--rng", "fats"], ["'fats'", "did you mean 'fast'"]),
    "random numbers of stages": (["--rng", "fast", "--pp", "2"], ["rng='fast' with pp=2", "leave rng out"]),
    "axis": (["--degree", "tpp=2"], ["'tpp'", "did you mean 'tp'"]),
    "degree": (["--tp", "3"], ["tp=3", "world_size 4", "the nearest is tp=2"]),
    "twice": (["--tp", "2", "--degree", "tp=4"], ["tp is already pinned", "give it once"]),
    "zero twice": (["--zero-degree", "2", "--degree", "zero=4"], ["--zero-degree 2", "give one"]),
    "limit": (["--memory-limit", "40 GiBs"], ["'GiBs'", "did you mean 'GiB'"]),
    "context": (["--context-attention", "rign"], ["'rign'", "did you mean 'ring'"]),
    "ignored rows": (["--batch-size", "16"], ["--batch-size 16", "def make(batch_size=16)"]),
    "ignored tokens": (["--sequence-length", "16"], ["--sequence-length 16", "def make(sequence_length=16)"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_options_give_one_line_errors(run: Run, file: str, case: str) -> None:
    arguments, words = REFUSED[case]
    code, _, error = run("plan", "--model", f"{file}:make", "--world-size", "4", *arguments)
    assert code == 2 and error.startswith("Error: ") and error.count("\n") == 1
    for word in words:
        assert word in error, error


@pytest.mark.slow
def test_rows_reach_a_function_that_takes_them(run: Run, file: str) -> None:
    code, out, _ = run("plan", "--model", f"{file}:sized", "--batch-size", "24", "--json")
    assert code == 0 and ParallelPlan.from_json(out).provenance.batch == {"rows": 24}


def test_explain_says_whether_it_checked(run: Run, file: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    assert asked(run, file, "--world-size", "2", "--tp", "2", "-o", path).provenance.request["tp"] == 2
    code, out, _ = run("explain", path)
    assert code == 0 and "not checked against a model: give --model" in out
    assert "asked for: cluster=dgx-h100, tp=2" in out and "planned for a batch of 8 rows" in out
    code, out, _ = run("explain", path, "--model", f"{file}:make")
    assert (
        code == 0 and "checked: the plan fits Model and a batch of 8 rows" in out and "not checked" not in out
    )
    code, out, _ = run("explain", path, "--report", "--json")
    assert json.loads(out)["checked_against"] is None
    code, out, _ = run("explain", path, "--model", f"{file}:make", "--report", "--json")
    assert json.loads(out)["checked_against"] == "Model and a batch of 8 rows"
    code, out, error = run("explain", path, "--json")
    assert code == 0 and "not checked" in error and ParallelPlan.from_json(out)
    code, _, error = run("explain", path, "--model", f"{file}:other")
    assert code == 2 and "it was made for a Model, this is a Linear" in error
    rule = {"pattern": "blocks.*.ups.weight", "placement": {"tp": "S(0)"}}
    wrong = ParallelPlan.load(path)
    wrong.replace(parameters=(rule, *wrong.parameters)).save(path)
    assert run("explain", path)[0] == 0
    code, _, error = run("explain", path, "--model", f"{file}:make")
    assert code == 2 and "blocks.*.ups.weight" in error and "blocks.0.up.weight" in error
    for arguments, message in (
        (["--batch-size", "4"], "--batch-size has no effect without --model"),
        (["--optimizer", "sgd"], "--optimizer has no effect without --why-not"),
        (["--schedule", "--model", "gpt2"], "--model has no effect together with --schedule"),
    ):
        code, _, error = run("explain", path, *arguments)
        assert code == 2 and message in error


@pytest.mark.slow
def test_why_not_keeps_what_the_plan_was_asked_for(run: Run, file: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    arguments = (
        "--world-size",
        "4",
        "--dp",
        "2",
        "--memory-limit",
        "1GiB",
        "--precision",
        "bf16",
        "-o",
        path,
    )
    asked(run, file, *arguments, "--optimizer", "sgd")
    why = ("explain", path, "--model", f"{file}:make", "--why-not")
    code, out, error = run(*why, "zero=3")
    assert code == 0, error
    assert out.startswith(
        "zero=3 (with optimizer=sgd, precision=bf16, memory_limit=1073741824, dp=2, as the plan was"
    )
    code, out, _ = run(*why, "tp=4", "--json")  # dp=2 leaves no ranks for it
    answer = json.loads(out)
    assert code == 0 and answer["verdict"] == "illegal" and answer["kept"]["dp"] == 2
    code, out, _ = run(*why, "dp=4", "--json")  # a pin that is asked about gives way
    answer = json.loads(out)
    assert code == 0 and answer["verdict"] in ("slower", "faster") and "dp" not in answer["kept"]
    code, out, _ = run(*why, "dp=4", "--memory-limit", "10kB", "--json")
    assert json.loads(out)["verdict"] == "infeasible" and json.loads(out)["kept"]["memory_limit"] == 10_000
    code, _, error = run(
        "explain", path, "--model", f"{file}:sized", "--batch-size", "4", "--why-not", "dp=4"
    )
    assert code == 2 and "made for {'rows': 8}" in error and "has 4 rows" in error
    code, _, error = run(*why, "schedul=gpipe")
    assert code == 2 and "did you mean 'schedule'" in error


def test_each_why_not_is_answered(run: Run, file: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked(run, file, "--world-size", "2", "--tp", "2", "-o", str(path))
    ask = ("explain", str(path), "--model", f"{file}:make", "--why-not", "tp=2", "--why-not", "dp=2,zero=1")
    code, out, error = run(*ask)
    assert code == 0, error
    assert next(line.partition(" ")[0] for line in out.splitlines() if "tp=2" in line) == "tp=2:"
    assert "\ndp=2, zero=1" in out
    answers = json.loads(run(*ask, "--json")[1])
    assert [answer["asked"] for answer in answers] == ["tp=2", "dp=2, zero=1"] and answers[0][
        "verdict"
    ] == "chosen"
    code, out, error = run(*ask, "--why-not", "foo=3")
    assert code == 2 and not out
    for word in ("--why-not foo=3: there is no such option", "pp, dp, cp, ep, tp", "one of zero,"):
        assert word in error


def test_a_pinned_degree_is_named_and_what_would_be_without_it(run: Run, file: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    asked(run, file, "--world-size", "2", "--tp", "2", "--optimizer", "sgd", "-o", path)
    why = ("explain", path, "--model", f"{file}:make", "--why-not")
    code, out, error = run(*why, "pp=2")
    assert code == 0, error
    pinned, free = out.splitlines()
    assert pinned.startswith(
        "pp=2 (with optimizer=sgd, tp=2, as the plan was requested): illegal: the plan was requested"
    )
    assert (
        "requested with tp=2, and pp 2 x tp 2 needs 4 ranks, or a multiple, but there are 2: plan again"
        in pinned
    )
    assert free.startswith("pp=2 (with optimizer=sgd, as the plan was requested) (without tp=2, which")
    assert "slower: the best plan with it is" in free or "faster: " in free
    code, out, _ = run(*why, "pp=2", "--json")
    answer = json.loads(out)
    assert (
        code == 0 and answer["verdict"] == "illegal" and answer["kept"]["tp"] == 2 and answer["dropped"] == {}
    )
    assert answer["free"]["dropped"] == {"tp": 2} and answer["free"]["step_seconds"] > 0
    # the negative control: a degree that leaves ranks for the pin is answered at once
    asked(run, file, "--world-size", "4", "--tp", "2", "--optimizer", "sgd", "-o", path)
    code, out, _ = run(*why, "pp=2", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["free"] is None and answer["verdict"] in ("chosen", "slower", "faster")


GIVES_WAY: dict[str, tuple[list[str], str, dict[str, object]]] = {
    "schedule": (["--pp", "2", "--schedule", "gpipe", "--microbatches", "4"], "pp=1", {"schedule": "gpipe", "microbatches": 4}),
    "zero degree": (["--dp", "4", "--zero-degree", "2"], "zero=0", {"zero_degree": 2}),
    "zero unit": (["--dp", "4", "--zero", "2", "--zero-unit", "64"], "zero=0", {"zero_unit": 64}),
    "zero": (["--zero", "0", "--dp", "4"], "zero_degree=2", {"zero": 0}),
}  # fmt: skip


@pytest.mark.parametrize("case", GIVES_WAY)
def test_why_not_drops_pins_that_contradict_the_question(
    run: Run, file: str, tmp_path: Path, case: str
) -> None:
    pins, question, dropped = GIVES_WAY[case]
    path = str(tmp_path / "plan.json")
    asked(run, file, "--world-size", "4", *pins, "-o", path)
    why = ("explain", path, "--model", f"{file}:make", "--why-not", question)
    code, out, error = run(*why, "--json")
    assert code == 0, error
    answer = json.loads(out)
    assert answer["verdict"] in ("slower", "faster"), answer
    assert answer["dropped"] == dropped and not set(dropped) & set(answer["kept"])
    code, out, _ = run(*why)
    name, value = next(iter(sorted(dropped.items())))
    assert f"without {name}={value}" in out


def test_what_contradicts_itself_is_not_searched(
    run: Run, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "plan.json")
    asked(run, file, "--world-size", "4", "--pp", "1", "-o", path)
    monkeypatch.setattr(EagerPlanner, "plan", None)  # not called
    question = ("--why-not", "schedule=gpipe", "--json")
    code, out, error = run("explain", path, "--model", f"{file}:make", *question)
    assert code == 0, error
    assert json.loads(out)["verdict"] == "illegal" and "needs a pipeline" in json.loads(out)["reason"]


def test_why_not_takes_the_batch_of_the_plan(run: Run, file: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    model = ("--model", f"{file}:sized")
    assert run("plan", *model, "--batch-size", "24", "--world-size", "2", "-o", path)[0] == 0
    code, out, error = run("explain", path, *model, "--why-not", "zero=3", "--json")
    assert code == 0 and json.loads(out)["verdict"] in ("chosen", "slower"), error
    code, out, _ = run("explain", path, *model)
    assert code == 0 and "a batch of 24 rows" in out


def test_a_strategy_that_is_not_there(run: Run, file: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked(run, file, "--world-size", "2", "--tp", "2", "-o", str(path))
    path.write_text(path.read_text().replace('"tp": "tensor"', '"tp": "tensro"'))
    code, _, error = run("explain", str(path))
    assert code == 2 and "there is no strategy named 'tensro'; did you mean 'tensor'?" in error


def test_a_model_without_values_is_planned_as_one_with_them(run: Run, file: str) -> None:
    answer = asked(run, file, "--world-size", "4")
    model, batch = resolve(f"{file}:make").build()
    best = plan_function(model, batch, cluster="dgx-h100", world_size=4, top_k=plan.COMPARED)
    assert isinstance(best, list) and answer == best[0]


@pytest.mark.slow
def test_planning_takes_no_memory_for_parameters(file: str) -> None:
    """256 GiB of parameters, planned in a process that never holds one of them."""
    command = [sys.executable, "-c", PEAK, "plan", "--model", f"{file}:huge", "--world-size", "16"]
    done = subprocess.run(
        [*command, "--cluster", "dgx-h100", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 3), done.stderr
    assert int(done.stderr.rpartition("peak ")[2]) * 1024 < 1 << 30


ALONE: dict[str, tuple[list[str], list[str]]] = {
    "trial of other rows": (
        ["plan", "--trial", "2", "--global-batch-size", "32", "--model", "gpt2"],
        ["--global-batch-size 32", "--trial runs the batch itself", "--batch-size 32"],
    ),
    "planner that tries other rows": (
        ["plan", "--planner", "trial", "--global-batch-size", "32", "--model", "{file}:make"],
        ["global_batch_size=32", "8 rows", "leave global_batch_size out"],
    ),
    "verify of other rows": (
        ["verify", "--global-batch-size", "32", "--model", "gpt2"],
        ["--global-batch-size 32", "--batch-size 32"],
    ),
    "cluster with diff": (
        ["explain", "a", "--diff", "b", "--cluster", "dgx-h100"],
        ["--cluster has no effect together with --diff"],
    ),
    "cluster with schedule": (
        ["explain", "a", "--schedule", "--cluster", "dgx-h100"],
        ["--cluster has no effect together with --schedule"],
    ),
    "seed with saved": (
        ["trial", "a", "--saved", "b", "--seed", "0"],
        ["--seed has no effect together with --saved"],
    ),
}


@pytest.mark.parametrize("case", ALONE)
def test_nothing_is_asked_for_in_vain(run: Run, file: str, case: str) -> None:
    arguments, words = ALONE[case]
    code, _, error = run(*(parameter.format(file=file) for parameter in arguments))
    assert code == 2 and error.startswith("Error: ") and error.count("\n") == 1
    for word in words:
        assert word in error, error


def test_a_plan_names_the_cluster_of_a_file_and_not_the_file(run: Run, file: str, tmp_path: Path) -> None:
    machine, path = tmp_path / "machine.json", str(tmp_path / "plan.json")
    write(replace(LAPTOP_CPU, name="mine"), machine)
    asked(run, file, "--world-size", "2", "--cluster", str(machine), "-o", path)
    plan = json.loads(Path(path).read_text())
    assert plan["provenance"]["request"]["cluster"] == plan["provenance"]["cluster"] == "mine"
    assert str(tmp_path) not in Path(path).read_text()
    why = ("explain", path, "--model", f"{file}:make", "--why-not", "tp=2")
    code, _, error = run(*why)
    assert code == 2 and "cluster is not installed" in error and "give --cluster" in error
    code, _, error = run(*why, "--cluster", str(machine))
    assert code == 0, error
