"""What a self-evolving method is to the loop of train.py, and pieces that methods share.

A method is a module with `make(config, state=None) -> Strategy`, named by config.strategy.name: `coevolve` is
`coevolve_jax.strategies.coevolve`, a dotted path is a module of anybody's (docs/guides/add_strategy.md).

A module may name in `READS` those of SHARED that it reads. A run then says which of the others have no effect. One that
names the keys of schedule.KEYS evolves after the steps of `evolves` and no others, and a run without such a step is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config.schedule import KEYS, evolutions
from coevolve_jax.grpo.advantages import drop_zero_variance, group_advantages
from coevolve_jax.grpo.filter import FilterState, filter_groups
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.pipeline import Relocate, SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import Admit, Verdict
from coevolve_jax.types import Context, Evidence, Group, Hint, Task, TrainingSample, Trajectory, spread

SIGNALS = ("signals.window", "signals.rare_percent")
SHARED = (*KEYS, "evolution.tasks", "evolution.contexts", *SIGNALS)  # keys of the config for methods to read

Rewards = Callable[[Group], Sequence[float]]  # of the valid trajectories of a group, in their order


class Roll(Protocol):
    """Rollouts by the present policy, of one step."""

    def __call__(
        self,
        tasks: Sequence[Task],
        k: int,
        hints: Callable[[Task, int], Hint | None] | None = None,
        role: str = "policy",
    ) -> list[Group]:
        """K rollouts of each task, a group per task. hints: (task, rollout_index) -> help for that rollout.
        role: what they are booked as in the ledger."""
        ...


class Lab(Protocol):
    """What a method may ask for while the training set evolves. Each call is booked in the ledger.

    tasks: D_t. scenarios: those that may be explored for training.
    """

    @property
    def tasks(self) -> TaskPool: ...

    @property
    def scenarios(self) -> Sequence[Task]: ...

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        """The reflector's structured context of each piece of evidence."""
        ...

    def offered(self, scenario: Task) -> frozenset[str]:
        """Names of the tools that the environment offers in a scenario or task."""
        ...

    def synthesize(
        self,
        contexts: Sequence[Context],
        *,
        wanted: int,
        kind: str,
        step: int,
        rng: np.random.Generator,
        admit: Admit | None = None,
        relocate: Relocate | None = None,
    ) -> SynthesisStats:
        """explore -> abstract -> validate under these contexts; D_t grows by `wanted` tasks at most. kind:
        what the new tasks' lineage says of their origin. admit: has the last word on each batch of validated
        tasks. relocate: gives a context that led to no task another place; then each context gives one task
        before any gives a second."""
        ...

    def synthesize_unguided(
        self,
        *,
        wanted: int,
        kind: str,
        step: int,
        rng: np.random.Generator,
        scenarios: Sequence[Task] | None = None,
        admit: Admit | None = None,
    ) -> SynthesisStats:
        """The same by free exploration of random scenarios (of these, or of all that may be explored), until D_t
        has grown by `wanted`, or they give no more new tasks."""
        ...

    def probe(self, tasks: Sequence[Task], k: int, step: int) -> list[Group]:
        """Rollouts that nothing is learned from."""
        ...


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What a method read from the rollouts of a step. counts: by kind, for metrics.jsonl. rows: for
    signals.jsonl, in a form of the method's own; the report links those that have a Signal's keys to tasks."""

    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()


class Strategy(Protocol):
    """A self-evolving method; the four calls come in this order in every GRPO step.

    With config.rollout.max_staleness S, `collect` of steps t + 1 to t + S comes before `compute_advantages` of step t and runs in
    other threads: it must then change nothing but what it draws from `tasks`.
    """

    def collect(self, step: int, tasks: TaskPool, roll: Roll) -> list[Group]:
        """Draws a batch of tasks from D_t and rolls it out."""
        ...

    def compute_advantages(self, groups: Sequence[Group]) -> list[TrainingSample]:
        """What to learn from the rollouts; invalid trajectories are left out. Outcomes are never changed."""
        ...

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        """Remembers what the rollouts tell."""
        ...

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        """Lets the training set evolve; None at a step where it does not.

        With config.evolution.async_steps above 0 it runs beside the next steps from its first use of `lab` on: from there
        it must leave its own state alone. It is then not called again until it has ended, and cannot probe.
        """

    def to_json(self) -> dict:
        """All that `make` needs to go on exactly here, as JSON values."""
        ...


def outcome_rewards(group: Group) -> Sequence[float]:
    """The environment's own rewards."""
    return group.rewards


def trajectories_of(groups: Sequence[Group]) -> list[Trajectory]:
    """All of them, group by group."""
    return [t for group in groups for t in group.trajectories]


