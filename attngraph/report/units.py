"""Numbers of bytes as people read them."""

from __future__ import annotations


def binary(count: float) -> str:
    """A number of bytes in the largest binary unit of which there is at least one."""
    units = ["TiB", "GiB", "MiB", "KiB"]
    if count < 1024:
        return f"{count:,.0f} bytes"
    while (count := count / 1024) >= 1024 and len(units) > 1:
        units.pop()
    return f"{count:,.1f} {units[-1]}"
