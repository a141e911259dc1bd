"""What the tests of checkpoints do a few times, often: kill saves at random moments, and damage files.

python benchmarks/checkpoint_torture.py [--kills 200] [--moments 200] [--damages 1000] [--folder DIR]

--kills is of one process, --moments of two ranks that save together: one of them is killed, or both, or its disk is full, or a
write fails.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent.parent / "packages" / "checkpoint" / "tests"
sys.path.insert(0, str(TESTS))

from saving_ranks import ROWS  # noqa: E402
from test_damage import put, take  # noqa: E402
from test_killed import SCRIPT, check, kill_one, model_of  # noqa: E402

from meshwright_checkpoint import CorruptError, latest, load, save  # noqa: E402

KINDS = ("kill 0", "kill 1", "kill both", "full 0", "full 1", "error 0", "error 1")


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


def state(step: int) -> torch.nn.Module:
    return torch.nn.ParameterDict(
        {"v": torch.full((1 << 18,), float(step)), "w": torch.full((ROWS, 4), float(step))}
    )


def moments(folder: Path, count: int) -> int:
    """Let two ranks save, and something happen to them, so often; the number of steps that were committed on the way."""
    rng = random.Random(3)
    save(folder / "step-0", model=state(0), asynchronous=False)
    command = [sys.executable, str(TESTS / "saving_ranks.py"), str(folder)]
    committed = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        for number in range(count):
            kind, _, who = KINDS[number % len(KINDS)].partition(" ")
            server.stdin.write(f"{kind} {who.replace('both', '0')}\n")
            server.stdin.flush()
            ranks = [int(text) for text in server.stdout.readline().split()]
            time.sleep(rng.random() * 1.5)
            hit = ranks if who == "both" else [ranks[int(who)]] if kind == "kill" else []
            for pid in hit:
                end(pid)
            time.sleep(0.2)  # time for the other ranks to react
            for pid in ranks:
                if pid not in hit:
                    end(pid)
            assert server.stdout.readline() == "over\n"
            committed = whole(folder, committed)
            for old in folder.glob("step-*"):
                if 0 < int(old.name.removeprefix("step-")) < committed:
                    shutil.rmtree(old)
    return committed


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def whole(folder: Path, committed: int) -> int:
    """The latest step: not older than what was there, and equal to what was saved; so is the first one."""
    results = latest(folder)
    assert results is not None
    step = int(Path(results).name.removeprefix("step-"))
    assert step >= committed, f"{committed} was committed, and {results} is the latest"
    model = state(-1)
    for path, value in ((results, step), (folder / "step-0", 0)):
        load(path, model=model)
        assert all((p == value).all() for p in model.parameters()), path
    return step


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
    parser.add_argument("--moments", type=int, default=200)
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
        (Path(folder) / "ranks").mkdir()
        committed = moments(Path(folder) / "ranks", options.moments)
        print(
            f"{options.moments} moments of two ranks: nothing lost, {committed} steps committed on the way",
            flush=True,
        )
    return int(unseen > 0)


if __name__ == "__main__":
    raise SystemExit(main())
