"""A part of the architectures, planned: all of them with python -m integration_tests.architectures.planning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .catalogue import Architecture, architectures
from .planning import main, plan_architecture

EVERY = 37
"""One in so many, across tasks and families."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", architectures()[::EVERY], ids=lambda each: each.name)
def test_an_architecture_is_planned(architecture: Architecture) -> None:
    planned = plan_architecture(architecture)
    if planned.kind in ("not built", "not trained"):
        pytest.skip(planned.text)
    assert planned.kind == "planned", planned.text


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, arguments = tmp_path / "planned.jsonl", ["--only", "GPT2LMHead", "--only", "ResNetForImage"]
    done = {"kind": "failed", "text": "as it was then", "seconds": 7.0, "peak": 3 * 2**30}
    store.write_text(json.dumps({"name": "GPT2LMHeadModel", **done}) + "\n")
    assert main([*arguments, "--store", str(store)]) == 1
    out = capsys.readouterr().out
    assert "planned     ResNetForImageClassification" in out and "planned     GPT2LMHeadModel" not in out
    assert "slowest GPT2LMHeadModel 7.0 s; peak memory 3.00 GiB" in out
    assert "failed: GPT2LMHeadModel: as it was then" in out
    assert [json.loads(line)["name"] for line in store.read_text().splitlines()] == [
        "GPT2LMHeadModel",
        "ResNetForImageClassification",
    ]
    main([*arguments, "--store", str(store)])
    assert len(store.read_text().splitlines()) == 2
