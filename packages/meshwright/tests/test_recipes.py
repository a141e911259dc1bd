"""Recipes: every error at once, each with its place and what was meant; nothing of torch is needed for that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.recipes.recipe_input import RecipeError, read_recipe
from meshwright.recipes.schema import Schedule

GOOD = """
steps = 10
data = "text.txt"
[model]
model_type = "gpt2"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what recipes name."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be, or not to be")
    Path("tokens.bin").write_bytes(bytes(64))
    Path("rows.py").write_text("def rows():\n    return []\n")
    plan = {"version": 1, "world_size": 2, "degrees": {"dp": 2}, "strategies": {"dp": "data"}}
    Path("plan.json").write_text(json.dumps(plan))
    Path("no.json").write_text("{}")
    Path("llama").mkdir()
    Path("llama/config.json").write_text("{}")
    return tmp_path


# what is added to a good recipe -> what the lines of the error must say, in any order, one entry a line
WRONG: dict[str, tuple[str, list[str]]] = {
    "misspelt field": ("stepps = 3", ["stepps: there is no such field; did you mean 'steps'?"]),
    "misspelt in a table": ("schedule.warmup = 3", ["schedule.warmup: there is no such", "'warm_up'"]),
    "misspelt table": (
        "[optimiser]\nlr = 1.0",
        ["optimiser: there is no such field; did you mean 'optimizer'?"],
    ),
    "field of a table": ("lr = 1e-3", ["lr: there is no such field; did you mean 'optimizer.lr'?"]),
    "no such field at all": ("colour = 1", ["colour: there is no such field; the fields are model, data"]),
    "steps below 1": ("steps = 0", ["line 3: steps is 0: it should be greater than or equal to 1"]),
    "text for a number": ('batch_size = "8"', ["batch_size is '8': it should be a valid integer"]),
    "truth for a number": ("seed = true", ["seed is True: it should be a valid integer"]),
    "negative rate": ("optimizer.lr = -1.0", ["optimizer.lr is -1.0: it should be greater than 0"]),
    "unknown optimizer": (
        'optimizer.name = "adamv"',
        ["optimizer.name is 'adamv'", "adamw, adam, sgd; did you mean"],
    ),
    "momentum of adamw": ("optimizer.momentum = 0.9", ["optimizer.momentum: it has no effect on adamw"]),
    "betas of sgd": ('optimizer = {name = "sgd", betas = [0.9, 0.9]}', ["betas: it has no effect on sgd"]),
    "three betas": ("optimizer.betas = [0.9, 0.9, 0.9]", ["optimizer.betas is"]),
    "unknown schedule": (
        'schedule.name = "cosinus"',
        ["schedule.name is 'cosinus'", "did you mean 'cosine'?"],
    ),
    "warm-up to the end": ("schedule.warm_up = 10", ["schedule: warm_up = 10 leaves nothing of 10 steps"]),
    "uneven accumulation": ("accumulate = 3", ["accumulate: it must divide batch_size, 8"]),
    "no precision": ('precision = "fp8"', ["precision is 'fp8': it must be one of fp32, bf16"]),
    "no such data": ('data = "texts/"', ["line 3: data.files: there is no file texts/"]),
    "no data": ('data = ""', ["data.files: there is no file ''"]),
    "a run in its data": ('data = "llama"\nout = "llama/run"', ["out: llama/run is in llama, which is data"]),
    "no such function": ('data = "rows.py:lines"', ["data.function: rows.py has no function 'lines'"]),
    "no such file of a function": ('data = "row.py:rows"', ["data.function: there is no file row.py"]),
    "files and a function": (
        'data = {files = "text.txt", function = "rows.py:rows"}',
        ["data.function: files are given too"],
    ),
    "neither": ("data = {workers = 1}", ["data: give files or a function"]),
    "dtype of text": (
        'data = {files = "text.txt", dtype = "uint16"}',
        ["data.dtype: it has no effect without a .bin"],
    ),
    "documents of tokens": (
        'data = "tokens.bin"\npacking = false',
        ["packing: files of tokens have no documents"],
    ),
    "documents of tokens to evaluate": (
        'packing = false\nevaluation.data = ["text.txt", "tokens.bin"]',
        ["evaluation: files of tokens in its data have no documents"],
    ),
    "no model_type": ("model = {n_layer = 2}", ["model: a table is a config of transformers", "model_type"]),
    "a dtype of the model": (
        'model = {model_type = "gpt2", dtype = "bfloat16"}',
        ["model: dtype has no effect", "set precision"],
    ),
    "no such model": ('model = "lama"', ["model: lama is no folder with a config.json"]),
    "no weights": ('model = "llama"', ["model: llama has no *.safetensors; give llama/config.json"]),
    "a number for a model": (
        "model = 3",
        ["model is 3: it should be a valid string, or it should be a valid dictionary"],
    ),
    "no such tokenizer": ('tokenizer = "byte"', ["tokenizer: byte is no folder", "did you mean 'bytes'?"]),
    "an export that exists": ('export = "llama"', ["export: llama exists already; remove it first"]),
    "no such plan": ('plan = "pan.json"', ["plan: ", "pan.json", "No such file"]),
    "a file that is no plan": ('plan = "no.json"', ["plan: plan field", "no.json"]),
    "a plan of other ranks": ('world_size = 3\nplan = "plan.json"', ["plan: plan.json is for 2 ranks"]),
    "a plan and pins": ('plan = {file = "plan.json", tp = 2}', ["plan: plan.json fixes what tp asks for"]),
    "a plan and a precision": (
        'plan = "plan.json"\nprecision = "bf16"',
        ["plan.json fixes what precision asks for"],
    ),
    "a pin that is none": ("plan.tp = true", ["plan.tp is True: it should be a valid integer"]),
    "pins of another world": (
        "world_size = 4\nplan.tp = 3",
        ["plan: the degrees multiply to 3", "world_size, 4"],
    ),
    "a degree below 1": ("plan.dp = 0", ["plan: dp=0 is less than 1"]),
    "pins without a pipeline": ("plan.microbatches = 2", ["microbatches=2 needs a pipeline"]),
    "no evaluation data": ("evaluation.interval = 2", ["evaluation.data: it is required and missing"]),
    "keep nothing": ("checkpoints.keep_last = 0", ["checkpoints.keep_last is 0"]),
    "no tensorboard": (
        'metrics.tensorboard = "yes"',
        ["metrics.tensorboard is 'yes': it should be a valid boolean"],
    ),
    "many": (
        "steps = 0\nbatch_size = 0\nsed = 1\noptimizer.lr = 0.0\nplan.zero = 7\ntokenizer = 1",
        [
            "steps is 0",
            "batch_size is 0",
            "'seed'",
            "optimizer.lr is 0.0",
            "zero=7 is no stage",
            "tokenizer is 1",
        ],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_recipes_tell_all_their_errors(case: str) -> None:
    added, expected = WRONG[case]
    changed = {line.partition(" ")[0] for line in added.splitlines()}
    lines = [line for line in GOOD.splitlines() if line.partition(" ")[0] not in changed]
    text = "\n".join(lines[: lines.index("[model]")] + added.splitlines())
    if "model" not in changed:
        text += '\n[model]\nmodel_type = "gpt2"'
    Path("recipe.toml").write_text(text + "\n")
    with pytest.raises(RecipeError) as raised:
        read_recipe(["recipe.toml"])
    message = str(raised.value)
    assert [part for part in expected if part not in message] == [], message
    count = 6 if case == "many" else 1
    assert message.count("recipe.toml, line") == count, message
    assert len(message.splitlines()) == (count if count == 1 else count + 1)


_ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
"""A few lines that say 10^12 values."""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.toml", "steps = x\n", "a.toml is not TOML: Invalid value (at line 1"),
        ("a.yaml", "steps: [", "a.yaml is not YAML"),
        ("a.yaml", "- 3", "errors"),
        ("a.yaml", "steps: 2001-99-99", "a.yaml is not YAML: month must be in"),
        ("a.yaml", "model: &m {a: *m}", "line 1: a value contains itself"),
        ("a.yaml", "[" * 100_000, "a.yaml is not YAML"),
        ("a.yaml", _ALIASES, "it has more than 100000 values"),
        ("a.toml", "steps = " + "[" * 100_000, "a.toml is not TOML"),
        ("a.toml", "a" + ".a" * 5000 + " = 1", "nested more than 16 deep"),
        ("a.toml", f'model = "{"x" * 300}"', "cannot be read: File name too long; give another path"),
        ("a.toml", f'data = "{"x" * 300}"', "cannot be read: File name too long; give another path"),
        ("a.yaml", '{"model": "\\ud800"}', "has half of a character"),
        ("a.toml", "steps = " + "9" * 5000, "a.toml is not TOML"),
    ],
)
def test_files_that_are_none(name: str, text: str, expected: str) -> None:
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    Path(name).write_text(text)
    with pytest.raises(RecipeError, match=expected.replace("(", r"\(")):
        read_recipe([name])


def test_there_is_one_recipe_and_it_is_there() -> None:
    with pytest.raises(RecipeError, match="give one recipe"):
        read_recipe(["a.toml", "b.toml"])
    with pytest.raises(RecipeError, match=r"nothing.toml cannot be read"):
        read_recipe(["nothing.toml"])


def test_yaml_says_the_same_and_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.toml").write_text(GOOD + "[optimizer]\nlr = 1e-3\n")
    Path("a.yaml").write_text(
        "steps: 10\ndata: text.txt\nmodel:\n  model_type: gpt2\noptimizer: {lr: 1e-3}\n"
    )
    toml = read_recipe(["a.toml", "plan.tp=2", "optimizer.betas=[0.8, 0.9]"])
    assert toml.optimizer.betas == (0.8, 0.9) and toml.keywords()["tp"] == 2
    pytest.importorskip("yaml")
    assert read_recipe(["a.yaml", "plan.tp=2", "optimizer.betas=[0.8, 0.9]"]) == toml
    Path("a.yaml").write_text("steps: 10\ndata: text.txt\nmodel:\n  n_layer: 2\n\nplan:\n  tpp: 3\n")
    with pytest.raises(RecipeError, match=r"line 3: model: a table.*\n.*line 7: plan.tpp.*'tp'"):
        read_recipe(["a.yaml"])
    monkeypatch.setattr("meshwright.recipes.recipe_input.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install pyyaml"):
        read_recipe(["a.yaml"])


def test_a_recipe_may_be_all_settings_and_errors_name_them() -> None:
    recipe = read_recipe(["model.model_type=gpt2", "data=text.txt", "steps=3", "schedule.final=0"])
    assert recipe.data.files == ("text.txt",) and recipe.model == {"model_type": "gpt2"}
    recipe = read_recipe(["model=3", "model.model_type=gpt2", "data=text.txt", "data.workers=1", "steps=3"])
    assert (recipe.data.files, recipe.data.workers) == (("text.txt",), 1) and recipe.model == {
        "model_type": "gpt2"
    }
    with pytest.raises(RecipeError) as raised:
        read_recipe(["model.model_type=gpt2", "data=txt", "step=3"])
    assert str(raised.value).splitlines()[0] == "the command line: 3 errors"
    assert "data=txt: data.files: there is no file txt" in str(raised.value)


def test_the_learning_rate_rises_and_falls() -> None:
    cosine = Schedule(warm_up=2, final=0.5)
    assert [cosine.factor(step, 6) for step in (0, 1, 2, 4, 6)] == pytest.approx([0.5, 1, 1, 0.75, 0.5])
    assert Schedule(name="linear", final=0.0).factor(5, 10) == pytest.approx(0.5)
    assert Schedule(name="constant").factor(5, 10) == 1


def test_wrong_recipes_are_refused_without_torch() -> None:
    script = "import sys; from meshwright.cli import main\n"
    script += "try: main(['train', 'steps=0'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2 and "steps=0: steps is 0" in done.stderr and "Traceback" not in done.stderr
