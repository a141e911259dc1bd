"""The padding of torch's encoders without gradients: zeros, as on one device.

There `nn.TransformerEncoder` leaves out the padded tokens (in a nested tensor) and fills them with zeros after its last layer.
No layer of a parallel model takes nested tensors. So the layers compute all tokens, and the zeros are written here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright_dtensor.errors import UnsupportedError

_FLAG = "use_nested_tensor"
_SIGNATURE = inspect.signature(nn.TransformerEncoder.forward)


def install_padding(model: nn.Module, microbatches: int) -> None:
    """Make the encoders of a model give the padding of one device; `microbatches`: of a batch."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and getattr(module, _FLAG, False):
            padding = _Padding(microbatches > 1)
            module.register_forward_pre_hook(padding.begin, with_kwargs=True)
            module.register_forward_hook(padding.end, always_call=True)


@dataclass
class _Padding:
    """Hooks of one encoder. `divided`: a call may see a part of the batch, `undo`: what to call at the end of a forward."""

    divided: bool
    undo: list[Callable[[], Any]] = field(default_factory=list)

    def begin(self, encoder: nn.TransformerEncoder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep torch from making a nested tensor, and where it would have made one, fill the padding after the last layer."""
        if not encoder.use_nested_tensor:
            return
        given = _SIGNATURE.bind(encoder, *args, **kwargs).arguments
        src, mask = given["src"], given.get("src_key_padding_mask")
        if mask is None or given.get("mask") is not None or not _takes_nested(encoder, src):
            return
        encoder.use_nested_tensor = False
        self.undo.append(partial(setattr, encoder, _FLAG, True))
        padded = mask.bool()
        if mask.is_floating_point() and bool((padded & mask.isfinite()).any()):
            raise UnsupportedError(
                "src_key_padding_mask of nn.TransformerEncoder has numbers between 0 and -inf, whose tokens torch leaves out here; "
                "use a boolean mask, or enable_nested_tensor=False"
            )
        inside = bool((padded[:, :-1] & ~padded[:, 1:]).any())
        if inside and (self.divided or not getattr(encoder, "mask_check", True)):
            # torch asks whether all rows of the batch have their padding at the end
            raise UnsupportedError(
                "src_key_padding_mask of nn.TransformerEncoder has padding before a token, in one microbatch of several or with "
                "mask_check=False; use enable_nested_tensor=False, or pad at the end"
            )
        if not inside:
            filled = padded.unsqueeze(-1)

            def fill(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
                return out.masked_fill(filled, 0.0)

            self.undo.append(encoder.layers[-1].register_forward_hook(fill).remove)

    def end(self, encoder: nn.TransformerEncoder, args: Any, out: Any) -> None:
        """Leave the encoder as it was."""
        while self.undo:
            self.undo.pop()()


def _takes_nested(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether torch takes nested tensors for this input, as its `forward` asks."""
    first = encoder.layers[0]
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (src, *first.parameters()))
    fast = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    return fast and not grad and not first.training and src.dim() == 3
