"""Fused projections on two ranks: unmodified models, attention on half of the heads, Megatron's communication and no other."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_once import plan_once
from torch import nn

import meshwright as mw
from meshwright_dtensor.cluster import LinkLevel
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_planner.clusters.registry import LAPTOP_CPU

LAYERS, WIDTH = 2, 64
EVEN = replace(LAPTOP_CPU, name="even", links=(LinkLevel("loopback", 0, 1e-12, 1e8),), launch_s=0.0)
"""A machine on which only bytes count, as they do for models of any size."""
ALIKE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}


def build(name: str) -> nn.Module:
    """A small model of a family with a fused projection, with weights from a fixed seed."""
    import transformers as tf

    sizes = {k: v for k, v in ALIKE.items() if k != "num_key_value_heads"}
    short = {"n_layer": LAYERS, "n_head": 8, "vocab_size": 512}
    makers = {
        "gpt2": lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(n_embd=WIDTH, n_positions=64, bos_token_id=None, eos_token_id=None, **short)
        ),
        "phi3": lambda: tf.Phi3ForCausalLM(
            tf.Phi3Config(**ALIKE, pad_token_id=0, bos_token_id=None, eos_token_id=None)
        ),
        "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**sizes)),
        "falcon": lambda: tf.FalconForCausalLM(
            tf.FalconConfig(
                hidden_size=WIDTH,
                num_hidden_layers=LAYERS,
                num_attention_heads=8,
                num_kv_heads=4,
                new_decoder_architecture=True,
                vocab_size=512,
            )
        ),
        "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=WIDTH, **short)),
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**ALIKE)),
    }
    torch.manual_seed(0)
    model: nn.Module = makers[name]()
    model.config.use_cache = False
    return model.train()


def example() -> dict[str, torch.Tensor]:
    """Tokens with some labels ignored."""
    ids = torch.randint(5, 100, (4, 32), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def heads_seen(model: nn.Module) -> list[int]:
    """Filled, in each forward, with the number of heads that attention computes on this rank."""
    seen: list[int] = []
    whole = torch.nn.functional.scaled_dot_product_attention

    def note(function: Any, dim: int) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            if hasattr(out, "to_local"):
                seen.append(out.to_local().shape[dim])
            return out

        return run

    torch.nn.functional.scaled_dot_product_attention = note(whole, 1)
    model.restore = lambda: setattr(torch.nn.functional, "scaled_dot_product_attention", whole)  # type: ignore[assignment]
    return seen


def step(rank: int, world: int, name: str, options: dict[str, Any], plain: bool = False) -> dict[str, Any]:
    """One step against one device; `plain` stores fused parameters in chunks instead."""
    warnings.simplefilter("ignore")
    batch, single, model = example(), build(name), build(name)
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    torch.manual_seed(5)
    expected = single(**batch).loss
    expected.backward()
    plan = plan_once(
        model,
        batch,
        tp=world,
        cluster=EVEN if options.get("sequence_parallel") else "laptop-cpu",
        **options,
    )
    assert isinstance(plan, ParallelPlan)
    parts = [r.pattern for r in plan.parameters if ";" in r.placement["tp"]]
    if plain:
        rules = [
            ParameterRule(
                pattern=r.pattern, placement={"tp": r.placement["tp"].partition(";")[0].rstrip(")") + ")"}
            )
            for r in plan.parameters
        ]
        plan = plan.replace(parameters=tuple(rules), activations=(), collectives=())
    plan = ParallelPlan.from_json(plan.to_json())
    mw.parallelize(model, plan)
    state = model.state_dict()
    true = [n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), values[n])]
    true += [n for n, v in values.items() if not torch.equal(state[n].full_tensor(), v)]
    seen = heads_seen(model)
    torch.manual_seed(5)
    with communication() as log:
        loss = model(**batch).loss
        loss.backward()
    model.restore()
    worst = 0.0
    for p, other in zip(model.parameters(), single.parameters(), strict=True):
        assert isinstance(p, MeshParameter) and other.grad is not None and p.grad is not None
        worst = max(worst, float((p.grad.full_tensor() - other.grad).abs().max() / other.grad.abs().max()))
    fused = sum(any(isinstance(s, IntervalShard) for s in p.global_layout.states) for p in model.parameters())  # type: ignore[attr-defined]
    return {
        "loss": (float(expected), float(loss.full_tensor())),
        "worst": worst,
        "wrong": true,
        "parts": parts,
        "fused": fused,
        "heads": seen,
        "events": [(e.phase, e.kind, e.nbytes, e.module, e.function, e.why) for e in log.events],
        "planned": sum(c.count for c in plan.collectives if not c.why.startswith("inside ")),
        "sequence": plan.sequence_parallel,
    }


ACTIVATIONS = 4 * 32 * WIDTH * 4
# blocks that end in their own sum: attention and MLP of NeoX and Falcon add up in one
ENDS = {"gpt2": 2, "phi3": 2, "bloom": 2, "neox": 1, "falcon": 1}
PARTS = {"gpt2": 2 * LAYERS, "phi3": 2 * LAYERS, "bloom": 0, "neox": 0, "falcon": 0}


def check_right(result: dict[str, Any]) -> None:
    """The loss and every gradient of one device, and parameters that leave in true order, bit for bit."""
    assert result["loss"][1] == pytest.approx(result["loss"][0], rel=1e-6)
    assert result["worst"] < 1e-5 and not result["wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ENDS))
def test_megatrons_communication_and_no_other(rank_pool: RankPool, name: str) -> None:
    result = rank_pool.run(2, step, name, {"sequence_parallel": False})[0]
    check_right(result)
    assert result["fused"] == PARTS[name] and set(result["heads"]) <= {4}
    assert name == "bloom" or len(result["heads"]) == LAYERS
    calls = Counter((phase, kind) for phase, kind, size, *_ in result["events"] if size == ACTIVATIONS)
    # forward: one at each end of a block, and the embedding; backward: one at each start of a block (attention, MLP), and the loss
    forward_calls = calls["forward", "all_reduce"] + calls["forward", "all_gather"]
    assert forward_calls == ENDS[name] * LAYERS + 1 and calls["forward", "all_gather"] <= 1
    assert calls["backward", "all_reduce"] == 2 * LAYERS + 1 and len(calls) <= 3
    rest = [e for e in result["events"] if e[2] != ACTIVATIONS]
    assert len(rest) == 2 and all(
        e[4] == "cross_entropy" for e in rest
    )  # rows of the vocabulary-parallel loss
    assert result["planned"] == len(result["events"]) - len(rest)
    assert all(module and why for _, _, _, module, _, why in result["events"]), result["events"]


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_chunks_of_a_fused_projection_gather(rank_pool: RankPool, name: str) -> None:
    """The negative control: the same plan with plain shards is right too, but moves more and computes all heads."""
    result = rank_pool.run(2, step, name, {"sequence_parallel": False}, True)[0]
    check_right(result)
    assert result["parts"] and result["fused"] == 0 and set(result["heads"]) == {8}
    gathers = [e for e in result["events"] if e[1] == "all_gather" and e[0] == "forward"]
    assert name == "gpt2" or len(gathers) > LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sequence_parallelism_is_megatrons_too(rank_pool: RankPool, name: str) -> None:
    """Two gathers and two scatters a layer each way, and the gradients of norms and biases that the sequence splits."""
    result = rank_pool.run(2, step, name, {"sequence_parallel": True})[0]
    check_right(result)
    assert result["sequence"]
    calls = Counter((phase, kind) for phase, kind, size, *_ in result["events"] if size == ACTIVATIONS)
    for phase in ("forward", "backward"):
        assert 2 * LAYERS <= calls[phase, "all_gather"] <= 2 * LAYERS + 1
        assert 2 * LAYERS <= calls[phase, "reduce_scatter"] <= 2 * LAYERS + 1
        assert calls[phase, "all_reduce"] == 0
    small = [e for e in result["events"] if e[2] < ACTIVATIONS and e[4] != "cross_entropy"]
    assert {e[:2] for e in small} <= {
        ("backward", "all_reduce"),
        ("forward", "reduce_scatter"),
        ("forward", "all_reduce"),
    }
