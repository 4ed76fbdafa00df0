"""Reads and checks a server's answer to /generate. Nothing in it is trusted unchecked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coevolve_jax.rollout.engine import Completion
from coevolve_jax.rollout.sglang.fleet import Fault

ABOVE = 1e-2  # nats above 0 that a server's rounding may give a certain token


def read_counts(meta: Mapping[str, Any]) -> dict[str, float]:
    """Returns the counts of a message (see `Engine.counts`) from a server's meta_info.

    Values that are no numbers are ignored. queue_time needs a server with --enable-metrics.
    """
    known = {k: v for k, v in meta.items() if isinstance(v, int | float) and 0 <= v < np.inf}
    cached = min(known.get("cached_tokens", 0), prompt := known.get("prompt_tokens", 0))
    counts = {"prefill_tokens": prompt - cached, "cached_tokens": cached}
    return counts | ({"queued": 1, "queue_seconds": known["queue_time"]} if "queue_time" in known else {})


def read_answer(
    answer: Any, vocabulary: int, budget: int, stop_ids: Sequence[int], version_of: Callable[[Any], int]
) -> Completion:
    """Reads the completion in an answer of /generate.

    version_of: maps a label of weights to their version (`Pusher.version_of`); its ValueError is a Fault.

    finish is "" where the server stopped early: before the budget was spent, and not at one of `stop_ids`
    (for example at the model's own end of text). Raises Fault for anything that is no such answer.
    """
    try:
        meta = answer["meta_info"]
        ids = np.asarray(answer["output_ids"], np.int32).reshape(-1)
        told = meta["output_token_logprobs"]
        logprobs = np.asarray([entry[0] for entry in told], np.float32)
        if not (np.isfinite(logprobs).all() and (logprobs < ABOVE).all()):
            raise ValueError("a log-probability is no number, or above 0")
        if [entry[1] for entry in told] != ids.tolist() or len(ids) > budget:
            raise ValueError("its ids and log-probabilities do not belong together")
        if len(ids) and not (0 <= ids.min() and ids.max() < vocabulary):
            raise ValueError("it sampled an id outside the vocabulary")
        spans = meta.get("weight_versions") or [
            {"version": meta["weight_version"], "start": 0, "end": len(ids)}
        ]
        versions = np.full(len(ids), -1, np.int32)
        for span in spans:
            versions[span["start"] : span["end"]] = version_of(span["version"])
        if (versions < 0).any():
            raise ValueError("it does not say which weights sampled each token")
        reason = meta["finish_reason"]
        stopped = len(ids) > 0 and ids[-1] in stop_ids
        if reason["type"] == "abort" and not stopped:
            return Completion(
                ids, logprobs, "abort", versions, f"the server gave it up: {reason.get('message')}"[:300]
            )
        if not len(ids):
            raise ValueError("it holds no token")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise Fault(f"/generate answered what cannot be read: {type(error).__name__}: {error}") from None
    finish = "stop" if stopped else "length" if len(ids) == budget else ""
    return Completion(ids, logprobs, finish, versions)
