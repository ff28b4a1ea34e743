"""In which order items of a plan run, and which of several processes runs which."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain, zip_longest


def by_shards(needs: Mapping[int, Collection[str]]) -> list[int]:
    """Items in an order in which few shards are needed at a time, from the shards that each reads."""
    place = {
        file: position for position, file in enumerate(sorted({file for files in needs.values() for file in files}))
    }

    def key(number: int) -> tuple[int, int, int]:
        places = [place[file] for file in needs[number]]
        return max(places, default=-1), min(places, default=-1), number

    return sorted(needs, key=key)


def apart(order: Sequence[int], workers: int) -> list[int]:
    """The order dealt out so that workers, each taking the next, are far from each other.

    Neighbours are written to the same file, and one writer at a time holds a file.
    """
    each = -(-len(order) // workers) or 1
    lanes = [order[at : at + each] for at in range(0, len(order), each)]
    return [number for number in chain.from_iterable(zip_longest(*lanes)) if number is not None]


def shares(needs: Sequence[Collection[str]], sizes: Sequence[int], count: int) -> list[int]:
    """Which of `count` shares, from 1, runs each item: about as many bytes for each, from as few shards as may be.

    Args:
        needs: the shards that each item reads.
        sizes: bytes that each item reads.
        count: of shares.
    """
    order = by_shards(dict(enumerate(needs)))
    weights = [sizes[number] + 1 for number in order]  # an item that reads nothing is work too
    ends = list(accumulate(weights))
    owners = [0] * len(order)
    for number, end, weight in zip(order, ends, weights, strict=True):
        owners[number] = (2 * end - weight) * count // (2 * ends[-1]) + 1  # where its middle lies
    return owners
