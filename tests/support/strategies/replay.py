"""GRPO on D_0 with replay: the policy also imitates its own latest successes, by cross-entropy."""

import dataclasses

import numpy as np

from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.strategies.base import StepReport, grpo_samples, trajectories_of
from coevolve_jax.strategies.batches import collect_batch
from coevolve_jax.types import TrainingSample, Trajectory

DEFAULTS = {"weight": 0.1, "size": 16}  # weight: of the cross-entropy; size: kept successes


class Replay:
    def __init__(self, config, state=None):
        self._config, self._kept = config, []
        for row in state["kept"] if state else []:
            ids, mask = np.asarray(row.pop("ids"), np.int32), np.asarray(row.pop("mask"), bool)
            zeros = np.zeros(len(ids))
            self._kept.append(
                dataclasses.replace(
                    Trajectory.from_json(row), ids=ids, mask=mask,
                    logprobs=zeros.astype(np.float32), versions=zeros.astype(np.int32),
                )
            )  # fmt: skip

    def collect(self, step, tasks, roll):
        return collect_batch(self._config, step, tasks, roll)

    def compute_advantages(self, groups):
        fresh, _ = grpo_samples(self._config, groups, FilterState())
        weight = self._config.strategy.weight
        replayed = [
            TrainingSample(t, None, ce_weights=np.where(t.mask, weight, 0).astype(np.float32))
            for t in self._kept
        ]
        return fresh + replayed

    def observe(self, step, groups):
        won = [t for t in trajectories_of(groups) if t.outcome.valid and t.outcome.success]
        self._kept = (self._kept + won)[-self._config.strategy.size :]
        return StepReport({"replayed": len(self._kept)})

    def evolve(self, step, lab):
        return None

    def to_json(self):
        return {"kept": [{**t.to_json(), "ids": t.ids.tolist(), "mask": t.mask.tolist()} for t in self._kept]}


make = Replay
