"""Two sequences, aligned: longest common and longest increasing subsequences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a longest run of pairs that rises in both numbers, out of pairs that rise in the first. O(n log n)."""
    ends, at, before = list[int](), list[int](), list[int]()
    for k, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        before.append(at[length - 1] if length else -1)
        ends[length : length + 1] = [j]
        at[length : length + 1] = [k]
    run = []
    k = at[-1] if at else -1
    while k != -1:
        run.append(pairs[k])
        k = before[k]
    return run[::-1]


def common(a: Sequence[str], b: Sequence[str], budget: int) -> tuple[list[tuple[int, int]], int]:
    """Return a longest common subsequence as pairs of positions, and its number of steps; None over budget.

    E. Myers, "An O(ND) Difference Algorithm and Its Variations", 1986: the greedy algorithm.
    """
    furthest = {1: 0}
    trail: list[dict[int, int]] = []
    spent = 0
    for edits in range(len(a) + len(b) + 1):
        trail.append(dict(furthest))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
            x = furthest[k + 1] if down else furthest[k - 1] + 1
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
                spent += 1
            furthest[k] = x
            if x >= len(a) and x - k >= len(b):
                return _walked(trail, len(a), len(b)), spent
        spent += 2 * edits + 1
        if spent > budget:
            return [], spent
    return [], spent


def _walked(trail: Sequence[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    """Return the diagonal steps of the path at whose end the trail stops."""
    pairs: list[tuple[int, int]] = []
    for edits in range(len(trail) - 1, -1, -1):
        furthest, k = trail[edits], x - y
        down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
        before = k + 1 if down else k - 1
        start = furthest[before]
        while x > start and y > start - before:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = start, start - before
    return pairs[::-1]
