"""The command line: commands come from plugins, JSON is JSON, errors are one line and an exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch._inductor import config

from meshwright import cli
from meshwright.stock_optimizers import OPTIMIZERS
from meshwright_dtensor.errors import (
    InfeasibleError,
    MeshwrightError,
    UnsupportedError,
    VerificationError,
)
from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.plugins import CommandSpec, PluginHost, Registered
from meshwright_planner.cost import operations

FIRST_PARTY = {"plan", "explain", "simulate", "trial", "verify", "demo", "plugins", "doctor"}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        printed = capsys.readouterr()
        code = exit_.value.code
        assert isinstance(code, int)
        return code, printed.out, printed.err

    return call


def plan_file(folder: Path, name: str = "plan.json", **degrees: int) -> Path:
    world_size = 1
    for degree in degrees.values():
        world_size *= degree
    strategies = {"dp": "data", "tp": "tensor"}
    plan = ParallelPlan(
        world_size=world_size, degrees=degrees, strategies={a: strategies[a] for a in degrees}
    )
    path = folder / name
    plan.save(path)
    return path


@click.command()
@click.option("--fail", type=int, default=0)
def outside(fail: int) -> int:
    """A command as a third party would write it."""
    errors: dict[int, type[MeshwrightError]] = {1: UnsupportedError, 3: InfeasibleError, 4: VerificationError}
    if fail in errors:
        raise errors[fail]("one\n  line")
    return fail


not_a_command = "text"


def only(target: str) -> PluginHost:
    record = CommandSpec(name="outside", target=target, summary="from somewhere else")
    return PluginHost({CommandSpec: {"outside": Registered(record, "acme", "1.0", "acme")}})


def test_help_lists_what_plugins_registered(run: Any) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in FIRST_PARTY)


def test_no_command_is_a_usage_error_that_helps(run: Any) -> None:
    code, out, _ = run()
    assert code == 2 and "Commands:" in out


@pytest.mark.parametrize("code", [0, 1, 3, 4])
def test_a_third_partys_command_and_its_exit_codes(
    run: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(cli, "discover", lambda: only(f"{__name__}:outside"))
    got, _, err = run("outside", "--fail", str(code))
    assert got == code
    assert err == ("" if code == 0 else "Error: one line\n")


def test_a_target_that_is_no_command(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "discover", lambda: only(f"{__name__}:not_a_command"))
    code, _, err = run("outside")
    assert code == 2 and "click.Command" in err and "acme" in err


def test_plugins_as_json(run: Any) -> None:
    code, out, err = run("plugins", "--json")
    listed = json.loads(out)
    assert code == 0 and err == ""
    assert {row["name"] for row in listed["plugins"] if row["kind"] == "command"} >= FIRST_PARTY
    assert {row["name"] for row in listed["plugins"] if row["kind"] == "strategy"} >= {"data", "tensor"}
    assert listed["problems"] == [] and listed["disabled"] == []


def test_a_plugin_that_is_turned_off_is_shown(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_DISABLE_PLUGINS", "meshwright-planner")
    code, out, _ = run("plugins", "--json")
    listed = json.loads(out)
    assert code == 0 and listed["disabled"] == ["meshwright-planner:meshwright-planner"]
    # that of the meta-package stays
    assert [row["name"] for row in listed["plugins"] if row["kind"] == "planner"] == ["trial"]


def test_doctor_reports_the_environment(run: Any) -> None:
    code, out, _ = run("doctor", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["torch"].startswith("2.13") and facts["gloo"] is True
    assert facts["ranks"] == 1 and facts["plugin problems"] == []
    assert facts["compile="] == "torch's inductor generates code here"
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        _, out, _ = run("doctor")
    assert "finds no C++ compiler here" in out


def test_doctor_measures_the_host(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("doctor", "--health", "--world-size", "1", "--folder", str(tmp_path), "--json")
    assert code == 0 and any(check["name"].startswith("disk") for check in json.loads(out)["health"])
    code, out, _ = run("doctor", "--health", "--world-size", "1", "--folder", str(tmp_path / "none"))
    assert code == 4 and "choose another folder" in out
    code, _, errors = run("doctor", "--world-size", "2")
    assert code == 2 and "--health" in errors


TWO_INPUTS = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x, y):
        return (self.layer(x) - y).pow(2).mean()


def make():
    return Model(), (torch.randn(4, 8), torch.randn(4, 4))
"""


@pytest.mark.slow
def test_doctor_calls_a_model_with_the_arguments_of_its_batch(run: Any, tmp_path: Path) -> None:
    (tmp_path / "two_inputs.py").write_text(TWO_INPUTS)
    # ranks of their own run it
    code, _, _ = run("doctor", "--model", f"{tmp_path / 'two_inputs.py'}:make", "--json")
    assert code == 0


