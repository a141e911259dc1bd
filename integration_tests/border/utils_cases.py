"""Every public function of `torch.nn.utils`, on parameters, gradients and layers of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.utils as utils
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, rnn, stateless

from .cases import Case
from .subjects import Subject

AREA = "torch.nn.utils"
MODULES = {
    "": utils,
    "parametrize.": parametrize,
    "parametrizations.": parametrizations,
    "prune.": prune,
    "rnn.": rnn,
    "stateless.": stateless,
}


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x: Any) -> Any:
        return x * 2

    def right_inverse(self, x: Any) -> Any:
        return x / 2


def _running_statistics() -> tuple[Any, ...]:
    """Mean, variance, eps, weight and bias of a batch norm of 8 channels."""
    return torch.zeros(8), torch.ones(8), 1e-5, torch.ones(8), torch.ones(8)


def _parameters(made: Subject) -> list[Any]:
    return list(made.model.parameters())


def _gradients(made: Subject) -> list[Any]:
    return [p.grad for p in made.model.parameters()]


def _with_weights(made: Subject) -> Any:
    weights = {name: p.detach() * 0.5 for name, p in made.model.named_parameters()}
    return weights, (made.ids,)


def _parametrized(made: Subject, name: str = "b", tensor: str = "weight") -> Any:
    layer = getattr(made.model, name)
    parametrize.register_parametrization(layer, tensor, Doubled())
    return layer


def _removed(made: Subject) -> Any:
    layer = _parametrized(made)
    parametrize.remove_parametrizations(layer, "weight")
    return layer.weight


def _vector(made: Subject) -> Any:
    return utils.parameters_to_vector(_parameters(made))


def _pruned(made: Subject, remove: bool = False) -> Any:
    prune.l1_unstructured(made.model.b, "weight", 0.3)
    if remove:
        prune.remove(made.model.b, "weight")
    return made.model.b.weight


def _rows(made: Subject) -> list[Any]:
    x = made.activation()
    return [x[0], x[1, :3], x[2, :2]]


def _packed(made: Subject) -> Any:
    return rnn.pack_padded_sequence(made.activation(), torch.tensor([5, 4, 2, 1]), batch_first=True)


def _norm(made: Subject, kind: Callable[..., Any], remove: Callable[..., Any] | None = None) -> Any:
    layer = kind(made.model.b)
    if remove is not None:
        remove(layer)
    return layer.weight


Use = Callable[[Subject], Any]
USES: dict[str, list[Use]] = {
    "clip_grad_norm": [lambda s: utils.clip_grad_norm(_parameters(s), 0.1)],
    "clip_grad_norm_": [
        lambda s: utils.clip_grad_norm_(_parameters(s), 0.01),
        lambda s: utils.clip_grad_norm_(_parameters(s), 0.01, norm_type=float("inf")),
        lambda s: utils.clip_grad_norm_(s.model.b.parameters(), 0.01, norm_type=1.0, foreach=False),
        lambda s: utils.clip_grad_norm_(s.model.c.weight, 0.01, error_if_nonfinite=True),
        lambda s: utils.clip_grad_norm_(_parameters(s), 0.01, foreach=True),
    ],
    "clip_grad_value_": [
        lambda s: utils.clip_grad_value_(_parameters(s), 0.001),
        lambda s: utils.clip_grad_value_(_parameters(s), 0.001, foreach=False),
    ],
    "clip_grads_with_norm_": [
        lambda s: utils.clip_grads_with_norm_(_parameters(s), 0.01, utils.get_total_norm(_gradients(s))),
        lambda s: utils.clip_grads_with_norm_(_parameters(s), 0.01, torch.tensor(2.0)),
    ],
    "get_total_norm": [
        lambda s: utils.get_total_norm(_gradients(s)),
        lambda s: utils.get_total_norm(_parameters(s), norm_type=3.0),
        lambda s: utils.get_total_norm(_gradients(s), norm_type=float("inf"), foreach=False),
    ],
    "parameters_to_vector": [_vector, lambda s: utils.parameters_to_vector(s.model.b.parameters())],
    "vector_to_parameters": [
        lambda s: utils.vector_to_parameters(_vector(s).detach() * 0.5, _parameters(s)),
        lambda s: utils.vector_to_parameters(torch.linspace(-0.3, 0.3, 384), _parameters(s)),
    ],
    "convert_conv2d_weight_memory_format": [
        lambda s: utils.convert_conv2d_weight_memory_format(s.model, torch.channels_last) and None
    ],
    "convert_conv3d_weight_memory_format": [
        lambda s: utils.convert_conv3d_weight_memory_format(s.model, torch.channels_last_3d) and None
    ],
    "fuse_conv_bn_eval": [
        lambda s: utils.fuse_conv_bn_eval(nn.Conv1d(2, 8, 1).eval(), nn.BatchNorm1d(8).eval())
    ],
    "fuse_conv_bn_weights": [
        lambda s: utils.fuse_conv_bn_weights(
            s.model.b.weight[:, :, None, None],
            s.model.b.bias,
            *_running_statistics(),
        )
    ],
    "fuse_linear_bn_eval": [lambda s: utils.fuse_linear_bn_eval(s.model.b.eval(), nn.BatchNorm1d(8).eval())],
    "fuse_linear_bn_weights": [
        lambda s: utils.fuse_linear_bn_weights(
            s.model.b.weight,
            s.model.b.bias,
            *_running_statistics(),
        )
    ],
    "weight_norm": [lambda s: _norm(s, utils.weight_norm)],
    "remove_weight_norm": [lambda s: _norm(s, utils.weight_norm, utils.remove_weight_norm)],
    "spectral_norm": [lambda s: _norm(s, utils.spectral_norm)],
    "remove_spectral_norm": [lambda s: _norm(s, utils.spectral_norm, utils.remove_spectral_norm)],
    "skip_init": [lambda s: tuple(utils.skip_init(nn.Linear, 12, 8).weight.shape)],
    "parametrize.ParametrizationList": [
        lambda s: parametrize.ParametrizationList([Doubled()], s.model.b.weight)
    ],
    "parametrize.cached": [lambda s: _cached(s)],
    "parametrize.is_parametrized": [
        lambda s: parametrize.is_parametrized(s.model.b),
        lambda s: parametrize.is_parametrized(_parametrized(s)),
    ],
    "parametrize.register_parametrization": [
        lambda s: _parametrized(s).weight,
        lambda s: _parametrized(s, "a", "bias").bias,
        lambda s: _parametrized(s, "c", "scale").scale,
    ],
    "parametrize.remove_parametrizations": [_removed],
    "parametrize.type_before_parametrizations": [
        lambda s: parametrize.type_before_parametrizations(s.model.b).__name__
    ],
    "parametrize.transfer_parametrizations_and_params": [
        lambda s: parametrize.transfer_parametrizations_and_params(nn.Linear(12, 8), s.model.b) and None
    ],
    "parametrizations.orthogonal": [
        lambda s: parametrizations.orthogonal(s.model.c).weight,
        lambda s: parametrizations.orthogonal(s.model.b, orthogonal_map="cayley").weight,
    ],
    "parametrizations.spectral_norm": [lambda s: _norm(s, parametrizations.spectral_norm)],
    "parametrizations.weight_norm": [lambda s: _norm(s, parametrizations.weight_norm)],
    "prune.custom_from_mask": [
        lambda s: prune.custom_from_mask(s.model.b, "bias", torch.tensor([1.0, 0.0] * 4)).bias
    ],
    "prune.global_unstructured": [
        lambda s: prune.global_unstructured(
            [(s.model.a, "weight"), (s.model.b, "weight")], pruning_method=prune.L1Unstructured, amount=0.3
        )
    ],
    "prune.identity": [lambda s: prune.identity(s.model.b, "weight").weight],
    "prune.is_pruned": [lambda s: prune.is_pruned(s.model)],
    "prune.l1_unstructured": [_pruned],
    "prune.ln_structured": [lambda s: prune.ln_structured(s.model.b, "weight", 0.5, 2, 0).weight],
    "prune.random_structured": [lambda s: prune.random_structured(s.model.b, "weight", 0.5, 1).weight],
    "prune.random_unstructured": [lambda s: prune.random_unstructured(s.model.b, "weight", 0.3).weight],
    "prune.remove": [lambda s: _pruned(s, True)],
    "prune.L1Unstructured": [lambda s: prune.L1Unstructured(0.3).prune(s.model.b.weight)],
    "prune.LnStructured": [lambda s: prune.LnStructured(0.5, 1).prune(s.model.b.weight)],
    "prune.RandomUnstructured": [lambda s: prune.RandomUnstructured(0.3).prune(s.model.b.weight)],
    "prune.RandomStructured": [lambda s: prune.RandomStructured(0.5).prune(s.model.b.weight)],
    "prune.CustomFromMask": [lambda s: prune.CustomFromMask(torch.ones(8, 12)).prune(s.model.b.weight)],
    "prune.Identity": [lambda s: prune.Identity().prune(s.model.b.weight)],
    "prune.PruningContainer": [lambda s: prune.PruningContainer(prune.L1Unstructured(2)) and None],
    "prune.BasePruningMethod": [lambda s: prune.BasePruningMethod.__name__],
    "rnn.PackedSequence": [lambda s: list(_packed(s))],
    "rnn.invert_permutation": [lambda s: rnn.invert_permutation(s.model.b.bias.detach().argsort())],
    "rnn.pack_padded_sequence": [lambda s: _packed(s).data],
    "rnn.pad_packed_sequence": [lambda s: rnn.pad_packed_sequence(_packed(s), batch_first=True)[0]],
    "rnn.pad_sequence": [lambda s: rnn.pad_sequence(_rows(s), batch_first=True)],
    "rnn.unpad_sequence": [
        lambda s: rnn.unpad_sequence(s.activation(), torch.tensor([5, 4, 2, 1]), batch_first=True)
    ],
    "rnn.pack_sequence": [lambda s: rnn.pack_sequence(_rows(s)).data],
    "rnn.unpack_sequence": [lambda s: rnn.unpack_sequence(rnn.pack_sequence(_rows(s)))],
    "stateless.functional_call": [lambda s: stateless.functional_call(s.model, *_with_weights(s))],
}


def _cached(made: Subject) -> Any:
    layer = _parametrized(made)
    with parametrize.cached():
        return layer.weight + layer.weight


def names() -> list[str]:
    """The public functions and classes."""
    public = []
    for prefix, module in MODULES.items():
        listed = getattr(module, "__all__", None) or [
            name
            for name, x in vars(module).items()
            if not name.startswith("_")
            and callable(x)
            and getattr(x, "__module__", "").startswith("torch.nn.utils")
        ]
        public += [f"{prefix}{name}" for name in listed]
    return [name for name in public if f"{name}." not in MODULES]


def utils_cases() -> Iterator[Case]:
    """With gradients there, and a step of training after it."""
    for name, uses in USES.items():
        for i, use in enumerate(uses):
            yield Case(AREA, f"utils.{name}", str(i + 1), use, "backward", trains=not name.startswith("rnn."))
