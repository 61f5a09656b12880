"""Numbers and names in sentences."""

import os


def counted(number: float, noun: str) -> str:
    """`1 queue`, `2 queues`, `2 batches`."""
    ending = "es" if noun.endswith("tch") else "s"
    return f"{number:,g} {noun}{'' if number == 1 else ending}"


def readable(name: str) -> str:
    """A name with what is not UTF-8 in it replaced: nothing can draw or print that."""
    return os.fsencode(name).decode("utf-8", "replace")
