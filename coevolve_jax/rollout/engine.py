"""The engine protocol: token ids in, sampled token ids and their log-probabilities out."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_p is 1 and there is no top_k: log-probabilities are those of the
    full softmax at this temperature, so that the learner's importance ratio is unbiased."""

    temperature: float = 1.0
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Request:
    """ids: int32 [T], the whole sequence so far. session: requests of one trajectory share it, and
    an engine may keep the KV cache of the common prefix. seed: names this trajectory's
    random stream; with the position it determines the noise of each token."""

    session: int
    ids: np.ndarray
    sampling: Sampling
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """ids: int32 [N] sampled, the stop id included. logprobs: float32 [N] in nats.
    finish: "stop", "length" or "abort". versions: int32 [N]."""

    ids: np.ndarray
    logprobs: np.ndarray
    finish: str
    versions: np.ndarray


class Engine(Protocol):
    """The in-process JAX engine passes tests/test_rollout.py."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def update_weights(self, params: Any, version: int) -> None:
        """Every token sampled after this call comes from `params`; caches of older weights are dropped."""

    def release(self, sessions: Sequence[int]) -> None:
        """Forgets the caches of finished trajectories."""

    def close(self) -> None: ...
