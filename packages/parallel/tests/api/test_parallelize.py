"""parallelize on real ranks: the training loop of one device, unchanged, gives the values of one device."""

from __future__ import annotations

import copy
import sys
import warnings
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest
import torch
from parallel_models import VOCABULARY, Language, batch_of, full, loop, make, plan_of, same
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.deferred.materialize import deferred_init, is_deferred
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import PlanError, PluginError, UnsupportedError, UsageError
from meshwright_dtensor.plan import ActivationRule, ParameterRule, Provenance
from meshwright_dtensor.plugins import PluginHost, StrategySpec, hookimpl
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import clip_grad_norm_, parallelize, shard_loader
from meshwright_parallel.engine.grad_reduction import reduction_of
from meshwright_parallel.strategies.data import Data

MESHES = [
    (1, {"dp": 1, "tp": 1}),
    (2, {"dp": 2}),
    (2, {"dp": 1, "tp": 2}),
    (4, {"dp": 2, "tp": 2}),
    (4, {"dp": 4, "tp": 1}),
]


def trained(rank: int, world_size: int, degrees: dict[str, int], dtype: torch.dtype, dropout: float) -> Any:
    expected = loop(make(dropout, dtype), torch.nn.utils.clip_grad_norm_)
    model = parallelize(make(dropout, dtype), plan_of(degrees=degrees))
    actual = loop(model, clip_grad_norm_)
    return expected, actual


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "degrees"), MESHES)
@pytest.mark.parametrize(("dtype", "dropout"), [(torch.float64, 0.0), (torch.float64, 0.3)])
def test_training_equals_one_device(
    rank_pool: RankPool, world_size: int, degrees: dict[str, int], dtype: torch.dtype, dropout: float
) -> None:
    for expected, actual in rank_pool.run(world_size, trained, degrees, dtype, dropout):
        same(actual, expected)


def without_engine(rank: int, world_size: int) -> Any:
    model = parallelize(make(), plan_of(degrees={"dp": 2}))
    engine = reduction_of(model)
    assert engine is not None
    engine.remove()
    return loop(make(), torch.nn.utils.clip_grad_norm_), loop(model, clip_grad_norm_)


@pytest.mark.slow
def test_without_the_engine_training_differs(rank_pool: RankPool) -> None:
    for expected, actual in rank_pool.run(2, without_engine):
        with pytest.raises(AssertionError):
            same(actual, expected)


def keeps_interface(rank: int, world_size: int) -> None:
    model = make()
    names = [n for n, _ in model.named_parameters()]
    plan = plan_of(degrees={"dp": 2, "tp": 2})
    assert parallelize(model, plan) is model
    check_parameters(model, names)
    assert model.parallel_plan == plan
    check_calls(model)
    with pytest.raises(UsageError, match="parallel already"):
        parallelize(model, plan)


def check_parameters(model: Language, names: list[str]) -> None:
    assert type(model) is Language
    assert [n for n, _ in model.named_parameters()] == names
    assert model.head.weight is model.embed.weight  # still tied
    assert model.embed.weight.tag == "tied"
    assert not model.head.bias.requires_grad
    assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in model.parameters())
    assert model.blocks[0].up.weight.placements == (Replicate(), Shard(0))
    assert model.blocks[0].up.weight.to_local().shape == (6, 8)
    assert type(model.positions) is torch.Tensor
    assert all(isinstance(t, DTensor) for n, t in model.state_dict().items() if n != "positions")


def check_calls(model: Language) -> None:
    logits = model(batch_of()["ids"])
    assert isinstance(logits, GlobalTensor)
    assert logits.shape == (4, 5, VOCABULARY)
    odd = model(**batch_of(3))  # three rows over two ranks: replicated, still right
    torch.testing.assert_close(full(odd), full(make()(**batch_of(3))))
    with communication() as log:
        model(**batch_of()).backward()
    assert sum(e.axis == "dp" and e.function == "data" for e in log.events) == 1


