"""`meshwright verify`: every loss, gradient, parameter and optimizer state against one device, and exit code 4."""

from __future__ import annotations

import json

import pytest
from commands import run_ranks

LAYOUT = [
    "--world-size",
    "4",
    "--degree",
    "dp=2",
    "--degree",
    "tp=2",
    "--steps",
    "3",
    "--tolerance",
    "1e-5",
    "--json",
]


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("refusing.py:small_llama", "sgd-momentum"), ("gpt2", "adamw")],
)
def test_three_steps_are_those_of_one_device(model: str, optimizer: str) -> None:
    size = ["--batch-size", "4", "--sequence-length", "16"]
    done = run_ranks(["verify", "--model", model, "--optimizer", optimizer, *LAYOUT, *size], launcher=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and report["steps"] == 3 and report["degrees"]["dp"] == report["degrees"]["tp"] == 2
    entries = report["comparisons"]
    gradients = {entry["name"] for entry in entries if entry["kind"] == "gradient"}
    parameters = {entry["name"] for entry in entries if entry["kind"] == "parameter"}
    assert gradients == parameters and len(gradients) > 10
    states = {entry["name"].rpartition("/")[2] for entry in entries if entry["kind"] == "state"}
    assert states == ({"exp_avg", "exp_avg_sq", "step"} if optimizer == "adamw" else {"momentum_buffer"})
    assert all(entry["tolerance"] <= 1e-5 for entry in entries)
    apart = {(entry["kind"], entry["step"] < 0) for entry in entries if not entry["measured"]}
    assert apart == ({("parameter", False)} if optimizer == "adamw" else set())


def test_a_model_that_is_not_the_same_everywhere_is_caught() -> None:
    arguments = [
        "verify",
        "--model",
        "refusing.py:rankish",
        "--world-size",
        "2",
        "--degree",
        "tp=2",
        "--json",
    ]
    done = run_ranks(arguments, launcher=False)
    assert done.returncode == 4, done.stderr
    report = json.loads(done.stdout)
    assert not report["ok"] and report["failures"] > 0


def test_what_differs_is_said_before_anyone_leaves() -> None:
    arguments = ["verify", "--model", "refusing.py:slow_to_say", "--world-size", "2", "--tp", "2"]
    done = run_ranks(arguments, launcher=False)
    assert done.returncode == 4 and "DIFFERENT" in done.stdout, done.stdout + done.stderr
