"""The version of a tensor: how often it has been written to in place.

Everything that was computed from a tensor's values and kept asks here whether they may have changed since.
Writes through `.data` are not counted.
"""

from torch import Tensor


def version_of(tensor: Tensor) -> int | None:
    """The version; None for a tensor of `torch.inference_mode()`, whose writes torch does not count."""
    return None if tensor.is_inference() else tensor._version
