"""Numbers that programs print, and how far two runs of them are apart."""

import re
from collections.abc import Sequence

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)\b"
PRINTED = re.compile(rf"(?:loss|\bmean|\bmax)\b[ \t]*[:=]?[ \t]*({NUMBER})", re.IGNORECASE)


def losses(stdout: str) -> list[float]:
    """Every number printed after a word that ends with "loss", or after "mean" or "max"."""
    return [float(number) for number in PRINTED.findall(stdout)]


def max_relative_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference of two series, each relative to the larger of the two numbers."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} numbers against {len(b)}")
    return max(map(_relative_difference, a, b), default=0.0)


def _relative_difference(x: float, y: float) -> float:
    if x == y:
        return 0.0
    difference = abs(x - y) / max(abs(x), abs(y))
    return difference if difference == difference else float("inf")
