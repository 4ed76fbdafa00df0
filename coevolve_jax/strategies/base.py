"""The Strategy protocol, by which train.py uses a self-evolving method.

batches.py, growth.py and groups.py have functions that methods share.

A method is a module with `make(config, state=None) -> Strategy`. config.strategy.name names it: `coevolve`
stands for `coevolve_jax.strategies.coevolve`, a dotted path for a module of your own
(docs/guides/add_strategy.md).

A module may list in `READS` the keys of SHARED that it reads. A run then reports which of the others have no
effect. A module that lists schedule.KEYS promises to evolve after the steps of `evolves` and no others. A run
without such a step is then refused.

A module may list in `NEEDS` what it cannot work without. A config that rules it out is then refused by name:

    fresh     the batch of a step is drawn after the last update (rollout.max_staleness 0)
    probe     `Lab.probe` (evolution.async_steps 0)
    endings   `Trajectory.ending`, which costs a request per turn
    help      its own `help`, whose hints the evaluation gives too (rollout.max_staleness 0)
    macros    `Hint.macros` (rollout.tool_call_format other than python)
    ask       `Lab.ask`, whose answers go into its state (as for probe; it works without a model too)
    influence `Lab.influence` (as for probe; learner.optimizer_offload False)
    branch    `Lab.branch` (as for probe; the in-process engine; rollout.max_staleness 0)
    queries   tasks of D_t with `Task.is_query`: held-out ones without reference calls, whose rollouts always
              have reward 0 (config.evaluation.queries above 0)

NEEDS may map a service to the setting of the method that asks for it ("": always).

A module may map in `IGNORES` the keys of config.data that have no effect, since the method decides them
itself, to the setting of its own that makes it so ("": always).

A module may map in `SCENARIO_KEYS` its settings that name keys of scenarios to other names that they take.
Several names are separated by commas. A run whose scenarios lack a key is refused before it makes any task.

A method of the literature says in `FIDELITY` how near it is to its paper: a mark and a sentence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config.schedule import KEYS, evolutions
from coevolve_jax.diagnosis.rewards import Rewards, outcome_rewards, rewards_of
from coevolve_jax.grpo.advantages import drop_zero_variance, group_advantages
from coevolve_jax.grpo.filter import FilterState, filter_groups
from coevolve_jax.llm.prompting import Question
from coevolve_jax.synthesis.pipeline import Relocate, SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import Admit
from coevolve_jax.types import Context, Evidence, Group, Hint, Task, TrainingSample, Trajectory, spread

SIGNALS = ("signals.window", "signals.rare_percent")
SHARED = (*KEYS, "evolution.tasks", "evolution.contexts", *SIGNALS)  # config keys that methods may read

Help = Callable[[Task, int], Hint | None]  # (task, rollout_index) -> help for that rollout


class Roll(Protocol):
    """Rollouts of one step by the current policy."""

    def __call__(
        self,
        tasks: Sequence[Task],
        k: int,
        hints: Help | None = None,
        role: str = "policy",
    ) -> list[Group]:
        """Returns K rollouts of each task, one group per task.

        Args:
          hints: what help each rollout is given.
          role: the name under which the ledger counts these rollouts.
        """
        ...


class Lab(Protocol):
    """Services that a method may use while the training set evolves. The ledger counts the cost of each call.

    Attributes:
      tasks: D_t.
      scenarios: the scenarios that may be explored for training.
    """

    @property
    def tasks(self) -> TaskPool: ...

    @property
    def scenarios(self) -> Sequence[Task]: ...

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        """Returns the reflector's structured context for each piece of evidence, in order."""
        ...

    def ask(self, role: str, questions: Sequence[Question], *, reader: str = "") -> list[str | None]:
        """Asks the explorer's language model. Returns one line for each question, in order.

        None stands for an answer that is not usable, and for all of them where rules explore
        (explorer=scripted). A method then goes by its own rules. Prompts lie beside the strategies, in
        prompts/*.md (llm/prompting.py). They end with what the field "answer" of a JSON object shall hold.

        Args:
          role: the name under which the ledger counts these questions.
          reader: the explorer's part that the answers are for ("explorer", "abstractor"). Where rules play
            it, nothing is asked.
        """
        ...

    def offered(self, scenario: Task) -> frozenset[str]:
        """Returns the names of the tools that the environment offers in a scenario or task."""
        ...

    @property
    def own_patterns(self) -> bool:
        """Whether the environment family names actions by patterns of its own, not by the tools' names."""
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
        once: bool = False,
        into: TaskPool | None = None,
    ) -> SynthesisStats:
        """Runs explore -> abstract -> validate under these contexts. D_t grows by at most `wanted` tasks.

        Args:
          kind: origin of the new tasks, for Lineage.kind.
          step: the GRPO step, for the lineage and the ids.
          admit: may refuse tasks of each validated batch. It does not see those that leak control refuses.
          relocate: moves a context that led to no task to another scenario. With it, each context gives one
            task before any gives a second.
          once: explore each context once, and take at most one task of each.
          into: a pool of the strategy's own that grows in place of D_t. Its tasks are validated, compared
            with the evaluation tasks and counted like any.
        """
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
        into: TaskPool | None = None,
    ) -> SynthesisStats:
        """Does the same by free exploration of random scenarios, until the pool has grown by `wanted`.

        Ends earlier if the scenarios give no more new tasks. scenarios: None stands for all of
        `self.scenarios`.
        """
        ...

    def adopt(
        self, tasks: Sequence[Task], *, kind: str, solved: Mapping[str, float] | None = None
    ) -> SynthesisStats:
        """Adds tasks of a pool of the strategy's own to D_t, in their order. They keep their ids.

        kind: their new Lineage.kind. solved: task id -> share of probing rollouts that solved it.
        """
        ...

    def probe(self, tasks: Sequence[Task], k: int, step: int) -> list[Group]:
        """Returns k rollouts of each task by the current policy. The learner does not train on them."""
        ...

    def influence(
        self, goal: Sequence[Group], groups: Sequence[Group], *, preconditioned: bool = True
    ) -> list[float]:
        """Returns for each group the cosine between its update and the gradient of the goal's groups.

        Only numbers leave the devices. A group whose rewards, with the terms of config.reward added, are all
        equal has influence 0. The groups are the current policy's, such as those of `probe`.

        preconditioned: compare the direction of Adam's step, without momentum and clipping; else the plain
        gradient.
        """
        ...

    def branch(
        self, tasks: Sequence[Task], goal: Sequence[Task], *, updates: int, batch: int, k: int, step: int
    ) -> Branch:
        """Trains a copy of the policy on `tasks` and forgets it. Returns greedy rollouts of the goal.

        Args:
          updates: GRPO updates of the copy, each on `batch` of the tasks, drawn anew, with k rollouts each.
        """
        ...