def test_explain_and_its_json(run: Any, tmp_path: Path) -> None:
    path = plan_file(tmp_path, dp=2, tp=2)
    code, out, _ = run("explain", str(path))
    assert code == 0 and "dp 2 x tp 2 = 4 ranks" in out
    code, out, _ = run("explain", str(path), "--json")
    assert code == 0 and ParallelPlan.from_json(out) == ParallelPlan.load(path)


def test_explain_tells_plans_apart(run: Any, tmp_path: Path) -> None:
    first, second = plan_file(tmp_path, "a.json", dp=2), plan_file(tmp_path, "b.json", dp=4)
    code, out, _ = run("explain", str(first), "--diff", str(second), "--json")
    assert code == 0 and json.loads(out) == ParallelPlan.load(first).diff(ParallelPlan.load(second)) != []
    code, out, _ = run("explain", str(first), "--diff", str(first))
    assert code == 0 and out == "the plans are equal\n"


@pytest.mark.slow
def test_explain_draws_a_schedule(run: Any, tmp_path: Path) -> None:
    path, picture = tmp_path / "plan.json", tmp_path / "timeline.png"
    stages = tuple((f"layers.{stage}",) for stage in range(4))
    pipeline = PipelineRule(stages=stages, microbatches=8)
    ParallelPlan(world_size=4, degrees={"pp": 4}, pipeline=pipeline).save(path)
    code, out, _ = run("explain", str(path), "--schedule", "--png", str(picture))
    assert code == 0 and "rank 3 | .. .. .. F0 B0--- F1 B1---" in out and "bubble: 27.3% of a step" in out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    code, out, _ = run("explain", str(path), "--schedule", "--json")
    assert json.loads(out)["alive"] == [4, 3, 2, 1]
    code, _, err = run("explain", str(plan_file(tmp_path, dp=2)), "--schedule")
    assert code == 2 and "no pipeline" in err


def test_explain_checks_the_world_size(run: Any, tmp_path: Path) -> None:
    code, _, err = run("explain", str(plan_file(tmp_path, dp=2)), "--world-size", "3")
    assert code == 2 and err.startswith("Error: ") and err.count("\n") == 1
    assert "2" in err and "3" in err


@pytest.mark.parametrize(("given", "size"), [((), 2), (("--world-size", "3"), 3)])
def test_demo_starts_the_ranks_of_its_plan(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: tuple[str, ...], size: int
) -> None:
    started: list[int] = []
    monkeypatch.setattr("meshwright.ranks.launch", lambda size, arguments: started.append(size) or 0)
    code, _, err = run("demo", "--plan", str(plan_file(tmp_path, dp=2)), *given)
    assert (code, err, started) == (0, "", [size])


def test_verify_steps_with_the_optimizer_that_was_named() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2))]
    made = {name: make(weights) for name, make in OPTIMIZERS.items()}
    assert set(made) == set(operations.OPTIMIZERS)  # those that can be planned for
    assert [type(o).__name__ for o in made.values()] == ["SGD", "SGD", "Adam", "AdamW"]
    assert [made[name].defaults["momentum"] for name in ("sgd", "sgd-momentum")] == [0.0, 0.9]


