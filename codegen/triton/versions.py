"""The names that Gluon, Triton's language of warp groups, has had in the versions that serve: 3.6 to 3.9."""

import functools
import importlib.metadata
from collections.abc import Mapping

OLDEST = (3, 6)


@functools.cache
def installed() -> tuple[int, int]:
    """The version of Triton; (0, 0) without one."""
    try:
        major, minor, *_ = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


def names(version: tuple[int, int]) -> Mapping[str, str | list[str]]:
    """Names in kernels, and what they are called in a version."""
    return {
        "COPY_IN": "tma.async_load" if version >= (3, 9) else "tma.async_copy_global_to_shared",
        "BARRIER": ["gl.barrier()" if version >= (3, 7) else "gl.thread_barrier()"],
    }
