"""What goes wrong at the border of a parallel model works, or is refused in one readable line, under every plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpointed
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 5, 8, 12


class Small(nn.Module):
    """An embedding and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.a = nn.Linear(WIDTH, 12)
        self.b = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.b(torch.relu(self.a(self.emb(x))))
        return h


RULES = {"a.weight": "S(0)", "a.bias": "S(0)", "b.weight": "S(1)"}
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"degrees": {"dp": 2}},
    "tp": {"degrees": {"dp": 1, "tp": 2}},
    "zero3": {"degrees": {"zero": 2}, "zero": {"stage": 3}},
    "pp": {"degrees": {"pp": 2, "dp": 1}},
}


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def parallel(model: nn.Module, name: str, rules: dict[str, str] | None = None, **options: Any) -> nn.Module:
    if name == "tp":
        rules = RULES if rules is None else rules
        options["parameters"] = tuple(
            ParameterRule(pattern=key, placement={"tp": value}) for key, value in rules.items()
        )
    if name == "pp":
        options["pipeline"] = PipelineRule(stages=(("emb", "a"), ("b",)), microbatches=2)
    return mw.parallelize(model, ParallelPlan(world_size=2, **PLANS[name], **options))


def told(call: Callable[[], Any]) -> str:
    """The line of our error that a call raises."""
    try:
        call()
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"not ours: {type(error).__name__}: {error}"
    return "nothing"


def compiled_models() -> Iterator[tuple[str, nn.Module]]:
    yield "torch.jit", torch.jit.script(small())
    yield "torch.jit", torch.jit.trace(small(), ids())
    model = small()
    model.b = torch.jit.script(model.b)
    yield "module 'b'", model
    model = small()
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    yield "torch.compile", model


def compiled(rank: int, size: int, name: str) -> list[tuple[str, str]]:
    """Expected words and errors of scripted models and compiled functions, and of parallel models that are compiled."""
    errors = [(words, told(functools.partial(parallel, model, name))) for words, model in compiled_models()]
    model: Any = parallel(small(), name)
    x, weight = ids(), model.a.weight.detach()
    for call in (
        lambda: torch.compile(model, backend="eager")(x),
        lambda: torch.compile(model.b, backend="eager"),
        lambda: model.compile(backend="eager"),
        lambda: model.a.compile(backend="eager"),
        lambda: torch.compile(lambda x: model(x), backend="eager")(x),
        lambda: torch.jit.script(model),
        lambda: torch.jit.trace(model, x),
        lambda: torch.jit.trace(model.b, torch.ones(2, 12)),
        lambda: torch.jit.trace(lambda y: y @ weight, torch.ones(2, 12)),
    ):
        errors.append(("was given a parallel model", told(call)))
    # the model still runs
    torch.testing.assert_close(model(x).full_tensor(), small()(x))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PLANS))
def test_compiled_and_scripted_modules_are_refused_in_one_line(rank_pool: RankPool, name: str) -> None:
    for errors in rank_pool.run(2, compiled, name, timeout=100):
        for words, error in errors:
            assert error.startswith("UnsupportedError: ") and words in error and "\n" not in error
            assert "use the ordinary module, without torch.compile and torch.jit" in error


def wrapped(rank: int, size: int, name: str) -> list[str]:
    """Errors of tools that would distribute a parallel model, or a part of it, again."""
    model: Any = parallel(small(), name)
    mesh = init_device_mesh("cpu", (size,))
    errors = [
        told(lambda: nn.parallel.DistributedDataParallel(model)),
        told(lambda: nn.parallel.DistributedDataParallel(model.b)),
        told(lambda: FullyShardedDataParallel(model, device_id=torch.device("cpu"))),
        told(lambda: fully_shard(model)),
        told(lambda: fully_shard(model.b)),
        told(lambda: fully_shard([model.a, model.b])),
        told(lambda: replicate(model)),
        told(lambda: parallelize_module(model, mesh, {"b": ColwiseParallel()})),
    ]
    # composable activation checkpointing works, of a module in another one too
    early = small()
    checkpointed(early.a)
    early = parallel(early, name)  # type: ignore[assignment]
    if name != "pp":
        for module in (early.b, model.b, model):
            checkpointed(module)
        early(ids()).sum().backward()
    torch.testing.assert_close(model(ids()).full_tensor(), small()(ids()))
    return errors


@pytest.mark.parametrize("name", list(PLANS))
def test_tools_that_would_distribute_it_again_are_refused(rank_pool: RankPool, name: str) -> None:
    for errors in rank_pool.run(2, wrapped, name):
        for error in errors:
            assert error.startswith("UnsupportedError: ") and "leave that call out" in error


