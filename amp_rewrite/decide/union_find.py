"""Union-find: sets of numbers that are merged step by step."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class UnionFind:
    """Disjoint sets of members, each set with one member as its root."""

    def __init__(self, members: Iterable[int]) -> None:
        self.parent = {v: v for v in members}

    def root(self, v: int) -> int:
        """Return the root of the set of a member."""
        while self.parent[v] != v:
            self.parent[v] = self.parent[self.parent[v]]
            v = self.parent[v]
        return v

    def join(self, numbers: Iterable[int]) -> None:
        """Merge the sets of all numbers that are members."""
        members = [v for v in numbers if v in self.parent]
        for v in members[1:]:
            self.parent[self.root(v)] = self.root(members[0])

    def groups(self) -> Collection[list[int]]:
        """Return the sets, with members in their order."""
        groups: dict[int, list[int]] = {}
        for v in self.parent:
            groups.setdefault(self.root(v), []).append(v)
        return groups.values()
