"""A cache with a row for each conversation, and as many rows and columns as the present tick needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coevolve_jax.rollout.native.conversation import NOWHERE, Conversation
from coevolve_jax.rollout.native.programs import TICK
from coevolve_jax.rollout.native.store import COLUMNS, ROWS, bucket, ladder, runs


class RowStore:
    """A `Store` of rows.

    programs: `Programs` of the model. slots: conversations that have a row at once. max_length: tokens of the
    longest one. fed: rows that are fed at once. parts: the parts of the devices that hold the rows.
    """

    def __init__(self, programs: Any, *, slots: int, max_length: int, fed: int, parts: int):
        self._programs, self._fed = programs, fed
        self._row_sizes = [-(-size // parts) * parts for size in ladder(ROWS, slots, 4)]
        self._column_sizes = ladder(COLUMNS, max_length, 2)
        self.drop()

    def drop(self) -> None:
        self.cache: Any = None
        self.rows = self.columns = 0
        self._copies: list[tuple[Conversation, Conversation]] = []

    def free(self, conversation: Conversation) -> None:
        conversation.row, conversation.cached = NOWHERE, 0

    def admit(
        self, asked: Sequence[Conversation], held: Sequence[Conversation]
    ) -> tuple[Sequence[Conversation], Sequence[Conversation]]:
        self._make_room(asked, held)
        taken = {c.row for c in held}
        free = (row for row in range(self.rows) if row not in taken)
        sources = {c.prompt.tobytes(): c for c in held if c.row != NOWHERE and c.cached >= len(c.prompt)}
        self._copies = []
        for c in asked:
            if c.row == NOWHERE:
                c.row = next(free)
                source = sources.setdefault(c.prompt.tobytes(), c)
                self._copies += [(c, source)] if source is not c else []
        return asked, [c for c, _ in self._copies]

    def _make_room(self, asked: Sequence[Conversation], held: Sequence[Conversation]) -> None:
        """Gives the cache the rows and columns that this tick needs, in one of the few sizes."""
        columns = [len(c.ids) + min(TICK, c.left) for c in asked] + [c.cached for c in held]
        shape = bucket(len(held), self._row_sizes), bucket(max(columns), self._column_sizes)
        if shape == (self.rows, self.columns):
            return
        housed = [c for c in held if c.row != NOWHERE]
        if housed:
            rows = [*(c.row for c in housed), *[self.rows] * (shape[0] - len(housed))]
            self.cache = self._programs.fit(self.cache, np.asarray(rows, np.int32), shape[1])
            for i, c in enumerate(housed):
                c.row = i
        else:
            self.cache = self._programs.empty(*shape)
        self.rows, self.columns = shape

    def share(self) -> None:
        for group in runs(self._copies, self._fed):
            pad = [self.rows] * (self._fed - len(group))
            sources = np.asarray([*(source.row for _, source in group), *pad], np.int32)
            targets = np.asarray([*(c.row for c, _ in group), *pad], np.int32)
            self.cache = self._programs.copy(self.cache, sources, targets)
        for c, _ in self._copies:
            c.cached = len(c.prompt)

    def groups(self, behind: Sequence[Conversation]) -> Sequence[Sequence[Conversation | None]]:
        return runs(behind, self._fed)

    def feed(
        self,
        params: Any,
        group: Sequence[Conversation | None],
        tokens: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        rows = np.full(len(tokens), self.rows, np.int32)  # padding: this row does not exist, and is ignored
        rows[: len(group)] = [self.rows if c is None else c.row for c in group]
        self.cache = self._programs.feed(params, self.cache, tokens, positions, rows)

    def experts(self, conversation: Conversation) -> np.ndarray:
        told = np.asarray(self._programs.experts(self.cache, conversation.row))
        return told[:, : conversation.cached].swapaxes(0, 1)

    def open(self, admitted: Sequence[Conversation]) -> Any:
        return self.cache