@pytest.mark.slow
def test_parallelize_keeps_the_model_interface(rank_pool: RankPool) -> None:
    rank_pool.run(4, keeps_interface)


def memory_given_back(rank: int, world_size: int) -> list[str]:
    import meshwright_parallel.api.parallelize as applying

    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(applying, "return_freed_memory", lambda: calls.append("given back"))
        parallelize(make(), plan_of(degrees={"dp": 2}))
    return calls


def test_what_planning_has_freed_is_given_back(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, memory_given_back) == [["given back"]] * 2


def copied(rank: int, world_size: int) -> Any:
    model = parallelize(make(), plan_of(degrees={"dp": 2}))
    model(**batch_of()).backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(**batch_of()).backward()
    assert twin.embed.weight is not model.embed.weight
    assert twin.head.weight is twin.embed.weight
    return [{n: full(p.grad) for n, p in m.named_parameters()} for m in (twin, model)]


@pytest.mark.slow
def test_deepcopy_has_its_own_engine(rank_pool: RankPool) -> None:
    for twin, model in rank_pool.run(2, copied):
        same([twin], [model], rtol=0.0, atol=0.0)


def deferred(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    with HOST, deferred_init(min_bytes=64):
        model = Language()
    assert is_deferred(model)
    grad = torch.ones_like(model.embed.weight)
    model.embed.weight.grad = grad
    parallelize(model, plan_of(degrees={"dp": 1, "tp": 2}))
    assert not any(is_deferred(p.to_local().detach()) for p in model.parameters())
    assert not is_deferred(model.positions)
    assert torch.equal(full(model.embed.weight.grad), grad)
    return {n: full(t) for n, t in model.state_dict().items()}


def test_deferred_models_start_bit_equal(rank_pool: RankPool) -> None:
    with HOST:
        built = make().state_dict()
    expected = {n: t.to(device_type()) for n, t in built.items()}
    for actual in rank_pool.run(2, deferred):
        same([actual], [expected], rtol=0.0, atol=0.0)


def hooked(rank: int, world_size: int) -> list[int]:
    """Modules inside of the model that have forward hooks: without context parallelism, and with it."""
    counts = []
    for degrees in ({"dp": 2, "cp": 1, "tp": 1}, {"dp": 1, "cp": 2, "tp": 1}):
        model = parallelize(make(), plan_of(degrees=degrees))
        counts.append(sum(bool(m._forward_hooks or m._forward_pre_hooks) for m in model.modules()) - 1)
    return counts


def test_axes_of_the_mesh_cost_no_hooks(rank_pool: RankPool) -> None:
    """Every hook is paid for in every call of a module."""
    for without, with_axis in rank_pool.run(2, hooked):
        assert without == with_axis == 0


def unlike(rank: int, world_size: int, what: str) -> None:
    if what == "weights":
        with HOST, deferred_init(min_bytes=64, shared=False):
            model = make(seed=rank)
        torch.manual_seed(0)
    else:
        model = make()
        if what == "one":
            with torch.no_grad():
                model.blocks[1].up.bias[3] += rank * 1e-6
        elif what == "buffer":
            model.register_buffer("order", torch.arange(4) + rank)
        elif what == "generator":
            torch.manual_seed(rank)
        elif what == "shape" and rank:
            model.unused = nn.Linear(4, 3)
    plan = plan_of(degrees={"dp": 2})
    if what == "plan" and rank:
        plan = plan.replace(sequence_parallel=True)
    parallelize(model, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", "parameter 'embed.weight'.*rank 1 has another than rank 0.*seed every rank alike"),
        ("one", "parameter 'blocks.1.up.bias'"),
        ("buffer", "buffer 'order'"),
        ("generator", "random generator differs.*rank 1 .*with seed 1 and not 0"),
        ("shape", r"'unused.weight' of shape \(3, 3\), .* where rank 1 has .* of shape \(3, 4\)"),
        ("plan", "different plans: from rank 0 to rank 1, sequence_parallel: false -> true"),
    ],
)
def test_differing_ranks_raise(rank_pool: RankPool, what: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rank_pool.run(2, unlike, what)


def other_notes(rank: int, world_size: int) -> None:
    plan = plan_of(degrees={"dp": 2})
    told = Provenance(notes=("the bubble takes 19.2 ms",)) if rank else Provenance()
    parallelize(make(), plan.replace(provenance=told))


def rounded(rank: int, world_size: int, roundings: float) -> Any:
    model = make()
    with torch.no_grad():
        weight = model.embed.weight
        weight.mul_(1.0 + rank * roundings * torch.finfo(weight.dtype).eps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, plan_of(degrees={"dp": 2}))
    messages = [str(w.message) for w in caught if "differs between ranks by rounding" in str(w.message)]
    return messages, torch.equal(full(model.embed.weight), make().embed.weight)


def test_ranks_that_differ_by_rounding_take_the_values_of_the_first(rank_pool: RankPool) -> None:
    for messages, equal in rank_pool.run(2, rounded, 4.0):
        assert equal
        (message,) = messages
        assert "'embed.weight'" in message and "rank 0" in message
    with pytest.raises(UsageError, match="seed every rank alike"):
        rank_pool.run(2, rounded, 1e4)


def unfilled(rank: int, world_size: int) -> Any:
    model = make()
    # as torch.empty may leave it
    model.register_buffer("scratch", torch.full((3,), float(rank)))
    with pytest.warns(UserWarning, match="buffer 'scratch'.*while all parameters are alike.*rank 0"):
        parallelize(model, plan_of(degrees={"dp": 2}))
    return model.scratch.tolist()


def test_floating_point_buffers_that_alone_differ_are_those_of_the_first(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, unfilled) == [[0.0] * 3] * 2


def test_plans_that_differ_in_notes_only_are_the_same(rank_pool: RankPool) -> None:
    rank_pool.run(2, other_notes)


def refused(rank: int, world_size: int) -> None:
    def refuse(error: type[Exception], match: str, model: Any = None, **fields: Any) -> None:
        batch = fields.pop("batch", None)
        made = make() if model is None else model
        before = [id(p) for p in made.parameters()]
        with pytest.raises(error, match=match):
            parallelize(
                made, plan_of(degrees=fields.pop("degrees", {"dp": 1, "tp": 2}), **fields), batch=batch
            )
        assert [id(p) for p in made.parameters()] == before  # nothing was touched

    def place(pattern: str, state: str) -> dict[str, Any]:
        return {"parameters": (ParameterRule(pattern=pattern, placement={"tp": state}),)}

    refuse(PlanError, "world_size", degrees={"dp": 2, "tp": 2})
    refuse(PlanError, "no installed strategy works on axis 'qq'", degrees={"qq": 2})
    refuse(
        PlanError,
        r"parameters\[0\].pattern is 'embed.wieght'.*nearest legal: embed.weight",
        **place("embed.wieght", "S(0)"),
    )
    both = r"'embed.weight' \(tied to 'head.weight'\) has shape.*nearest legal: S\(1\)"
    refuse(PlanError, both, **place("embed.weight", "S(2)"))
    both = r"'head.weight' \(tied to 'embed.weight'\) has shape"
    refuse(PlanError, both, **place("head.weight", "S(2)"))
    refuse(PlanError, "leaves some of the 2 ranks empty", model=nn.Linear(5, 1), **place("weight", "S(0)"))
    refuse(
        PlanError,
        "one tied parameter",
        parameters=(
            ParameterRule(pattern="embed.weight", placement={"tp": "S(0)"}),
            ParameterRule(pattern="head.weight", placement={"tp": "S(1)"}),
        ),
    )
    refuse(
        PlanError,
        r"activations\[0\].module is 'block.0.up'.*blocks.0.up",
        activations=(ActivationRule(module="block.0.up", function="linear"),),
    )
    refuse(PlanError, "works on axis 'dp'", strategies={"tp": "data"})
    refuse(PluginError, "tensro.*tensor", strategies={"tp": "tensro"})
    refuse(PlanError, "made for a Other", provenance=Provenance(model="Other-0123456789abcdef"))
    refuse(PlanError, "another configuration", provenance=Provenance(model="Language-0123456789abcdef"))
    refuse(UsageError, "no tensor", batch={"a": 3})
    hooked = make()
    hooked.embed.weight.register_hook(lambda g: g)
    refuse(UnsupportedError, "gradient hooks", model=hooked)
    early = make()
    optimizer = torch.optim.SGD([*early.blocks.parameters()])
    refuse(UsageError, "SGD optimizer holds parameter 'blocks.0.norm.weight'", model=early)
    del optimizer
    with torch.device("meta"):
        empty = Language()
    refuse(UnsupportedError, "deferred_init", model=empty)
    with HOST, deferred_init(values=False, min_bytes=64):
        hollow = Language()
    refuse(UnsupportedError, r"was never given values.*deferred_init\(values=False\)", model=hollow)
    with pytest.raises(TypeError):
        parallelize(make(), plan_of(), btach=None)  # type: ignore[call-arg]


def test_refusals_name_value_rule_and_fix(rank_pool: RankPool) -> None:
    rank_pool.run(2, refused)


class InnerData(Data):
    """A second data-like axis, as a third party would add it."""

    name = "inner-data"
    axis = "dq"
    order = 15


def host_with_inner_data() -> PluginHost:
    module = ModuleType("inner_data_plugin")
    module.InnerData = InnerData  # type: ignore[attr-defined]

    @hookimpl
    def meshwright_strategies() -> Any:
        yield StrategySpec(name="inner-data", axis="dq", target="inner_data_plugin:InnerData")

    module.meshwright_strategies = meshwright_strategies  # type: ignore[attr-defined]
    sys.modules["inner_data_plugin"] = module
    points = [("inner", "inner_data_plugin"), ("parallel", "meshwright_parallel.plugin")]
    return PluginHost.build([EntryPoint(name, value, "meshwright") for name, value in points])


def two_data_axes(rank: int, world_size: int) -> Any:
    expected = loop(make(0.2, torch.float64), torch.nn.utils.clip_grad_norm_)
    model = make(0.2, torch.float64)
    parallelize(model, plan_of(degrees={"dp": 2, "dq": 2}), plugins=host_with_inner_data())
    engine = reduction_of(model)
    assert engine is not None
    assert engine.axes == ("dp", "dq")
    actual = loop(model, clip_grad_norm_)
    (batch,) = shard_loader([batch_of()], model=model)
    assert batch["ids"].to_local().shape == (1, 5)
    return expected, actual


@pytest.mark.slow
def test_two_data_axes_share_one_engine(rank_pool: RankPool) -> None:
    for expected, actual in rank_pool.run(4, two_data_axes):
        same(actual, expected)


def hooked_later(rank: int, world_size: int) -> None:
    model = parallelize(make(), plan_of(degrees={"dp": 2}))
    handle = model.embed.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UnsupportedError, match=r"'embed\.weight' has a gradient hook"):
        model(**batch_of())
    handle.remove()
    model.embed.weight.requires_grad_(False)
    model.unused.bias.requires_grad_(False)
    reference = make()
    reference.embed.weight.requires_grad_(False)
    for m in (model, reference):
        m(**batch_of()).backward()
    same(
        [{n: full(p.grad) for n, p in model.named_parameters()}],
        [{n: p.grad for n, p in reference.named_parameters()}],
    )
    inside = [model.blocks[0].up.weight, model.blocks[1].norm.bias]
    actual = torch.autograd.grad(model(**batch_of()), inside)
    expected = torch.autograd.grad(
        reference(**batch_of()), [reference.blocks[0].up.weight, reference.blocks[1].norm.bias]
    )
    same([full(g) for g in actual], expected)


@pytest.mark.slow
def test_hooks_freezing_and_autograd_grad(rank_pool: RankPool) -> None:
    rank_pool.run(2, hooked_later)
