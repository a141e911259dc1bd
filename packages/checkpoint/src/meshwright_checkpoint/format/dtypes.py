"""Names of dtypes in safetensors files."""

from __future__ import annotations

from types import MappingProxyType

import torch

from meshwright_dtensor.errors import UnsupportedError

DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "C64": torch.complex64,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
_NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


def dtype_name(dtype: torch.dtype, of: str) -> str:
    """The safetensors name of a dtype; `of` names the tensor in the error. Raises UnsupportedError."""
    name = _NAMES.get(dtype)
    if name is None:
        raise UnsupportedError(
            f"{of} has dtype {dtype}, which safetensors files cannot hold; convert it to one of {', '.join(DTYPES)}"
        )
    return name
