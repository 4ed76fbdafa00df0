"""Trajectories as one reads them: the rows of trajectories/."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from coevolve_jax.rollout.chat import Chat, pieces
from coevolve_jax.strategies.base import trajectories_of
from coevolve_jax.types import Group, TrainingSample, Trajectory

FED = -2  # stands for the policy version of tokens that no policy sampled


def readable(
    chat: Chat, groups: Sequence[Group], samples: Sequence[TrainingSample], step: int, most: int
) -> list[dict]:
    """`most` trajectories as one reads them: one of each outcome of each task, failures and successes in turn.

    Their tokens are in "segments": see `segments`. "advantage": the mean over the tokens that the policy sampled; None
    where nothing was learned from the trajectory."""
    learned = {
        id(s.trajectory): round(float(np.mean(s.advantages[s.trajectory.mask])), 4)
        for s in samples
        if s.advantages is not None and s.trajectory.mask.any()
    }
    queries = {g.task.id: [turn.query for turn in g.task.turns] for g in groups}
    distinct = {(t.task_id, t.outcome.success): t for t in reversed(trajectories_of(groups))}.values()
    failures, successes = ([t for t in distinct if t.outcome.success == success] for success in (False, True))
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
            "queries": queries[t.task_id],
        }
        for t in in_turn[:most]
    ]


def segments(chat: Chat, trajectory: Trajectory) -> list[dict]:
    """The tokens of a trajectory in runs of one kind; all "pieces" joined are its text.

    What was fed to the policy is one piece: {"tokens": n, "pieces": [text]}. What it sampled has one piece and one
    log-probability (nats, 4 digits) per token: {"tokens": n, "pieces": [n], "logprobs": [n], "version": int}; of a
    character that is cut into several tokens all but the last have the piece "".
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
