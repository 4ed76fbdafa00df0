"""Seconds by phase, and how fast a step was."""

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
    """Adds the time that its body takes to seconds[phase]."""
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


SLOW = 0.01  # share of messages; more retries of slow ones than this are told


def serving(counts: Mapping[str, float]) -> dict[str, float]:
    """For metrics.jsonl and summary.json, as far as the engine counts it (Engine.counts); queue_seconds: of a message, on
    average; paused_seconds: beside rollouts, so only where they run ahead."""
    told = {n: counts[n] for n in ("prefill_tokens", "decode_tokens", "paused_seconds") if n in counts}
    if counts.get("messages"):
        told |= {n: counts.get(n, 0) for n in ("messages", "slow_retries")}
    if counts.get("queued"):
        told["queue_seconds"] = counts["queue_seconds"] / counts["queued"]
    return told


def slow_note(told: Mapping[str, float]) -> str:
    """A sentence where more than SLOW of the messages were sampled anew for taking too long; else "". told: by `serving`."""
    retries, messages = told.get("slow_retries", 0), told.get("messages", 0)
    if retries <= SLOW * messages:
        return ""
    return (
        f"serving: {retries:g} slow messages were sampled anew, for {messages:g} asked for, more than {SLOW:.0%}: this "
        "favours short messages; raise config.engine.timeout, or lower config.engine.max_concurrency."
    )


def throughput(
    config: ConfigDict,
    collected: Collected,
    samples: Sequence[TrainingSample],
    flops: float,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """For metrics.jsonl.

    rollout_tokens: sampled per second of the rollouts. update_tokens: of the samples, prompts included, per second of the
    update. mfu: the share of the devices' published peak that `flops` in that time are; only where the peak is known.
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
