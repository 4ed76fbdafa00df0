"""The store of the in-process engine's keys and values: the interface of `RowStore` and `PageStore`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from coevolve_jax.models.paged import PAGE
from coevolve_jax.rollout.native.conversation import Conversation

ROWS, COLUMNS = 16, 256  # the smallest size of a cache


class Store(Protocol):
    """A cache, and the places of conversations in it.

    cache: for the programs, None until it is needed. rows, columns: the size that this tick decodes.
    """

    cache: Any
    rows: int
    columns: int

    def admit(
        self, asked: Sequence[Conversation], held: Sequence[Conversation]
    ) -> tuple[Sequence[Conversation], Sequence[Conversation]]:
        """Makes room for a tick of the conversations `asked`, and gives each a row. held: all conversations.

        Returns the conversations that there is room for, in order, and those of them that share another one's
        prompt. Feed that other one before `share`, and these after it.
        """
        ...

    def share(self) -> None:
        """Copies the shared prompt's keys and values into the sharing conversations."""
        ...

    def groups(self, behind: Sequence[Conversation]) -> Iterable[Sequence[Conversation | None]]:
        """Splits conversations into groups that are fed at once. None marks an empty slot."""
        ...

    def feed(
        self,
        params: Any,
        group: Sequence[Conversation | None],
        tokens: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """Computes the keys and values of tokens [R, T] at positions [R, T] of the group's conversations.

        Position `columns` is padding: nothing is written there.
        """
        ...

    def open(self, admitted: Sequence[Conversation]) -> Any:
        """Returns the cache with their rows, for a program that takes it (donated) and returns it."""
        ...

    def experts(self, conversation: Conversation) -> np.ndarray:
        """Returns the experts of its tokens in the cache, int16 [cached, A, K], where they are recorded."""
        ...

    def free(self, conversation: Conversation) -> None:
        """Gives back the place of a conversation that has ended, or waits without its keys and values."""
        ...

    def drop(self) -> None:
        """Forgets all conversations and gives the memory back."""
        ...


def least_tokens(longest: int, parts: int) -> int:
    """Returns the fewest tokens that pages may hold: in each part, one conversation of `longest` tokens."""
    return -(-longest // PAGE) * PAGE * parts


def part_pages(tokens: int, longest: int, parts: int) -> int:
    """Returns the number of pages per part. ValueError where they cannot hold the longest conversation."""
    count = tokens // PAGE // parts
    if count * PAGE < longest:
        raise ValueError(
            f"config.engine.cache_tokens is {tokens:,}, of which each of the mesh's {parts} part(s) has "
            f"{count * PAGE:,}, and one conversation may have {longest:,}: set it to "
            f"{least_tokens(longest, parts)} or more."
        )
    return count


def bucket(n: int, sizes: Sequence[int]) -> int:
    """Returns the smallest of the ascending `sizes` that holds n."""
    return next(s for s in sizes if s >= n)


def ladder(low: int, high: int, factor: int) -> tuple[int, ...]:
    """Returns low, factor * low, ... and high itself: few sizes, since each is a program to compile."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return (*sizes, high)


def runs(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Splits items into runs of `size`; the last may have fewer."""
    return [items[i : i + size] for i in range(0, len(items), size)]
