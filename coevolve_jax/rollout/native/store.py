"""Where the in-process engine keeps conversations' keys and values: what `RowStore` and `PageStore` have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from coevolve_jax.models.paged import PAGE
from coevolve_jax.rollout.native.conversation import Conversation

ROWS, COLUMNS = 16, 256  # of the smallest cache


class Store(Protocol):
    """A cache, and what of which conversation lies where in it.

    cache: as the programs take it, None until it is needed. rows, columns: of what is decoded in this tick.
    """

    cache: Any
    rows: int
    columns: int

    def admit(
        self, asked: Sequence[Conversation], held: Sequence[Conversation]
    ) -> tuple[Sequence[Conversation], Sequence[Conversation]]:
        """Makes room for a tick of those that are `asked`, some of all that are `held`, and gives each a row.

        Returns those that there is room for, in order, and which of them have their prompt from another: that one is to
        be fed before they are.
        """
        ...

    def share(self) -> None:
        """Gives these what the other one has of the prompt, when it was fed."""
        ...

    def groups(self, behind: Sequence[Conversation]) -> Iterable[Sequence[Conversation | None]]:
        """The conversations in groups that are fed at once; None is nobody."""
        ...

    def feed(
        self,
        params: Any,
        group: Sequence[Conversation | None],
        tokens: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """Computes the keys and values of tokens [R, T] at these positions of the group's conversations. Nothing is written
        at position `columns`."""
        ...

    def open(self, admitted: Sequence[Conversation]) -> Any:
        """The cache with their rows, for a program that gives it back."""
        ...

    def experts(self, conversation: Conversation) -> np.ndarray:
        """Of its tokens that are in the cache, int16 [cached, A, K]; where they are recorded."""
        ...

    def free(self, conversation: Conversation) -> None:
        """It is over, or waits without its keys and values."""
        ...

    def drop(self) -> None:
        """Forgets everything, and gives the memory back."""
        ...


def least_tokens(longest: int, parts: int) -> int:
    """That pages must hold for conversations of `longest` tokens: each of the parts that they lie in has one of these."""
    return -(-longest // PAGE) * PAGE * parts


def part_pages(tokens: int, longest: int, parts: int) -> int:
    """How many pages each part has of `tokens`. Raises ValueError where they would not hold the longest conversation."""
    count = tokens // PAGE // parts
    if count * PAGE < longest:
        raise ValueError(
            f"config.engine.cache_tokens is {tokens:,}, of which each of the mesh's {parts} part(s) has {count * PAGE:,}, "
            f"and one conversation may have {longest:,}: set it to {least_tokens(longest, parts)} or more."
        )
    return count


def bucket(n: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds n."""
    return next(s for s in sizes if s >= n)


def ladder(low: int, high: int, factor: int) -> tuple[int, ...]:
    """low, factor * low, ... and high itself. Every size is a program to compile, so there are few."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return (*sizes, high)


def runs(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """`size` items at a time, of the last perhaps fewer."""
    return [items[i : i + size] for i in range(0, len(items), size)]