def transformed(rank: int, size: int, name: str) -> str:
    """The error of a transform of the parameters of a model."""
    model: Any = parallel(small(), name)

    def loss(parameters: dict[str, Any]) -> Tensor:
        return functional_call(model, parameters, (ids(),)).square().mean()

    return told(lambda: torch.func.grad(loss)(dict(model.named_parameters())))


@pytest.mark.parametrize("name", list(PLANS))
def test_transforms_of_parameters_are_refused_in_one_line(rank_pool: RankPool, name: str) -> None:
    for error in rank_pool.run(2, transformed, name):
        assert error.startswith("UnsupportedError: ") and "\n" not in error


def transformed_inputs(rank: int, size: int, name: str | None) -> Any:
    """Transforms of inputs, for which parameters are constants; and the gradient of one along a parameter."""
    model: Any = small() if name is None else parallel(small(), name)
    rows = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(2))

    def loss(row: Tensor) -> Tensor:
        return model.b(torch.relu(model.a(row))).square().mean()  # type: ignore[no-any-return]

    def values() -> list[Tensor]:
        whole, by_row = torch.func.grad(loss)(rows), torch.func.vmap(torch.func.grad(loss))(rows)
        by_row.square().sum().backward()
        gradient = model.a.weight.grad
        return [whole.detach(), by_row.detach(), gradient.full_tensor() if name else gradient]

    return values() if name != "pp" else told(values)


@pytest.mark.parametrize("name", list(PLANS))
def test_transforms_of_inputs_have_the_values_of_one_device(rank_pool: RankPool, name: str) -> None:
    expected = transformed_inputs(0, 1, None)
    for result in rank_pool.run(2, transformed_inputs, name):
        if name == "pp":
            assert result.startswith("UnsupportedError: ") and "full_tensor()" in result
        else:
            torch.testing.assert_close(result, expected)


def mapped(rank: int, size: int, name: str) -> Any:
    """A model over the elements of a batch of batches."""
    results: list[Tensor] = []
    error = told(lambda: results.append(torch.func.vmap(parallel(small(), name))(ids()[None]).detach()))
    return results[0] if results else error


@pytest.mark.parametrize("name", ["dp", "tp", "zero3"])
def test_models_inside_of_vmap_are_right_or_refused_in_one_line(rank_pool: RankPool, name: str) -> None:
    for result in rank_pool.run(2, mapped, name):
        if name == "tp":
            torch.testing.assert_close(result, small()(ids())[None].detach())
        else:
            assert result.startswith("UnsupportedError: ") and "vmap" in result


class Bag(Small):
    """Bags of embeddings in place of single ones."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.emb: nn.Module = nn.EmbeddingBag(VOCABULARY, WIDTH, **options)


BAGS: dict[str, dict[str, Any]] = {
    "max": {"mode": "max"},
    "padded sum": {"mode": "sum", "padding_idx": 1},
    "padded max": {"mode": "max", "padding_idx": 1},
    "by frequency": {"mode": "sum", "scale_grad_by_freq": True},
}


def losses(model: nn.Module) -> list[Tensor]:
    """Two steps: loss, and the values of the trained parameters that are here."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    results: list[Any] = []
    for _ in range(2):
        loss = model(ids()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in results]


def same_losses(built: Callable[[], nn.Module], name: str, **options: Any) -> None:
    """The steps of a parallel model are those of one device."""
    single, other = losses(built()), losses(parallel(built(), name, **options))
    torch.testing.assert_close(other, single, rtol=1e-5, atol=1e-7)


def seeded(kind: Callable[..., nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options)


def bags(rank: int, size: int, name: str) -> str:
    for kind, options in BAGS.items():
        if name != "pp" or kind != "by frequency":
            same_losses(functools.partial(seeded, Bag, **options), name)
    return told(lambda: parallel(seeded(Bag, **BAGS["by frequency"]), name))


@pytest.mark.parametrize("name", list(PLANS))
def test_bags_of_embeddings_train(rank_pool: RankPool, name: str) -> None:
    for error in rank_pool.run(2, bags, name):
        if name == "pp":
            assert "'emb' (scale_grad_by_freq) divides gradients by counts of the whole batch" in error
        else:
            assert error == "nothing"


class Int8(nn.Module):
    """A linear layer with an int8 weight and a scale for each row, both parameters without gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def with_int8() -> nn.Module:
    model = small()
    model.a, model.b = Int8(model.a), Int8(model.b)  # type: ignore[assignment]
    return model


def with_quantized_buffer() -> nn.Module:
    model = small()
    model.register_buffer("codes", torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8))
    return model


def quantized(rank: int, size: int, name: str) -> str:
    rules = {"a.weight": "S(0)", "a.scale": "S(0)", "a.bias": "S(0)", "b.weight": "S(1)"}
    same_losses(with_int8, name, rules=rules)
    return told(lambda: parallel(with_quantized_buffer(), name))


@pytest.mark.parametrize("name", list(PLANS))
def test_integer_weights_train_and_quantized_tensors_are_refused(rank_pool: RankPool, name: str) -> None:
    for error in rank_pool.run(2, quantized, name):
        assert error.startswith("UnsupportedError: buffer 'codes' is torch.qint8") and "dequantize()" in error


class Selective(Small):
    """Recomputes its layers, except for the operations that torch's selective checkpointing keeps."""

    def forward(self, x: Tensor) -> Tensor:
        kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.relu.default]
        contexts = functools.partial(create_selective_checkpoint_contexts, kept)
        h = checkpoint(self.a, self.emb(x), use_reentrant=False, context_fn=contexts)
        return checkpoint(self.b, torch.relu(h), use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def selective(rank: int, size: int, name: str) -> None:
    same_losses(functools.partial(seeded, Selective), name)


@pytest.mark.parametrize("name", list(PLANS))
def test_selective_checkpointing_of_torch_trains(rank_pool: RankPool, name: str) -> None:
    rank_pool.run(2, selective, name)


NORMS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight_norm": weight_norm,
    "parametrized": parametrizations.weight_norm,
    "spectral_norm": spectral_norm,
}


