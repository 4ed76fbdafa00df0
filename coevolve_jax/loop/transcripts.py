"""Trajectories in readable form: the rows of trajectories/."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from coevolve_jax.records.rollouts import mean_advantages
from coevolve_jax.rollout.chat import Chat, pieces
from coevolve_jax.strategies.base import trajectories_of
from coevolve_jax.types import Group, TrainingSample, Trajectory

FED = -2  # in place of a policy version, for tokens that were fed and not sampled


def readable(
    chat: Chat, groups: Sequence[Group], samples: Sequence[TrainingSample], step: int, most: int
) -> list[dict]:
    """Returns up to `most` rows: one trajectory per task and outcome.

    Failures and successes come in turn, then rollouts that our own infrastructure failed. "queries" holds
    what the user said. "segments" holds the tokens (see `segments`). "advantage" is the mean over the tokens
    that the policy sampled; None if the learner did not use the trajectory.
    """
    learned = {key: round(mean, 4) for key, mean in mean_advantages(samples).items()}
    queries = {g.task.id: [turn.query for turn in g.task.turns] for g in groups}
    solved = lambda t: t.outcome.success if t.outcome.valid else None
    distinct = {(t.task_id, solved(t)): t for t in reversed(trajectories_of(groups))}.values()
    failures, successes, lost = ([t for t in distinct if solved(t) == kind] for kind in (False, True, None))
    in_turn = [t for pair in itertools.zip_longest(failures, successes) for t in pair if t is not None]
    return [
        {
            "step": step,
            **t.to_json(),
            "reward": t.outcome.reward,
            "success": t.outcome.success,
            "valid": t.outcome.valid,
            "policy_tokens": int(t.mask.sum()),
            "advantage": learned.get(id(t)),
            "segments": segments(chat, t),
            "queries": queries[t.task_id][: len(t.turn_starts)],
        }
        for t in [*in_turn, *lost][:most]
    ]


def segments(chat: Chat, trajectory: Trajectory) -> list[dict]:
    """Splits a trajectory's tokens into segments of one kind. All "pieces", joined, are its text.

        fed to the policy    {"tokens": n, "pieces": [text]}
        sampled by it        {"tokens": n, "pieces": [n texts], "logprobs": [n], "version": int}

    Log-probabilities are in nats, rounded to 4 digits. If a character spans several tokens, the last one has
    it and the others have the piece "".
    """
    t = trajectory
    kinds = np.where(t.mask, t.versions, FED)
    ends = [*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(t.ids)]
    found = []
    for start, end in itertools.pairwise([0, *ends]):
        ids, segment = t.ids[start:end], dict[str, Any](tokens=end - start)
        if t.mask[start]:
            logprobs = (np.round(t.logprobs[start:end].astype(np.float64), 4) + 0.0).tolist()  # no -0.0
            segment |= {
                "pieces": pieces(chat.decode, ids),
                "logprobs": logprobs,
                "version": int(kinds[start]),
            }
        else:
            segment["pieces"] = [chat.decode(ids)]
        found.append(segment)
    return found
