"""Arguments that are quantities with units, such as 80GB, 3.35TB/s or 989T, read without torch."""

from __future__ import annotations

import argparse
import math
import re

_TEXT = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([kKMGTPE]?)(i?)(B|B/s|FLOPS|FLOP/s)?")
_POWERS = "kMGTPE"


def quantity(text: str) -> float:
    """The number that a text such as 80GB, 80GiB, 3.35TB/s or 989T says.

    Raises:
        argparse.ArgumentTypeError: it says none, or nothing positive.
    """
    found = _TEXT.fullmatch(text.strip())
    value = 0.0
    if found and not (found[3] and not found[2]):
        power = _POWERS.index(found[2].replace("K", "k")) + 1 if found[2] else 0
        value = float(found[1]) * (1024.0 if found[3] else 1000.0) ** power
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a positive number, with a unit such as 80GB, 80GiB, 450GB/s or 989T, found {text!r}"
        )
    return value