def normed(norm: str) -> nn.Module:
    model = small()
    NORMS[norm](model.b)
    return model


def norms(rank: int, size: int, name: str) -> list[str]:
    """Errors of weights that hooks and parametrizations compute before each forward."""
    rules = {"a.weight": "S(0)", "a.bias": "S(0)"}
    return [
        told(functools.partial(same_losses, functools.partial(normed, norm), name, rules=rules))
        for norm in NORMS
    ]


@pytest.mark.parametrize("name", list(PLANS))
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_normed_weights_train(rank_pool: RankPool, name: str) -> None:
    for *plain, spectral in rank_pool.run(2, norms, name):
        assert plain == ["nothing", "nothing"]
        # a power iteration for each microbatch
        written = "PlanError: plan field pipeline.microbatches is 2: module 'b' writes to its 'weight'"
        assert spectral.startswith(written) if name == "pp" else spectral == "nothing"


class Lora(nn.Module):
    """A layer with a low-rank addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.base(x) + self.up(self.down(x))
        return h


def adapted(rank: int, size: int, name: str) -> list[str]:
    """Losses with adapters that were added before and afterwards; the errors of additions under a pipeline."""

    def add(model: Any) -> Any:
        model.a = Lora(model.a)
        return model

    rules = {"a.base.weight": "S(0)", "a.base.bias": "S(0)", "b.weight": "S(1)"}
    same_losses(lambda: add(small()), name, rules=rules)
    model: Any = parallel(small(), name)
    if name != "pp":
        torch.testing.assert_close(losses(add(model)), losses(add(small())), rtol=1e-5, atol=1e-7)
        return []
    errors = [
        told(lambda: add(model)),
        told(lambda: setattr(model.b, "bias", nn.Parameter(torch.zeros(WIDTH)))),
        told(lambda: model.b.register_parameter("more", nn.Parameter(torch.zeros(WIDTH)))),
        told(lambda: model.add_module("criterion", nn.MSELoss())),
    ]
    # nothing changes
    model.a = model.a
    torch.testing.assert_close(model(ids()).full_tensor(), small()(ids()))
    return errors


@pytest.mark.parametrize("name", list(PLANS))
def test_adapters_train_and_are_refused_after_a_division_into_stages(rank_pool: RankPool, name: str) -> None:
    for errors in rank_pool.run(2, adapted, name):
        assert len(errors) == (4 if name == "pp" else 0)
        for error in errors:
            assert error.startswith("UsageError: ") and error.endswith("new heads) before parallelize()")


class Resizable(Small):
    """With the methods that transformers has for the size of the vocabulary."""

    def get_input_embeddings(self) -> nn.Module:
        return self.emb

    def resize_token_embeddings(self, new_num_tokens: int | None = None) -> nn.Module:
        raise AssertionError("a parallel model calls its own")


def resized(rank: int, size: int, name: str) -> list[str]:
    model: Any = parallel(seeded(Resizable), name)
    assert model.resize_token_embeddings() is model.resize_token_embeddings(VOCABULARY) is model.emb
    assert model.resize_token_embeddings(pad_to_multiple_of=4) is model.emb
    return [
        told(lambda: model.resize_token_embeddings(16)),
        told(lambda: model.resize_token_embeddings(None, 8)),
    ]


@pytest.mark.parametrize("name", list(PLANS))
def test_resizing_the_vocabulary_afterwards_says_resize_before(rank_pool: RankPool, name: str) -> None:
    for errors in rank_pool.run(2, resized, name):
        for error in errors:
            assert error.startswith(
                "UsageError: resize_token_embeddings(16) of a parallel model with 12 token embeddings"
            )
            assert error.endswith("resize before parallelize()")
