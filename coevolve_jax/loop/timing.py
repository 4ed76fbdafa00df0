"""Seconds by phase, and throughput of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax
from ml_collections import ConfigDict

from coevolve_jax.loop.collect import Collected
from coevolve_jax.planning import topologies
from coevolve_jax.records.costs import SAMPLED, total
from coevolve_jax.types import TrainingSample


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the duration of its body to seconds[phase]."""
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


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
    sampled = total(collected.costs, SAMPLED)
    tokens = config.learner.epochs * sum(len(s.trajectory.ids) for s in samples)
    speeds = {
        "rollout_tokens": sampled / max(collected.seconds, 1e-9),
        "update_tokens": tokens / max(seconds["update"], 1e-9),
    }
    if peak := topologies.PEAKS.get(jax.devices()[0].device_kind):
        speeds["mfu"] = flops / max(seconds["update"], 1e-9) / (peak * math.prod(config.mesh.values()))
    return speeds
