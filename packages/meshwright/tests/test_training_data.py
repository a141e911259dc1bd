"""The rows of the trainer: what files become, that nothing is lost or invented, and an order that can be taken up anywhere."""

from __future__ import annotations

import json
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.configs import config_of
from meshwright.recipes.recipe_input import read_recipe
from meshwright.recipes.schema import Recipe
from meshwright.training.data import (
    IGNORED,
    Order,
    check_same,
    identity,
    in_order,
    loader_of,
    rows_of,
    settings_of,
)
from meshwright.training.tokens import Tokenizer, checksum, tokenizer_of
from meshwright_dtensor.errors import UsageError

TEXTS = ["to be, or not to be", "x", "", "that is the question"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: documents as text files and as JSONL."""
    monkeypatch.chdir(tmp_path)
    Path("texts/.git").mkdir(parents=True)
    Path("texts/.git/hidden.txt").write_text("hidden")
    for number, text in enumerate(TEXTS):
        Path(f"texts/{number}.txt").write_text(text)
    Path("a.jsonl").write_text("".join(json.dumps({"story": text}) + "\n" for text in TEXTS))
    return tmp_path


def recipe_of(*words: str) -> Recipe:
    return read_recipe(["model.model_type=gpt2", "steps=2", "sequence_length=8", "out=run", *words])


def rows_for(*words: str) -> Any:
    recipe = recipe_of(*words)
    return rows_of(recipe.data, recipe, tokenizer_of(recipe))


@pytest.mark.parametrize(
    "data", [["data=texts"], ["data=texts/*.txt"], ["data.files=a.jsonl", "data.column=story"]]
)
def test_packed_rows_are_the_documents_with_their_ends(data: list[str]) -> None:
    rows = rows_for(*data)
    stream = "".join(text + "\0" for text in TEXTS).encode()
    ids = torch.cat([rows[index]["input_ids"] for index in range(len(rows))])
    assert bytes(ids.tolist()) == stream[: len(stream) // 8 * 8] and set(rows[0]) == {"input_ids", "labels"}
    before = sorted(Path("run/data").rglob("*"))
    assert torch.equal(rows_for(*data)[0]["labels"], rows[0]["labels"])
    assert sorted(Path("run/data").rglob("*")) == before


def test_padded_rows_keep_documents_apart() -> None:
    rows = rows_for("data=texts", "packing=false")
    kept = [rows[index] for index in range(len(rows))]
    texts = [bytes(row["input_ids"][row["attention_mask"] == 1].tolist()) for row in kept]
    # the empty document has nothing to predict
    assert texts == [b"to be, o", b"r not to", b" be\0", b"x\0", b"that is ", b"the ques", b"tion\0"]
    assert all((row["labels"] == IGNORED).equal(row["attention_mask"] == 0) for row in kept)


@pytest.mark.parametrize("data", ["**/*.jsonl", "*/*.jsonl", "**/*"])
def test_what_a_run_has_written_is_no_data(data: str) -> None:
    Path("run").mkdir()
    Path("run/b.jsonl").write_text('{"story": "that is the question"}')
    arguments = [f"data.files={data}", "data.column=story", "packing=false"]
    # a text has no columns
    Path("texts").rename(".texts")
    before = identity_of(*arguments)
    Path("run/metrics.jsonl").write_text('{"step": 1, "story": "is it read?"}')
    Path("run/checkpoints").mkdir()
    Path("run/checkpoints/part.bin").write_bytes(b"abc")
    assert identity_of(*arguments) == before
    assert len(rows_for("data.files=run/metrics.jsonl", *arguments[1:])) == 2


def test_files_of_tokens_are_taken_as_they_are() -> None:
    np.arange(20, dtype=np.uint16).tofile("a.bin")
    np.save("b.npy", np.arange(100, 117, dtype=np.int32))
    rows = rows_for('data=["a.bin", "b.npy"]')
    assert [int(rows[index]["input_ids"][0]) for index in range(len(rows))] == [0, 8, 100, 108]
    assert len(rows_for("data.files=a.bin", "data.dtype=uint32")) == 1
    np.arange(300, 320).astype(np.uint16).tofile("a.bin")
    with pytest.raises(UsageError, match="row 1 has token 315, not one of the 256"):
        rows_for("data=a.bin")[1]


def test_jsonl_may_have_tokens() -> None:
    Path("a.jsonl").write_text('{"text": [1, 2, 3, 4, 5, 6, 7]}\n')
    assert rows_for("data=a.jsonl")[0]["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_tables(suffix: str) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    table = pa.table({"story": TEXTS, "other": [1, 2, 3, 4]})
    if suffix == "arrow":
        with pa.OSFile("a.arrow", "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        {"parquet": parquet.write_table, "feather": feather.write_feather}[suffix](table, f"a.{suffix}")
    rows = rows_for(f"data.files=a.{suffix}", "data.column=story")
    assert bytes(rows[0]["input_ids"].tolist()) == b"to be, o"
    with pytest.raises(UsageError, match="no column 'text'"):
        rows_for(f"data.files=a.{suffix}")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"a\0b", "no text in UTF-8 .a zero byte"),
        ("a.txt", b"\xff\xfe", "no text in UTF-8 .*0xff"),
        ("a.txt", b"short", "has 6 tokens, and a row sequence_length = 8"),
        ("a.jsonl", b'{"text": "a"}\nx\n', "line 2 of a.jsonl is no JSON object"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}\n', "line 3 of a.jsonl is no JSON object"),
        ("a.jsonl", b'{"txt": "a"}\n', "'text' of document 0 of a.jsonl is None"),
        ("a.jsonl", b'{"text": [1, 256]}\n', "document 0 has token 256, not one of the 256"),
        ("a.jsonl", b'{"text": [1]}\n{"text": [1, 2.5]}\n', "document 1 has 2.5, a float: .*data.column"),
        ("a.jsonl", b'{"text": ["1", "2"]}\n', "document 0 has '1', a str"),
        ("a.jsonl", b'{"text": [true, false]}\n', "document 0 has True, a bool"),
        ("a.jsonl", b'{"text": [[1, 2], [3, 4]]}\n', "document 0 has .1, 2., a list"),
        ("a.jsonl", b'{"text": [[1, 2], [3]]}\n', "document 0 has .1, 2., a list"),
        ("a.jsonl", b'{"text": [1, null]}\n', "document 0 has None, a NoneType"),
        ("a.jsonl", b'{"text": [{"role": "user", "content": "a"}]}\n', "document 0 has .'role.*, a dict"),
        ("a.bin", b"abc", "a.bin cannot be read"),
        ("a.npy", b"abc", "a.npy cannot be read"),
    ],
)
def test_data_that_cannot_be_used(name: str, content: bytes, expected: str) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(UsageError, match=expected):
        rows_for(f"data={name}")
    assert not list(Path("run").rglob("ends.npy")) or "row sequence" in expected


def test_an_order_can_be_taken_up_anywhere() -> None:
    whole = list(islice(Order(10, 4, seed=3), 12))
    flat = [index for batch in whole for index in batch]
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10)) and flat[:10] != flat[10:20]
    for batches in (1, 2, 3, 5, 7):
        assert list(islice(Order(10, 4, 3, first=4 * batches), 12 - batches)) == whole[batches:]
    # another batch size goes on with the same rows
    assert [index for batch in islice(Order(10, 3, 3, first=8), 4) for index in batch] == flat[8:20]
    assert in_order(7, 3, None) == [[0, 1, 2], [3, 4, 5]] and in_order(7, 3, 1) == [[0, 1, 2]]


def test_loading_draws_nothing_from_the_models_random_numbers() -> None:
    rows = rows_for("data=texts")
    before = torch.get_rng_state()
    next(iter(loader_of(rows, Order(len(rows), 2, 0))))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_outlast_signals_with_any_start_method(method: str) -> None:
    rows: Any = [{"x": torch.tensor(number)} for number in range(20)]
    loader = loader_of(rows, [[number] for number in range(20)], workers=1)
    loader.multiprocessing_context = method
    batches: Any = iter(loader)
    first = next(batches)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(batches._workers[0].pid, number)
    assert [batch["x"].item() for batch in (first, *batches)] == list(range(20))


def identity_of(*words: str) -> dict[str, Any]:
    recipe = recipe_of(*words)
    return identity(rows_for(*words), recipe, tokenizer_of(recipe))


def test_a_run_knows_its_data() -> None:
    first = identity_of("data=texts")
    assert identity_of("data.files=a.jsonl", "data.column=story") == first
    Path("texts/0.txt").write_text("To be, or not to be")
    assert identity_of("data=texts") != first
    # a row that is neither the first, the middle nor the last one; then cuts of documents alone
    for name, ids in (("a", [0] * 40), ("b", [*[0] * 9, 1, *[0] * 30])):
        Path(f"{name}.jsonl").write_text(json.dumps({"text": ids}))
    assert identity_of("data=a.jsonl") != identity_of("data=b.jsonl")
    Path("b.jsonl").write_text(f'{{"text": {[0] * 20}}}\n{{"text": {[0] * 19}}}')
    assert identity_of("data=a.jsonl") == identity_of("data=b.jsonl")
    assert identity_of("data=a.jsonl", "packing=false") != identity_of("data=b.jsonl", "packing=false")


def test_a_file_with_the_time_and_size_of_another_is_read_again() -> None:
    rows_for("data=texts")
    file = Path("texts/0.txt")
    time = file.stat().st_mtime_ns
    file.write_text(TEXTS[0].upper())
    os.utime(file, ns=(time, time))
    assert bytes(rows_for("data=texts")[0]["input_ids"].tolist()) == b"TO BE, O"


def test_a_large_array_is_read_in_pieces() -> None:
    class Seen:
        size, read = 1 << 40, 0

        def __getitem__(self, places: slice) -> np.ndarray:
            assert 0 <= places.start < places.stop <= self.size
            self.read += 1
            return np.zeros(1, np.uint16)

    seen: Any = Seen()
    assert checksum(("", seen)) and seen.read == 256
    whole = np.arange(9)
    assert checksum(("", whole)) == checksum(("", whole.astype(np.uint16))) != checksum(("", whole[:8]))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"tokens": 1, "rows": 5}, "a run with other data: a run goes on with the same rows"),
        ({"rows": 5}, "other data, of 4 rows and not 5"),
        ({"tokenizer": 1, "tokens": 1}, "a run with other files of the tokenizer:"),
        ({"packing": False, "tokens": 1, "rows": 5}, "a run with packing = True, not False:"),
        ({"optimizer.name": "sgd"}, "optimizer.name = adamw, not sgd: .*give another out"),
        ({"seed": 1, "model.n_head": 4}, "a run with seed = 0, not 1, model.n_head = 2, not 4:"),
    ],
)
def test_what_a_run_goes_on_with(changed: dict[str, Any], expected: str) -> None:
    before = {"tokens": 0, "rows": 4, "tokenizer": 0, "packing": True, "seed": 0, "optimizer.name": "adamw"}
    before |= settings_of({"n_head": 2, "dtype": "float32", "_attn_implementation": "eager"})
    now = before | settings_of({"n_head": 2, "dtype": "bfloat16", "new_in_transformers": 3})
    check_same(before, now, "run")
    with pytest.raises(UsageError, match=expected):
        check_same(before, now | changed, "run")


def test_a_function_returns_a_dataset() -> None:
    Path("rows.py").write_text(
        "def good(sequence_length):\n    return [{'x': sequence_length}]\n\ndef bad():\n    return 3\n"
    )
    assert rows_for("data=rows.py:good")[0] == {"x": 8}
    with pytest.raises(UsageError, match="returned a int; it must return a dataset"):
        rows_for("data=rows.py:bad")


HOSTILE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizer
Path("harm").touch()
class Hostile(PretrainedConfig):
    model_type = "hostile"
class Words(PreTrainedTokenizer):
    pass
"""


def test_code_of_a_folder_is_never_run_nor_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    # transformers would ask on the terminal
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    Path("hostile").mkdir()
    Path("hostile/code.py").write_text(HOSTILE)
    written = {
        "config.json": {"model_type": "hostile", "auto_map": {"AutoConfig": "code.Hostile"}},
        "tokenizer_config.json": {
            "tokenizer_class": "Words",
            "auto_map": {"AutoTokenizer": ["code.Words", None]},
        },
    }
    for name, value in written.items():
        Path("hostile", name).write_text(json.dumps(value))
    with pytest.raises(UsageError, match="no transformers config"):
        config_of("model", "hostile")
    with pytest.raises(UsageError, match="cannot be read"):
        tokenizer_of(recipe_of("data=texts", "tokenizer=hostile"))
    assert not Path("harm").exists()


def test_a_tokenizer_of_transformers() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"to": 0, "be": 1, "[E]": 2, "[U]": 3}, unk_token="[U]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    loaded = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[E]", unk_token="[U]")
    loaded.save_pretrained("words")
    # as the folder of a model has it
    for name in ("config.json", "model.safetensors"):
        Path("words", name).write_text("{}")
    assert recipe_of("data=texts", "model=words").vocabulary == "words"
    assert recipe_of("data=texts", "model=words", "tokenizer=bytes").vocabulary == "bytes"
    made: Tokenizer = tokenizer_of(recipe_of("data=texts", "tokenizer=words"))
    assert (list(made.encode("to be to")), made.size, made.end) == ([0, 1, 0], 4, 2)
    Path("words").rename("moved")
    assert tokenizer_of(recipe_of("data=texts", "tokenizer=moved")).digest == made.digest
    # the same folder and size, and other tokens
    text = Path("moved/tokenizer.json").read_text()
    changed = text.replace('"to": 0', '"to": 1').replace('"be": 1', '"be": 0')
    Path("moved/tokenizer.json").write_text(changed)
    other = recipe_of("data=texts", "tokenizer=moved")
    assert changed != text and tokenizer_of(other).digest != made.digest
    for tokenizer in (made, tokenizer_of(other)):
        rows_of(other.data, other, tokenizer)
    assert len(list(Path("run/data").iterdir())) == 2