class Branch(NamedTuple):
    """Greedy rollouts of the goal's tasks by the policy before a branch and by the branch at its end."""

    before: list[Group]
    after: list[Group]


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A method's findings in the rollouts of a step.

    Attributes:
      counts: number of findings by kind, for metrics.jsonl.
      rows: for signals.jsonl, in the method's own format. The report links rows with a Signal's keys to
        tasks.
    """

    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()


class Strategy(Protocol):
    """A self-evolving method. Every GRPO step makes the four calls in this order.

    With config.rollout.max_staleness S, `collect` for steps t + 1 to t + S starts before `compute_advantages`
    of step t, in other threads. It must then change no state of the strategy.
    """

    def collect(self, step: int, tasks: TaskPool, roll: Roll) -> list[Group]:
        """Draws a batch of tasks from D_t and rolls them out.

        roll: may be called until `collect` returns. Later rollouts are those of `Lab.probe`.
        """
        ...

    def compute_advantages(self, groups: Sequence[Group]) -> list[TrainingSample]:
        """Returns the samples to learn from. Leaves out invalid trajectories and never changes outcomes."""
        ...

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        """Updates the strategy's own statistics from the rollouts, and reports what it found."""
        ...

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        """Evolves the training set through `lab`. Returns None at a step without evolution.

        With config.evolution.async_steps above 0 the call runs concurrently with the next steps from its
        first use of `lab` on. From there on it must not touch the strategy's state, and it cannot probe. The
        next call comes only after it has ended.
        """

    def to_json(self) -> dict:
        """Returns the state as JSON values, from which `make` continues exactly here."""
        ...


def help_of(strategy: Strategy) -> Help | None:
    """The `help` of a strategy with a memory, which helps the policy when it is evaluated too.

    It leaves the strategy's state as it is. An evaluation gives it held-out tasks without their reference
    calls (`Task.without_calls`). The strategy's module NEEDS `help`. None where a strategy has none.
    """
    return getattr(strategy, "help", None)


def trajectories_of(groups: Sequence[Group]) -> list[Trajectory]:
    """All trajectories, group by group."""
    return [t for group in groups for t in group.trajectories]


