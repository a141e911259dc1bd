"""What torch's inductor needs on a machine."""

from __future__ import annotations


def inductor_lacks(device: str) -> str | None:
    """Why inductor cannot generate code for a type of device here; None where it can.

    Imports inductor, which takes about a second.
    """
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    if get_scheduling_for_device(device) is None:
        return f"torch's inductor generates no code for {device}"
    if device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError:
            return "torch's inductor finds no C++ compiler here (of the variable CXX, else g++): install one"
        return None
    from torch.utils._triton import has_triton

    return (
        None
        if has_triton()
        else f"torch's inductor needs triton for {device}, which is not installed or has no driver"
    )