def collect_batch(
    config: ConfigDict, step: int, tasks: TaskPool, roll: Roll, *, rewards: Rewards = outcome_rewards, **how
) -> list[Group]:
    """A batch drawn from D_t as config.data says (min_evolved_share, sampling, retire_after), K rollouts each.

    With config.learner.dynamic_sampling (DAPO, arXiv 2503.14476, section 3.2) a group without spread asks for
    another task, for at most that many rounds more. All that was rolled out is returned. how: goes to `roll`.
    """
    c, groups = config, []
    missing = c.rollout.tasks_per_step
    for round in range(1 + c.learner.dynamic_sampling):
        again = (round,) if round else ()
        drawn = tasks.draw(
            missing,
            rng_for(c.seed, "sample", step, *again),
            min_evolved_share=c.data.min_evolved_share,
            weights=lambda rows: sampling_weights(c, rows),
            apart_from={group.task.id for group in groups},
        )
        if not drawn:
            break
        groups += roll(drawn, c.rollout.group_size, **how)
        missing = c.rollout.tasks_per_step - len(
            drop_zero_variance({i: spread(rewards(g)) for i, g in enumerate(groups)})
        )
        if missing <= 0:
            break
    return groups


def sampling_weights(config: ConfigDict, rows: np.ndarray) -> np.ndarray:
    """Of tasks in the draw of a batch, [N] from their TaskPool.rows.

    config.data.sampling "uniform": 1. "variance": 4 p (1 - p), its last score being p, with config.data.sampling_floor
    as the least, and 1 before its first visit. A task that was always or never solved in its last
    config.data.retire_after visits (0: no such rule) weighs nothing.
    """
    c, weights = config.data, np.ones(len(rows))
    if c.sampling != "uniform":
        p = rows["last_score"]
        weights = np.where(np.isnan(p), 1.0, np.maximum(c.sampling_floor, 4 * p * (1 - p)))
    if c.retire_after:
        weights = np.where(rows["settled"] >= c.retire_after, 0.0, weights)
    return weights


def evolves(config: ConfigDict, step: int) -> bool:
    """Whether the training set evolves after this step (schedule.evolutions)."""
    return step in evolutions(config)


def solvable(config: ConfigDict, lab: Lab, step: int, k: int) -> Admit:
    """Admits tasks that k probing rollouts solve sometimes, but not always; k = 0 admits all. A task whose probing
    rollouts are all invalid is refused as "environment": nothing is known about it."""

    def admit(tasks: Sequence[Task]) -> list[Verdict]:
        words: list[Verdict] = []
        for group in lab.probe(tasks, k, step):
            solved, tried = sum(t.outcome.success for t in group.valid), len(group.valid)
            if not tried:
                words.append(Verdict("environment"))
                continue
            refusal = None if group.mixed else "always_solved" if solved else "never_solved"
            words.append(Verdict(refusal, solved / tried))
        return words

    return admit if k else lambda tasks: [Verdict(None)] * len(tasks)


def synthesize_for_tools(
    lab: Lab,
    tools: Sequence[str],
    signal: str,
    *,
    wanted: int,
    kind: str,
    step: int,
    rng: np.random.Generator,
    admit: Admit | None = None,
) -> SynthesisStats:
    """A task that calls it for each of `tools`, explored in scenarios of chance that offer the tool until one gives it.

    What can not be had so is made up by second tasks of the others, to `wanted` in all.
    """
    offering = {tool: [s for s in lab.scenarios if tool in lab.offered(s)] for tool in dict.fromkeys(tools)}

    def context(tool: str, id: str) -> Context:
        scenario = offering[tool][rng.integers(len(offering[tool]))]
        words = f"{tool} is called wrongly or not at all."
        return Context(id, signal, scenario, words, "", "", focus_pattern=(tool,), avoid=(), must=(tool,))

    def relocate(unproductive: Context) -> Context:
        id, _, place = unproductive.id.rpartition("/")
        return context(unproductive.must[0], f"{id}/{int(place) + 1}")

    return lab.synthesize(
        [context(tool, f"{signal}/{step}/{i}/{tool}/0") for i, tool in enumerate(tools) if offering[tool]],
        wanted=wanted, kind=kind, step=step, rng=rng, admit=admit, relocate=relocate,
    )  # fmt: skip


def grpo_samples(
    config: ConfigDict, groups: Sequence[Group], state: FilterState, rewards: Rewards = outcome_rewards
) -> tuple[list[TrainingSample], FilterState]:
    """The samples of GRPO: advantages within each group, groups chosen by the spread of their rewards.

    This alone decides which groups count: config.learner.skip_zero_variance_groups, dynamic_sampling and group_filter.

    Returns:
      the samples, and the group filter's state after them.
    """
    c = config.learner
    shaped = {i: list(rewards(group)) for i, group in enumerate(groups) if group.valid}
    active_groups = {i: spread(values) for i, values in shaped.items()}
    if c.skip_zero_variance_groups or c.dynamic_sampling:
        active_groups = drop_zero_variance(active_groups)
    if c.group_filter:
        active_groups, state = filter_groups(state, active_groups)
    samples = []
    for i in active_groups:
        advantages = group_advantages(shaped[i], estimator=c.advantage)
        samples += [
            TrainingSample(t, np.full(len(t.ids), a, np.float32))
            for t, a in zip(groups[i].valid, advantages, strict=True)
        ]
    return samples, state
