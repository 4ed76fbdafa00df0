"""Turns demonstrations into batches: retold with other names, joined to conversations, packed into rows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from coevolve_jax.grpo.layout import assign_rows
from coevolve_jax.grpo.packing import Batch, pack
from coevolve_jax.types import TrainingSample, Trajectory


class Spelling:
    """Retells a demonstration with other names and numbers. Each value is replaced wherever it occurs.

    Otherwise the policy memorises the names of the train split instead of learning to copy.
    """

    WORD = re.compile(r"[A-Za-z]{2,}")
    NUMBER = re.compile(r"(?<![A-Za-z_])[0-9]+")  # not the 1 of file_name1

    def __init__(self, tokenizer, retell: Callable[[str, Callable[[str], str]], str]):
        """retell: from the family's lessons (lessons/__init__.py)."""
        self._tokenizer, self._retell = tokenizer, retell
        ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        self._start, self._end = ids
        (self._assistant,) = tokenizer.encode("assistant\n", add_special_tokens=False)

    def respell(self, trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
        head, *rest = re.split(r"(?=<\|im_start\|>user\n)", self._tokenizer.decode(trajectory.ids))
        text = "".join(rest)
        text = self._retell(text, lambda name: self.WORD.sub(lambda m: self._word(m.group(), rng), name))
        digits = str.maketrans("123456789", "".join(rng.permutation(list("123456789"))))
        text = self.NUMBER.sub(lambda m: m.group().translate(digits), text)
        return self._encode(trajectory, head + text)

    def _word(self, word: str, rng: np.random.Generator) -> str:
        """A random word made of syllables, capitalised like this one."""
        pick = lambda letters: letters[rng.integers(len(letters))]
        syllable = lambda: (
            pick("bcdfghjklmnprstvwz") + pick("aeiouy") + pick(("", "", "n", "r", "st", "l", "ck", "m"))
        )
        other = "".join(syllable() for _ in range(rng.integers(1, 4)))
        return other.upper() if word.isupper() else other.title() if word[0].isupper() else other

    def _encode(self, trajectory: Trajectory, text: str) -> Trajectory:
        """The text as a trajectory in which the policy wrote the assistant's messages."""
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)
        opened = np.flatnonzero((ids[:-1] == self._start) & (ids[1:] == self._assistant)) + 2
        mask = np.zeros(len(ids), bool)
        for begin in opened:
            mask[begin : begin + 1 + np.flatnonzero(ids[begin:] == self._end)[0]] = True
        return dataclasses.replace(
            trajectory,
            ids=ids,
            mask=mask,
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )


def conversations(trajectories: Sequence[Trajectory], user: int, length: int) -> list[Trajectory]:
    """Joins demonstrations with equal tool lists to conversations of at most `length` tokens.

    A tool list is as long as a task. Joined, it is read once for several tasks.

    Args:
      user: id of the token that opens a turn. Its second occurrence opens the first user turn, right after
        the list.
    """
    groups: dict[bytes, list[tuple[Trajectory, int]]] = {}
    for t in trajectories:
        head = int(np.flatnonzero(t.ids == user)[1])
        groups.setdefault(t.ids[:head].tobytes(), []).append((t, head))
    joined = []
    for group in groups.values():
        head = group[0][1]
        for row in assign_rows([len(t.ids) - head for t, _ in group], length - head):
            first, *rest = (group[i][0] for i in sorted(row))  # sorted: in shuffled order, not longest first
            join = lambda name: np.concatenate(
                [getattr(first, name), *(getattr(t, name)[head:] for t in rest)]
            )
            joined.append(
                dataclasses.replace(first, **{k: join(k) for k in ("ids", "mask", "logprobs", "versions")})
            )
    return joined


def batches(
    trajectories: Sequence[Trajectory],
    spelling: Spelling,
    user: int,
    rng: np.random.Generator,
    *,
    respell: float,
    rows: int,
    length: int,
) -> Iterator[Batch]:
    """Yields batches of `rows` rows of `length` tokens, one conversation per row, epoch after epoch.

    respell: share of the demonstrations that are retold with other names and numbers. user: see
    `conversations`.
    """
    while True:
        shuffled = [trajectories[i] for i in rng.permutation(len(trajectories))]
        spelt = [spelling.respell(t, rng) if rng.random() < respell else t for t in shuffled]
        joined = conversations([t for t in spelt if len(t.ids) <= length], user, length)
        order = rng.permutation(len(joined))
        for start in range(0, len(order) - rows + 1, rows):
            chosen = [joined[i] for i in order[start : start + rows]]
            # `pack` may put short ones into one row; the batch keeps its shape.
            samples = [TrainingSample(t, np.ones(len(t.ids), np.float32)) for t in chosen]
            yield pack(samples, pack_length=length, rows_per_microbatch=rows, max_rows=rows)
