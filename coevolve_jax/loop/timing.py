"""Seconds by phase, throughput of a step, and the servers' counts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax
from ml_collections import ConfigDict

from coevolve_jax.loop.collect import Collected
from coevolve_jax.planning import topologies
from coevolve_jax.types import TrainingSample


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the duration of its body to seconds[phase]."""
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


SLOW = 0.01  # share of messages; the user is told if retries of slow messages exceed it


def serving(counts: Mapping[str, float]) -> dict[str, float]:
    """The counts of Engine.counts that the engine has, for metrics.jsonl and summary.json.

    queue_seconds is the mean per message. paused_seconds counts pauses during rollouts, so only if they run
    ahead.
    """
    told = {n: counts[n] for n in ("prefill_tokens", "decode_tokens", "paused_seconds") if n in counts}
    if counts.get("messages"):
        told |= {n: counts.get(n, 0) for n in ("messages", "slow_retries")}
    if counts.get("queued"):
        told["queue_seconds"] = counts["queue_seconds"] / counts["queued"]
    return told


def slow_note(told: Mapping[str, float]) -> str:
    """A sentence if more than SLOW of the messages were resampled for taking too long; else "".

    told: from `serving`.
    """
    retries, messages = told.get("slow_retries", 0), told.get("messages", 0)
    if retries <= SLOW * messages:
        return ""
    return (
        f"serving: {retries:g} slow messages were sampled anew, for {messages:g} asked for, "
        f"more than {SLOW:.0%}: this "
        "favours short messages; raise config.engine.timeout, or lower config.engine.max_concurrency."
    )


def throughput(
    config: ConfigDict,
    collected: Collected,
    samples: Sequence[TrainingSample],
    flops: float,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Throughput of one step, for metrics.jsonl.

    Returns:
      rollout_tokens: sampled tokens per second of the rollouts.
      update_tokens: tokens of the samples, prompts included, per second of the update.
      mfu: `flops` per second of the update, as a share of the mesh's published peak; only if the peak is
        known.
    """
    sampled = sum(n for name, n in collected.costs.items() if name.startswith("sampled_tokens/"))
    tokens = config.learner.epochs * sum(len(s.trajectory.ids) for s in samples)
    speeds = {
        "rollout_tokens": sampled / max(collected.seconds, 1e-9),
        "update_tokens": tokens / max(seconds["update"], 1e-9),
    }
    if peak := topologies.PEAKS.get(jax.devices()[0].device_kind):
        speeds["mfu"] = flops / max(seconds["update"], 1e-9) / (peak * math.prod(config.mesh.values()))
    return speeds
