"""Lines of ``metrics.jsonl`` that are compared between runs."""


def comparable(line):
    """Return the names of what is learnt and measured of it: not time and memory, which are the machine's."""
    return {name for name in line if name not in ("seconds_per_step", "time") and not name.startswith("memory/")}
