"""Aligned columns and readable amounts, for people."""

from collections.abc import Sequence


def align(lines: Sequence[Sequence[str]]) -> str:
    """Cells padded to columns; every line has as many cells as the first."""
    return "\n".join(aligned(lines, left=len(lines[0])))


def aligned(lines: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """Does as `align`, line by line; only the first `left` columns are flush left."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    sides = [str.ljust if column < left else str.rjust for column in range(len(widths))]
    return [
        "  ".join(
            side(cell, width) for cell, width, side in zip(line, widths, sides, strict=True)
        ).rstrip()
        for line in lines
    ]


def size(nbytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def span(lo: int, hi: int) -> str:
    """A range with both ends; "-" where there is nothing (-1)."""
    return "-" if hi < 0 else f"{lo}..{hi}" if lo != hi else str(lo)
