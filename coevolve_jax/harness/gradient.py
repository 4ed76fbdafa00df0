"""Checks of the gradients that two configs give at the parent's checkpoint, for backtest.py.

    cos        cosine of the parent's and the child's gradient                            shown
    finite     whether all numbers of the child's gradient are finite                     no
    kl_share   |KL term| / (|KL term| + |the rest|) of the child's gradient, where the
               settings of the learner differ                                             > 0.9
    margin     cosine of the child's step with the direction that raises the mean
               log-probability of successes over that of failures, in mixed groups        <= 0

None refuses for what the parent's gradient does too. Where no group is mixed, none is made.
experiments/compare_gradients.py makes them for a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from coevolve_jax import names
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.influence import cosine
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.packing import Batch, pack_for
from coevolve_jax.harness.backtest import Check
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.types import Group, TrainingSample


def gradient_checks(
    parent: ConfigDict,
    child: ConfigDict,
    model: ModelConfig,
    params: Any,
    reference: Any,
    steps: Sequence[Sequence[Group]],
    mesh: Mesh,
) -> dict[str, Check]:
    """Compares gradients on recorded groups.

    Args:
      model: the policy's architecture.
      params: what learns, at the parent's checkpoint (`TrainState.params`).
      reference: the policy before RL, which the KL term pulls to.
      steps: the parent's groups of the steps nearest to that checkpoint; two are enough.

    Returns no check where no group is mixed or learned from. Where the child's gradient is not finite, it
    returns "finite" alone.
    """
    groups = [g for step in steps for g in step]
    samples = {name: _samples(config, steps) for name, config in (("child", child), ("parent", parent))}
    if not all(samples.values()) or not any(g.mixed for g in groups):
        return {}
    rollouts = sum(len(g.trajectories) for g in groups)
    programs: dict[str, _Program] = {}

    def gradient(config: ConfigDict, samples: Sequence[TrainingSample], *, kl_alone: bool = False) -> Any:
        if (key := config.learner.to_json()) not in programs:
            programs[key] = _program(config, model, reference, mesh)
        batch = _batch(config, samples, rollouts, programs[key].routing)
        if kl_alone:
            batch = batch._replace(
                **{n: np.zeros_like(getattr(batch, n)) for n in ("advantages", "ce_weights")}
            )
        return programs[key].gradient(params, reference, sharding.place_batch(mesh, batch, axis=1))

    toward = gradient(child, _successes_over_failures(groups))
    whole = {name: gradient(config, samples[name]) for name, config in (("child", child), ("parent", parent))}
    if not np.isfinite(float(optax.tree.norm(whole["child"]))):
        return {"finite": Check(0.0, 1.0, False)}
    found = {"cos": Check(float(cosine(whole["parent"], whole["child"])), None, True)}

    def share(name: str, config: ConfigDict) -> float:
        if not config.learner.kl_coef:
            return 0.0
        pull = gradient(config, samples[name], kl_alone=True)
        sizes = [float(optax.tree.norm(tree)) for tree in (pull, optax.tree.sub(whole[name], pull))]
        return sizes[0] / (sum(sizes) or 1.0)

    if parent.learner.to_dict() != child.learner.to_dict():  # else the KL term is the same
        own, most = share("child", child), max(0.9, share("parent", parent))
        found["kl_share"] = Check(own, most, own <= most + 1e-6)
    margin, parents = (float(cosine(whole[name], toward)) for name in ("child", "parent"))
    found["margin"] = Check(margin, min(0.0, parents), margin > 0 or margin >= parents - 1e-6)
    return found


class _Program(NamedTuple):
    """gradient: params, reference, batch -> gradient of the loss. routing: for `pack`."""

    gradient: Callable[[Any, Any, Batch], Any]
    routing: tuple[int, int]


def _program(config: ConfigDict, model: ModelConfig, reference: Any, mesh: Mesh) -> _Program:
    settings = ConfigDict({**config.learner.to_dict(), "router_balance": 0.0})  # no part of what is compared
    learner = Learner(model, settings, reference, temperature=config.rollout.temperature, mesh=mesh)

    def gradient(params: Any, reference: Any, batch: Batch) -> Any:
        # The update's own ratios: to the sampler, or with tis_cap to the policy itself.
        old = None if settings.tis_cap else batch.sampler_logprobs
        return learner.gradients(params, reference, batch, old)[0]

    return _Program(jax.jit(gradient), learner.routing)


def _batch(
    config: ConfigDict, samples: Sequence[TrainingSample], max_rows: int, routing: tuple[int, int]
) -> Batch[np.ndarray]:
    return pack_for(config.learner, samples, max_rows=max_rows, routing=routing)


def _samples(config: ConfigDict, steps: Sequence[Sequence[Group]]) -> list[TrainingSample]:
    """The samples of the config's strategy for the steps, in order."""
    strategy = names.module("strategies", config.strategy.name, "strategy.name", ["make"]).make(config)
    return [sample for groups in steps for sample in strategy.compute_advantages(groups)]


def _successes_over_failures(groups: Sequence[Group]) -> list[TrainingSample]:
    """Samples whose cross-entropy falls where successes gain log-probability over failures of their group."""
    samples = []
    for group in (g for g in groups if g.mixed):
        won = sum(t.outcome.success for t in group.valid)
        for t in group.valid:
            share = 1 / won if t.outcome.success else -1 / (len(group.valid) - won)
            weights = np.full(len(t.ids), share / max(int(t.mask.sum()), 1), np.float32)
            samples.append(TrainingSample(t, None, ce_weights=np.where(t.mask, weights, 0)))
    return samples