def must_be(config: ConfigDict, name: str, holds: bool, rule: str) -> None:
    """Raises ValueError, in one sentence, unless a setting of the strategy holds.

    name: of the setting. rule: completes "it must be".
    """
    if not holds:
        raise ValueError(f"config.strategy.{name} is {config.strategy[name]!r}: it must be {rule}.")


def check_least(config: ConfigDict, least: Mapping[str, float]) -> None:
    """Raises ValueError if a setting of the strategy is below its least value."""
    for name, bound in least.items():
        must_be(config, name, config.strategy[name] >= bound, f"{bound} or more")


def check_shares(config: ConfigDict, *names: str) -> None:
    """Raises ValueError if a setting of the strategy does not lie within 0 and 1."""
    for name in names:
        must_be(config, name, 0 <= config.strategy[name] <= 1, "within 0 and 1")


def check_band(config: ConfigDict) -> None:
    """Raises ValueError unless config.strategy.band is two shares, the lower one first."""
    band = tuple(config.strategy.band)
    holds = len(band) == 2 and 0 <= band[0] <= band[1] <= 1
    must_be(config, "band", holds, "two shares of 0 to 1, the lower one first")


def check_rolled_once(config: ConfigDict) -> None:
    """Raises ValueError with learner.dynamic_sampling, for a strategy that rolls each batch once."""
    if more := config.learner.dynamic_sampling:
        raise ValueError(
            f"config.learner.dynamic_sampling is {more}, and strategy {config.strategy.name} draws no task "
            "anew: set it to 0."
        )


def check_calls(config: ConfigDict, tasks: TaskPool) -> None:
    """Raises ValueError where no task of D_t has reference calls, for a strategy that grows from them."""
    if not any(task.calls for task in tasks):
        raise ValueError(
            f"Strategy {config.strategy.name} makes new tasks from reference calls, and none of the "
            f"{len(tasks)} tasks of D_t has any: use another strategy, such as random or even, or set "
            "config.data.own_tasks to False, so that D_0 is explored."
        )


def evolves(config: ConfigDict, step: int) -> bool:
    """Whether the training set evolves after this step (config/schedule.py)."""
    return step in evolutions(config)


def grpo_samples(
    config: ConfigDict, groups: Sequence[Group], state: FilterState, rewards: Rewards = outcome_rewards
) -> tuple[list[TrainingSample], FilterState]:
    """GRPO's samples: chooses groups by the spread of their rewards and computes advantages within each.

    Nothing else decides which groups are learned from. It reads config.learner: skip_zero_variance_groups,
    dynamic_sampling, group_filter with the keys filter_*, and those of `samples_of`.

    Args:
      state: of the group filter.
      rewards: what the rollouts are worth before the terms of config.reward are added.

    Returns:
      (samples, state of the group filter after them)
    """
    c, rewards = config.learner, rewards_of(config, rewards)
    shaped = {i: list(rewards(group)) for i, group in enumerate(groups) if group.valid}
    active_groups = {i: spread_of(config, groups[i], values) for i, values in shaped.items()}
    if c.skip_zero_variance_groups or c.dynamic_sampling:
        active_groups = drop_zero_variance(active_groups)
    if c.group_filter:
        active_groups, state = filter_groups(
            state,
            active_groups,
            z=c.filter_z,
            decay=c.filter_decay,
            warmup=c.filter_warmup,
            keep=c.filter_keep,
            side=c.filter_side,
        )
    return [s for i in active_groups for s in samples_of(config, groups[i], shaped[i])], state


def spread_of(config: ConfigDict, group: Group, rewards: Sequence[float]) -> float:
    """The standard deviation of a group's rewards; 0 where `samples_of` leaves out all its rollouts."""
    filtered = config.learner.overlong_filtering and all(t.truncated for t in group.valid)
    return 0.0 if filtered else spread(rewards)


def samples_of(config: ConfigDict, group: Group, rewards: Sequence[float]) -> list[TrainingSample]:
    """A group's valid rollouts with GRPO's advantage at every token.

    config.learner: advantage, and overlong_filtering, which leaves out truncated rollouts when the advantages
    of all have been computed.
    """
    c = config.learner
    return [
        TrainingSample(t, np.full(len(t.ids), a, np.float32))
        for t, a in zip(group.valid, group_advantages(rewards, estimator=c.advantage), strict=True)
        if not (c.overlong_filtering and t.truncated)
    ]
