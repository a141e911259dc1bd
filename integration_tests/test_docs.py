"""What the documentation says of keywords, options and packages is what there is."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import shutil
import sysconfig
from pathlib import Path

import pytest
from commands import run_on
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.recipes.schema import Checkpoints, Evaluation, Metrics, Optimizer, Recipe, Schedule, Source
from meshwright_dtensor.testing.rank_pool import RankPool

ROOT = Path(__file__).parent.parent


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the first table under a title."""
    part = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_table_of_keywords_is_the_signature() -> None:
    table = rows((ROOT / "docs/planner.md").read_text(), "Keywords")
    listed = {cells[0].strip("`"): cells[2].strip("`") for cells in table}
    for function, more in ((mw.plan, set()), (mw.auto_parallelize, {"plugins"})):
        signature = inspect.signature(function).parameters
        keywords = {
            name: parameter
            for name, parameter in signature.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        assert [name for name in keywords if name not in more and name not in listed] == []
        assert [name for name in listed if name not in keywords] == []
        assert {name: str(ast.literal_eval(listed[name])) for name in listed} == {
            n: str(keywords[n].default) for n in listed
        }
    assert all(len(cells) == 4 and cells[1] and cells[3] for cells in table)


@pytest.mark.slow
def test_the_page_of_the_trainer_runs(
    rank_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of docs/train.md is written, and every command run, in the order of the page."""
    page = (ROOT / "docs/train.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    for name in ("abc.py", "bisect.py"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / name, "corpus")
    Path("stories.jsonl").write_text("".join(json.dumps({"story": "once " * n}) + "\n" for n in range(3, 20)))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained("llama")
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 8
    for language, text in blocks:
        if language == "sh":
            for line in text.splitlines():
                words = shlex.split(line, comments=True)
                parallel = {"world_size=2", "plan=tensor/plan.json"} & {*words}
                size = 2 if parallel else 1
                done = run_on(rank_pool, size, words[1:], tmp_path, inside=True)
                assert [rank.returncode for rank in done] == [0] * size, line
        elif language != "text":
            named = re.match(r"# ([\w.]+)", text)
            Path(named[1] if named else "gpt2.toml").write_text(text)
    assert json.loads(Path("meshwright-run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 30
    assert Path("llama-trained/config.json").is_file()


def test_every_field_of_a_recipe_is_in_the_table() -> None:
    listed = {
        name
        for cells in rows((ROOT / "docs/train.md").read_text(), "Fields")
        for name in re.findall(r"`([\w.*]+)`", cells[0])
    }
    tables = {"optimizer": Optimizer, "schedule": Schedule, "data": Source, "evaluation": Evaluation}
    tables |= {"checkpoints": Checkpoints, "metrics": Metrics}
    fields = {f"{name}.{field}" for name, table in tables.items() for field in table.model_fields}
    fields |= {name for name in Recipe.model_fields if name not in (*tables, "plan")}
    assert listed == fields | {"plan.file", "plan.*"}


def test_installing_from_a_checkout_names_every_package() -> None:
    text = (ROOT / "README.md").read_text()
    packages = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    lines = re.findall(r"^pip (?:install|wheel) .*packages.*$", text, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        paths = [word.partition("[")[0] for word in shlex.split(line) if word.startswith("./packages/")]
        assert {Path(path).name for path in paths} == packages and all(
            (ROOT / path).is_dir() for path in paths
        )


def test_every_command_is_in_the_readme() -> None:
    from meshwright_dtensor.plugins import discover

    commands = {
        name for name, entry in discover().commands().items() if entry.distribution.startswith("meshwright")
    }
    text = (ROOT / "README.md").read_text()
    assert {
        name
        for name in commands
        if f"\nmeshwright {name} " not in text and f"\nmeshwright {name}\n" not in text
    } == {"trial"}


def test_the_map_names_files_that_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    paths = re.findall(r"`((?:dtensor|parallel|planner|pipeline|checkpoint)/[\w/.]*)`", text)
    assert len(paths) > 60
    packages = ROOT / "packages"
    places = [packages / p.split("/")[0] / "src" / f"meshwright_{p}" for p in paths]
    assert [str(place.relative_to(packages)) for place in places if not place.exists()] == []
