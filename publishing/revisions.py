"""Every kept checkpoint as a branch of the repository, so that how the model learned can be studied (as Pythia's can)."""

from publishing.source import Source


def branch_of(source: Source) -> str:
    """`step0001000-tokens33M`: sorts by step, and says how much text it has seen."""
    return f"step{source.step:07d}-tokens{in_short(source.tokens)}"


def in_short(number: int) -> str:
    """With two digits at least and the largest unit that leaves them: 33M, 1740K, 2B is 2000M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= 10 * size:
            return f"{round(number / size)}{unit}"
    return str(number)
