"""A cache of pages: a conversation has as many as it needs, and those of one prompt share its full pages.

On a mesh each part of the devices has pages of its own. A conversation lies in one part, together with those
of its prompt while there is room.

Where a part has too few free pages, others lose theirs: first conversations that nobody asks for, oldest
first, then the last of those that are asked for. The latter wait, and are fed again. A conversation that
would not get enough pages even so waits itself. The first one always gets them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from coevolve_jax.models.paged import PAGE, STRIDE
from coevolve_jax.rollout.native.conversation import Conversation
from coevolve_jax.rollout.native.programs import TICK
from coevolve_jax.rollout.native.store import COLUMNS, ROWS, bucket, ladder, part_pages, runs


class PageStore:
    """A `Store` of pages.

    programs: `Programs` of the model. tokens: the number that the pages of all parts together hold. For the
    other arguments see `RowStore`. Raises ValueError where a part cannot hold one conversation.
    """

    def __init__(self, programs: Any, *, slots: int, max_length: int, fed: int, parts: int, tokens: int):
        self._programs, self._fed, self._parts = programs, fed, parts
        self._count = part_pages(tokens, max_length, parts)
        self._most = -(-slots // parts)  # conversations in a part
        self._row_sizes = [-(-size // parts) * parts for size in ladder(ROWS, slots, 4)]
        self._column_sizes = ladder(COLUMNS, -(-max_length // STRIDE) * STRIDE, 2)
        self.drop()

    def drop(self) -> None:
        self.cache: Any = None
        self.rows = self.columns = 0
        self._free = [list(range(self._count))[::-1] for _ in range(self._parts)]
        self._users: list[Counter[int]] = [Counter() for _ in range(self._parts)]  # page -> conversations
        self._housed: dict[int, Conversation] = {}  # by conversation_id

    def free(self, conversation: Conversation) -> None:
        self._keep(conversation, 0)
        self._housed.pop(conversation.request.conversation_id, None)

    def admit(
        self, asked: Sequence[Conversation], held: Sequence[Conversation]
    ) -> tuple[Sequence[Conversation], Sequence[Conversation]]:
        if self.cache is None:
            self.cache = self._programs.empty_pages(self._count * self._parts)
        conversation_ids = {c.request.conversation_id for c in asked}
        idle = [c for c in held if c.request.conversation_id not in conversation_ids]
        sources: dict[bytes, list[Conversation]] = defaultdict(list)
        for c in self._housed.values():
            if c.cached >= len(c.prompt):
                sources[c.prompt.tobytes()].append(c)
        admitted: list[Conversation] = []
        sharing: list[Conversation] = []
        for i, c in enumerate(asked):
            same = sources[c.prompt.tobytes()]
            shares = not c.pages and self._begin(c, same)
            self._housed[c.request.conversation_id] = c
            if self._extend(c, [*idle, *asked[:i:-1]]):
                admitted.append(c)
                sharing += [c] if shares else []
                same.append(c)
        self._lay_out(admitted)
        return admitted, sharing

    def _begin(self, c: Conversation, same: Sequence[Conversation]) -> bool:
        """Chooses the part of a conversation without pages. Returns whether it shares a prompt's pages there.

        It goes to a conversation of the `same` prompt, and shares its full pages. Otherwise it goes to the
        part with most free pages. It does so too where it would find enough free pages only there.
        """
        load = Counter(other.part for other in self._housed.values() if other is not c)
        whole, free = len(c.prompt) // PAGE, [len(pages) for pages in self._free]
        roomiest = max((p for p in range(self._parts) if load[p] < self._most), key=free.__getitem__)
        sources = [s for s in same if load[s.part] < self._most and 0 < whole <= len(s.pages)]
        wanted = self._wanted(c)
        with_room = [s for s in sources if wanted - whole <= free[s.part]]
        if not sources or (not with_room and wanted <= free[roomiest]):
            c.part = roomiest
            return False
        source = (with_room or sources)[0]
        c.part, c.pages, c.cached = source.part, source.pages[:whole], whole * PAGE
        self._users[c.part].update(c.pages)
        return True

    def _wanted(self, c: Conversation) -> int:
        """Returns the number of pages that it needs in this tick."""
        return -(-(len(c.ids) + min(TICK, c.left)) // PAGE)

    def _extend(self, c: Conversation, others: Sequence[Conversation]) -> bool:
        """Gives it the pages of this tick, if need be those of `others`, in this order.

        Returns False where even these do not suffice. The others keep theirs then; otherwise they would be
        fed again in every tick in which it waits.
        """
        self._keep(c, c.cached)
        free, others = self._free[c.part], [other for other in others if other.part == c.part]
        missing = self._wanted(c) - len(c.pages)
        if missing > len(free):
            theirs = Counter(page for other in others for page in other.pages)
            if missing > len(free) + sum(n == self._users[c.part][page] for page, n in theirs.items()):
                return False
        for other in others:
            if missing > len(free) and other.pages:
                if self._programs.records and not other.answered:
                    other.remember(self.experts(other))
                self.free(other)
        new = [free.pop() for _ in range(missing)]
        self._users[c.part].update(new)
        c.pages += new
        return True

    def _keep(self, c: Conversation, tokens: int) -> None:
        """Gives back the pages behind its first `tokens`, and the one where they end if others share it."""
        users = self._users[c.part]
        if tokens % PAGE and users[c.pages[tokens // PAGE]] > 1:
            tokens -= tokens % PAGE
        kept = -(-tokens // PAGE)
        for page in c.pages[kept:]:
            users[page] -= 1
            if not users[page]:
                self._free[c.part].append(page)
        c.pages, c.cached = c.pages[:kept], min(c.cached, tokens)

    def _lay_out(self, admitted: Sequence[Conversation]) -> None:
        """Gives each conversation a row in its part."""
        load: Counter[int] = Counter()
        for c in admitted:
            c.row = load[c.part]  # counted within its part; the offset comes below
            load[c.part] += 1
        most = max(load.values(), default=0)
        self.rows = bucket(most * self._parts, self._row_sizes)
        self.columns = bucket(max((len(c.pages) * PAGE for c in admitted), default=0), self._column_sizes)
        for c in admitted:
            c.row += c.part * (self.rows // self._parts)

    def share(self) -> None:
        """Does nothing: they share the prompt's pages already."""

    def groups(self, behind: Sequence[Conversation]) -> Iterator[Sequence[Conversation | None]]:
        size = self._fed // self._parts
        of_parts = [runs([c for c in behind if c.part == part], size) for part in range(self._parts)]
        for group in zip_longest(*of_parts, fillvalue=()):
            yield [c for own in group for c in (*own, *[None] * (size - len(own)))]

    def feed(
        self,
        params: Any,
        group: Sequence[Conversation | None],
        tokens: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        cache = self._with_rows({i: c for i, c in enumerate(group) if c}, len(group))
        self.cache = self._programs.feed_pages(params, cache, tokens, positions)

    def experts(self, conversation: Conversation) -> np.ndarray:
        count = len(conversation.pages)
        # Few sizes: each is a program to compile.
        pages = np.zeros(bucket(count * PAGE, self._column_sizes) // PAGE, np.int32)
        pages[:count] = np.add(conversation.pages, conversation.part * self._count)
        told = np.asarray(self._programs.experts(self.cache, pages)).swapaxes(1, 2)
        return told.reshape(-1, *told.shape[2:])[: conversation.cached]

    def open(self, admitted: Sequence[Conversation]) -> Any:
        return self._with_rows({c.row: c for c in admitted}, self.rows)

    def _with_rows(self, conversations: dict[int, Conversation], rows: int) -> Any:
        table = np.zeros((rows, self.columns // PAGE), np.int32)
        for row, c in conversations.items():
            table[row, : len(c.pages)] = c.pages
        return self.cache.with_table(table)
