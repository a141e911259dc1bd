"""All models of all packages, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from architectures.subject import SEED, in_dtype, seed_all
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright_parallel.verification.verify import find_loss

from .attention import ATTENTION
from .convolutions import CONVOLUTIONS
from .generative import GENERATIVE
from .image_transformers import IMAGE_TRANSFORMERS
from .language import LANGUAGE
from .making import Catalogue, Made
from .science import SCIENCE
from .series import SERIES

FIELDS: dict[str, Catalogue] = {
    "Generative models": GENERATIVE,
    "Graphs, molecules, physics": SCIENCE,
    "Tables, series, audio": SERIES,
    "Language models": LANGUAGE,
    "Attention and other layers of sequences": ATTENTION,
    "Networks of images": CONVOLUTIONS,
    "Transformers and mixers of images": IMAGE_TRANSFORMERS,
}


@dataclass(frozen=True)
class Model:
    """One model of a package; a `Subject` of the comparison with one device."""

    field: str
    package: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.package}: {self.name}"

    def _make(self) -> Made:
        declare_vision()
        make: Callable[[], Made] = FIELDS[self.field][self.package][self.name]
        seed_all(SEED)
        return make()

    def model(self, dtype: torch.dtype) -> nn.Module:
        model = self._make()[0].train()
        if dtype == torch.float32:
            return model
        for module in model.modules():
            # some keep tensors that are neither parameters nor buffers
            tensors = {name: x for name, x in vars(module).items() if type(x) is Tensor}
            vars(module).update({name: _double(x) for name, x in tensors.items()})
        return model._apply(_double)

    def batch(self, model: nn.Module, dtype: torch.dtype) -> Any:
        with torch.random.fork_rng():
            return in_dtype(self._make()[1], dtype)

    def loss(self, output: Any, batch: Any) -> Tensor:
        """The model's own loss, or one that depends on every element of its output differently."""
        loss = find_loss(output)
        return _sum_of_parts(output) if loss is None else loss


def _double(value: Tensor) -> Tensor:
    """In double precision; complex numbers stay complex, which is not so by `Module.double`."""
    return value.to(torch.promote_types(value.dtype, torch.float64)) if _is_inexact(value) else value


def _is_inexact(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def models() -> list[Model]:
    """Every model, by field and package."""
    return [
        Model(field, package, name)
        for field, catalogue in FIELDS.items()
        for package, by_name in catalogue.items()
        for name in by_name
    ]


def _sum_of_parts(output: Any) -> Tensor:
    parts = [
        x
        for x in tree_leaves(output)
        if isinstance(x, Tensor) and x.requires_grad and x.numel() and _is_inexact(x)
    ]
    parts = [torch.view_as_real(x) if x.is_complex() else x for x in parts]
    if not parts:
        raise ValueError(f"the model's output, a {type(output).__name__}, has no value that requires grad")
    losses = []
    for x in parts:
        weights = torch.arange(x.numel(), dtype=x.dtype).cos().reshape(x.shape)
        losses.append((x * weights).mean() + x.square().mean())
    return torch.stack(losses).sum()


@functools.cache
def declare_vision() -> torch.library.Library | None:
    """Declare the two operators that torchvision's import needs, where its compiled part does not fit this torch.

    That part is built for a torch with CUDA. None of the models here calls its operators.
    """
    if torch.version.cuda:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
