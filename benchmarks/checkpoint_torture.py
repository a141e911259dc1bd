"""What the tests of checkpoints do a few times, often: kill saves at random moments, and damage files.

python benchmarks/checkpoint_torture.py [--kills 200] [--damages 1000] [--folder DIR]
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "packages" / "checkpoint" / "tests"
sys.path.insert(0, str(TESTS))

from test_damage import put, take  # noqa: E402
from test_killed import SCRIPT, check, kill_one, model_of  # noqa: E402

from meshwright_checkpoint import CorruptError, save  # noqa: E402


def kill(folder: Path, kills: int) -> int:
    """Kill so many saves; the number of steps that were committed on the way. AssertionError where anything was lost."""
    rng = random.Random(1)
    save(folder / "step-0", model=model_of(0), asynchronous=False)
    command = [sys.executable, str(SCRIPT), str(folder)]
    committed = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        for _ in range(kills):
            kill_one(server, rng.random() * 0.15)
            committed = check(folder, committed)
            for old in folder.glob("step-*"):
                if 0 < int(old.name.removeprefix("step-")) < committed:
                    shutil.rmtree(old)
    return committed


def damage(folder: Path, count: int) -> int:
    """Damage a checkpoint so many times; how often loading it did not say so."""
    rng = random.Random(2)
    good, bad, other = folder / "good", folder / "bad", folder / "other"
    put(good)
    put(other, seed=4)
    unseen = 0
    for number in range(count):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        name = rng.choice(["manifest.json", *["data-00000.safetensors"] * 5])
        data = bytearray((bad / name).read_bytes())
        kind = number % 10
        if kind < 7:
            at = rng.randrange(len(data) * 8)
            data[at // 8] ^= 1 << at % 8
        elif kind == 7:
            del data[rng.randrange(len(data)) :]
        elif kind == 8:  # a stretch of it exchanged with another
            a, b = sorted(rng.sample(range(len(data) - 64), 2))
            data[a : a + 64], data[b : b + 64] = data[b : b + 64], data[a : a + 64]
        else:  # the file, or the manifest, of another save
            data = bytearray((other / name).read_bytes())
        if data == (good / name).read_bytes():
            continue
        (bad / name).write_bytes(data)
        try:
            take(bad)
        except CorruptError:
            continue
        unseen += 1
    return unseen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        unseen = damage(Path(folder), options.damages)
        print(f"damaged {options.damages} times: {unseen} unseen", flush=True)
        (Path(folder) / "run").mkdir()
        committed = kill(Path(folder) / "run", options.kills)
        print(
            f"killed {options.kills} times: nothing lost, {committed} steps committed on the way", flush=True
        )
    return int(unseen > 0)


if __name__ == "__main__":
    raise SystemExit(main())