@pytest.mark.parametrize("command", sorted(FIRST_PARTY))
def test_every_command_explains_itself(run: Any, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0 and "--json" in out


def test_simulate(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    path = plan_file(tmp_path, tp=2)
    assert run("simulate", str(path))[0] == 2  # no cluster, and nothing was predicted
    predicted = {"step_seconds": 3.0, "compute_seconds": 3.0, "split": {}}
    plan = ParallelPlan.load(path).replace(predicted=predicted, provenance={"cluster": "dgx-h100"})
    plan.save(path)
    trace = tmp_path / "trace.json"
    code, out, _ = run("simulate", str(path), "--straggler", "1=1.5", "--trace", str(trace), "--json")
    data = json.loads(out)
    assert code == 0 and data["sound_seconds"] == 3.0 and data["seconds"] == 4.5
    assert json.loads(trace.read_text())["traceEvents"]
    code, _, err = run("simulate", str(path), "--link-fault", "1:nvlnk=0.5")
    assert code == 2 and "did you mean 'nvlink'" in err


def test_explain_pictures(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    path, page, picture = plan_file(tmp_path, dp=2), tmp_path / "plan.html", tmp_path / "plan.png"
    predicted = {"step_seconds": 3.0, "compute_seconds": 3.0, "split": {}, "memory_bytes": {"parameters": 7}}
    ParallelPlan.load(path).replace(predicted=predicted, provenance={"cluster": "dgx-h100"}).save(path)
    code, out, _ = run("explain", str(path), "--html", str(page), "--png", str(picture), "--report", "--json")
    (data,) = json.loads(out)["plans"]
    assert code == 0 and data["seconds"]["compute"] == 3.0 and "twice as fast" in data["next_to_buy"]
    assert page.read_text().startswith("<!doctype html>") and picture.read_bytes().startswith(b"\x89PNG")
    code, _, err = run("explain", str(path), "--why-not", "tp=2")
    assert code == 2 and "give --model" in err


@pytest.mark.parametrize(("name", "end"), [("plan.foo", "'.foo'"), ("plan", "nothing")])
@pytest.mark.parametrize("more", [[], ["--schedule"]])
def test_a_picture_is_of_a_kind_that_can_be_drawn(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, name: str, end: str, more: list[str]
) -> None:
    picture = tmp_path / name
    code, _, error = run("explain", str(plan_file(tmp_path, dp=2)), "--png", str(picture), *more)
    assert code == 2 and f"--png {picture}: a name that ends in {end} says no kind of picture" in error
    assert "end it in .png, .svg, .pdf or .jpg" in error and not picture.exists()


def test_tables_are_whole_where_there_is_no_terminal(run: Callable[..., tuple[int, str, str]]) -> None:
    rows = json.loads(run("plugins", "--json")[1])["plugins"]
    lines = run("plugins")[1].splitlines()
    assert max(len(row["summary"]) for row in rows) > 80
    for row in rows:
        assert any(row["name"] in line and line.rstrip().endswith(row["summary"]) for line in lines), row


MODEL = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.up(x).relu()).pow(2).mean()


def make():
    return Model(), {"x": torch.randn(4, 16)}
"""


@pytest.mark.slow
def test_plan_compare(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    arguments = (
        "plan",
        "--model",
        f"{tmp_path / 'model.py'}:make",
        "--world-size",
        "2",
        "--compare",
        "manual",
    )
    code, out, error = run(*arguments, "--json")
    assert code == 0, error
    data = json.loads(out)["planners"]
    assert {entry["planner"] for entry in data} == {"eager", "manual"}
    assert all(entry["seconds"] > 0 and entry["plan"]["degrees"] for entry in data)
    code, _, error = run(*arguments, "-o", str(tmp_path / "plan.json"))
    assert code == 2 and "--output has no effect together with --compare" in error


@pytest.mark.slow
@pytest.mark.parametrize("command", [[], ["--compare", "manual"]])
def test_data_is_data_where_nothing_fits(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    arguments = (
        "plan",
        "--model",
        f"{tmp_path / 'model.py'}:make",
        "--world-size",
        "2",
        "--memory-limit",
        "1KiB",
    )
    code, out, error = run(*arguments, *command, "--json")
    data = json.loads(out)
    told = [entry["failure"] for entry in data["planners"]] if command else [data["reason"]]
    assert code == 3 and all(
        "fits the 1.0 KiB of each rank" in text and "Would fit:" in text for text in told
    )
    if not command:
        assert data["error"] == "InfeasibleError" and data["exit_code"] == 3
        assert error.startswith("Error: no plan for 2 ranks")
        assert run(*arguments)[:2] == (3, "")
        code, out, _ = run(*arguments[:-1], "1 KiBs", "--json")
        assert code == json.loads(out)["exit_code"] == 2 and "did you mean 'KiB'" in json.loads(out)["reason"]


def test_plan_recompute(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    arguments = ("plan", "--model", f"{tmp_path / 'model.py'}:make", "--world-size", "1", "--json")
    code, out, error = run(*arguments, "--recompute", "up")
    assert code == 0, error
    assert [rule["pattern"] for rule in json.loads(out)["recompute"]] == ["up"]
    code, _, error = run(*arguments, "--recompute", "full")
    assert code == 2 and "no repeated blocks" in error
    code, out, _ = run(*arguments)
    assert code == 0 and not json.loads(out).get("recompute")


def test_files_are_checked_before_the_work(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    nowhere = tmp_path / "missing" / "file"
    for arguments in (
        ("explain", "plan.json", "--html"),
        ("simulate", "plan.json", "--trace"),
        ("plan", "--model", "x", "-o"),
    ):
        code, _, error = run(*arguments, str(nowhere))
        assert code == 2 and f"there is no folder {nowhere.parent}" in error
    code, _, error = run("explain", "plan.json", "--schedule", "--report")
    assert code == 2 and "--report has no effect together with --schedule" in error


def test_a_path_that_no_file_can_have(run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = run("checkpoint", "inspect", "x" * 300)
    assert code == 2 and "File name too long" in error and "Traceback" not in error
