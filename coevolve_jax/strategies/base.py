"""The Strategy protocol, by which train.py uses a self-evolving method, and functions that methods share.

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
    influence `Lab.influence` (as for probe; learner.optimizer_offload False)
    branch    `Lab.branch` (as for probe; the in-process engine)

A method of the literature says in `FIDELITY` how near it is to its paper: a mark and a sentence.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config.schedule import KEYS, evolutions
from coevolve_jax.grpo.advantages import drop_zero_variance, group_advantages
from coevolve_jax.grpo.filter import FilterState, filter_groups
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis import knobs
from coevolve_jax.synthesis.pipeline import Relocate, SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import Admit, Verdict
from coevolve_jax.types import Context, Evidence, Group, Hint, Task, TrainingSample, Trajectory, spread

SIGNALS = ("signals.window", "signals.rare_percent")
SHARED = (*KEYS, "evolution.tasks", "evolution.contexts", *SIGNALS)  # config keys that methods may read

Rewards = Callable[[Group], Sequence[float]]  # group -> rewards of its valid trajectories, in their order


class Roll(Protocol):
    """Rollouts of one step by the current policy."""

    def __call__(
        self,
        tasks: Sequence[Task],
        k: int,
        hints: Callable[[Task, int], Hint | None] | None = None,
        role: str = "policy",
    ) -> list[Group]:
        """Returns K rollouts of each task, one group per task.

        Args:
          hints: (task, rollout_index) -> help for that rollout.
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

    def offered(self, scenario: Task) -> frozenset[str]:
        """Returns the names of the tools that the environment offers in a scenario or task."""
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

        Only numbers leave the devices. A group whose rewards are all equal has influence 0. The groups are
        the current policy's, such as those of `probe`.

        preconditioned: compare the direction of Adam's step; else the plain gradient.
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
        """Draws a batch of tasks from D_t and rolls them out."""
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


def outcome_rewards(group: Group) -> Sequence[float]:
    """The environment's own rewards."""
    return group.rewards


def trajectories_of(groups: Sequence[Group]) -> list[Trajectory]:
    """All trajectories, group by group."""
    return [t for group in groups for t in group.trajectories]


def collect_batch(
    config: ConfigDict,
    step: int,
    tasks: TaskPool,
    roll: Roll,
    *,
    rewards: Rewards = outcome_rewards,
    weights: Callable[[TaskPool], np.ndarray] | None = None,
    min_evolved_share: float | None = None,
    **how: Any,
) -> list[Group]:
    """Draws a batch of tasks from D_t and rolls each out K times.

    The draw follows config.data: min_evolved_share, sampling and retire_after.
    With config.learner.dynamic_sampling (DAPO, arXiv 2503.14476, section 3.2) each zero-variance group is
    replaced by another task, in at most that many further rounds. All groups are returned, the zero-variance
    ones too.

    Args:
      rewards: the rewards whose spread counts.
      weights: D_t [N] -> odds of its tasks [N], in the order of D_t. 0 retires a task: it comes only if no
        other is left. None: those of config.data.
      min_evolved_share: None: that of config.data.
      how: further arguments of `roll`.
    """
    c, groups = config, []
    odds = (lambda rows: weights(tasks)) if weights else (lambda rows: sampling_weights(c, rows))
    share = c.data.min_evolved_share if min_evolved_share is None else min_evolved_share
    missing = c.rollout.tasks_per_step
    for round in range(1 + c.learner.dynamic_sampling):
        again = (round,) if round else ()
        drawn = tasks.draw(
            missing,
            rng_for(c.seed, "sample", step, *again),
            min_evolved_share=share,
            weights=odds,
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
    """Sampling weight of each task, [N], from the task pool's rows [N].

    config.data.sampling "uniform" gives 1. "variance" gives max(config.data.sampling_floor, 4 p (1 - p)) for
    a last score p, and 1 before the first visit. A task weighs 0 if its last config.data.retire_after visits
    were all solved or all failed (0 turns this rule off).
    """
    c, weights = config.data, np.ones(len(rows))
    if c.sampling != "uniform":
        p = rows["last_score"]
        weights = np.where(np.isnan(p), 1.0, np.maximum(c.sampling_floor, 4 * p * (1 - p)))
    if c.retire_after:
        weights = np.where(rows["saturated_visits"] >= c.retire_after, 0.0, weights)
    return weights


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


def by_variance(config: ConfigDict) -> Callable[[TaskPool], np.ndarray]:
    """Odds of the tasks by p (1 - p), whatever config.data.sampling says: `weights` of `collect_batch`."""
    rule = ConfigDict({"data": {**config.data.to_dict(), "sampling": "variance"}})
    return lambda tasks: sampling_weights(rule, tasks.rows)


def evolves(config: ConfigDict, step: int) -> bool:
    """Whether the training set evolves after this step (config/schedule.py)."""
    return step in evolutions(config)


def solvable(config: ConfigDict, lab: Lab, step: int, k: int) -> Admit:
    """Admits tasks that k probing rollouts solve sometimes, but not always; k = 0 admits all.

    Refuses a task whose probing rollouts are all invalid, as "environment": nothing is known about it.
    """

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


def synthesize_freely(config: ConfigDict, step: int, lab: Lab, **how: Any) -> SynthesisStats | None:
    """Evolves D_t as the control `random` does: by config.evolution.tasks tasks of free exploration.

    Methods that differ from `random` in other things than growth share its tasks by this function.

    how: further arguments of `lab.synthesize_unguided`.
    """
    if not evolves(config, step):
        return None
    rng, wanted = rng_for(config.seed, "evolve", step), config.evolution.tasks
    return lab.synthesize_unguided(wanted=wanted, kind="random", step=step, rng=rng, **how)


def synthesize_in_turn(lab: Lab, contexts: Sequence[Context], *, wanted: int, **how: Any) -> SynthesisStats:
    """Explores contexts in their order, each once and for at most one task, until D_t has grown by `wanted`.

    Later contexts thus only make up for earlier ones that give no task.

    how: further arguments of `lab.synthesize`; `kind`, `step` and `rng` are needed.
    """
    total, left = SynthesisStats(), list(contexts)
    while left and total.added < wanted:
        now, left = left[: wanted - total.added], left[wanted - total.added :]
        total.add(lab.synthesize(now, wanted=len(now), once=True, **how))
    return total


def synthesize_for_tools(
    lab: Lab, tools: Sequence[str], signal: str, *, scenarios: Sequence[Task] | None = None, **wanted: Any
) -> SynthesisStats:
    """Makes one task for each of `tools` that has to call the tool.

    Explores random scenarios that offer the tool until one gives a task. If some tools give none, further
    tasks of the other tools make up for them, up to `wanted` in all.

    Args:
      tools: action patterns; in most families the names of tools.
      signal: names the contexts, and goes into the lineage.
      scenarios: None stands for all of `lab.scenarios`.
      wanted: further arguments of `lab.synthesize`; `wanted`, `kind`, `step` and `rng` are needed.
    """
    step, rng = wanted["step"], wanted["rng"]
    places = offering(lab, tools, scenarios)

    def context(tool: str, id: str) -> Context:
        scenario = places[tool][rng.integers(len(places[tool]))]
        words = f"{tool} is called wrongly or not at all."
        return Context(id, signal, scenario, words, "", "", focus_pattern=(tool,), avoid=(), must=(tool,))

    def relocate(unproductive: Context) -> Context:
        id, _, place = unproductive.id.rpartition("/")
        return context(unproductive.must[0], f"{id}/{int(place) + 1}")

    return lab.synthesize(
        [context(tool, f"{signal}/{step}/{i}/{tool}/0") for i, tool in enumerate(tools) if places[tool]],
        relocate=relocate,
        **wanted,
    )


def offering(
    lab: Lab, actions: Sequence[str], scenarios: Sequence[Task] | None = None
) -> dict[str, list[Task]]:
    """Maps each action to the scenarios that offer it.

    A tool is offered where it is on the list. Where tasks of D_t have action patterns of the family's own,
    every scenario may offer them.

    scenarios: None stands for all of `lab.scenarios`.
    """
    among = lab.scenarios if scenarios is None else scenarios
    offered = [lab.offered(scenario) for scenario in among]
    anywhere = any(task.patterns for task in lab.tasks)
    return {
        action: [s for s, tools in zip(among, offered) if anywhere or action in tools]
        for action in dict.fromkeys(actions)
    }


def actions_on_offer(lab: Lab) -> list[str]:
    """The names of all tools that scenarios offer, sorted.

    Where tasks of D_t have action patterns of the family's own, these patterns.
    """
    if any(task.patterns for task in lab.tasks):
        return sorted({action for task in lab.tasks for action in task.actions})
    return sorted({tool for scenario in lab.scenarios for tool in lab.offered(scenario)})


def set_apart(config: ConfigDict, lab: Lab, share: float = 0.25) -> tuple[list[Task], list[Task]]:
    """Splits the scenarios into those to grow in and those set apart for measuring.

    The split depends on config.seed alone. A single scenario is on both sides.

    share: of the scenarios that are set apart; at least one is.
    """
    order = rng_for(config.seed, "set apart").permutation(len(lab.scenarios)).tolist()
    count = max(1, int(share * len(order)))
    apart, others = ([lab.scenarios[i] for i in sorted(part)] for part in (order[:count], order[count:]))
    return others or apart, apart


def category(task: Task, names: str) -> str:
    """The task's category: its values of these names, joined by "/".

    names: separated by commas. "calls" is the number of reference calls, "turns" that of user turns. Any
      other name is a key of the scenario.

    Raises:
      ValueError: the scenario lacks a key.
    """
    known = {"calls": len(task.calls), "turns": len(task.turns), **task.scenario}
    for name in (wanted := names.split(",")):
        if name not in known:
            raise ValueError(
                f"Category {name!r} is no key of the scenario of task {task.id}: use calls, turns, "
                f"or one of {', '.join(sorted(task.scenario))}."
            )
    return "/".join(v if isinstance(v := known[name], str) else json.dumps(v) for name in wanted)


def goal_set(config: ConfigDict, lab: Lab, size: int, step: int) -> tuple[list[Task], SynthesisStats]:
    """Makes tasks to measure on, in the scenarios set apart. D_t takes none of them.

    Each has to call an action of its own, drawn at random, as far as there are enough. `random_dev` draws the
    same actions.
    """
    rng, actions, made = rng_for(config.seed, "goals", step), actions_on_offer(lab), lab.tasks.fresh()
    order = rng.permutation(len(actions)).tolist()
    chosen = [actions[order[i % len(order)]] for i in range(size if order else 0)]
    stats = synthesize_for_tools(
        lab, chosen, "goal", scenarios=set_apart(config, lab)[1], wanted=len(chosen), kind="goal", step=step,
        rng=rng, into=made,
    )  # fmt: skip
    return unseen(lab.tasks, list(made)), stats


def unseen(tasks: TaskPool, made: Sequence[Task]) -> list[Task]:
    """Returns the new tasks that are no duplicates of a pool's."""
    refusals = tasks.fork().add(made)
    return [task for task, refusal in zip(made, refusals, strict=True) if refusal != "duplicate"]


def draft(
    lab: Lab, contexts: Sequence[Context], *, step: int, rng: np.random.Generator, kind: str = "draft"
) -> tuple[TaskPool, SynthesisStats]:
    """Makes one task for each context that gives one, in a new pool. D_t stays as it is.

    Each draft's `lineage.context` is the id of its context. `lab.adopt` takes the best into D_t, and
    `SynthesisStats.adopting` joins the statistics of both.
    """
    drafts = lab.tasks.fresh()
    made = lab.synthesize(
        contexts, wanted=len(contexts), kind=kind, step=step, rng=rng, once=True, into=drafts
    )
    return drafts, made


def propose(
    lab: Lab,
    drawn: Sequence[Mapping[str, Any]],
    signal: str,
    *,
    step: int,
    rng: np.random.Generator,
    scenarios: Sequence[Task] | None = None,
) -> tuple[list[Task | None], SynthesisStats]:
    """Makes one draft for each setting of a proposer (synthesis/knobs.py); None where it gives none.

    Args:
      signal: names the contexts.
      scenarios: of each setting; None: a random one that has the setting's key.
    """
    contexts = [
        knobs.context(
            d, [scenarios[i]] if scenarios else lab.scenarios, rng, id=f"{signal}/{step}/{i}", signal=signal
        )
        for i, d in enumerate(drawn)
    ]
    drafts, made = draft(lab, contexts, step=step, rng=rng)
    by_context = {task.lineage.context: task for task in drafts}
    return [by_context.get(c.id) for c in contexts], made


def adopt_first(
    lab: Lab, ranked: Sequence[Task], count: int, *, kind: str, solved: Mapping[str, float] | None = None
) -> SynthesisStats:
    """Adds drafts to D_t, best first, until it has taken `count`. One that it refuses costs no place.

    ranked: the drafts, best first. kind and solved: as in `lab.adopt`.
    """
    total = SynthesisStats()
    for task in ranked:
        if total.added < count:
            total.add(lab.adopt([task], kind=kind, solved=solved))
    return total


def solve_rate(group: Group) -> float | None:
    """The share of the valid rollouts that succeed; None if no rollout is valid."""
    valid = group.valid
    return sum(t.outcome.success for t in valid) / len(valid) if valid else None


def majority(group: Group) -> tuple[float, str, list[bool]]:
    """The ending that most valid rollouts share, found without the task's reference calls.

    A rollout that did not end by itself, or whose world was lost, agrees with none. Ties go to the ending
    that came first.

    Returns:
      (share of the valid rollouts that agree, their ending or "", for each valid rollout whether it agrees)
    """
    own = [t.ending if t.stop == "done" else "" for t in group.valid]
    counts = Counter(ending for ending in own if ending)
    if not counts:
        return 0.0, "", [False] * len(own)
    ending, count = counts.most_common(1)[0]
    return count / len(own), ending, [e == ending for e in own]


def spans(trajectory: Trajectory) -> list[slice]:
    """The tokens of each message that the policy wrote, in order. Step.message is an index of this list."""
    edges = np.flatnonzero(np.diff(np.pad(trajectory.mask.astype(np.int8), 1)))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2])]


def grpo_samples(
    config: ConfigDict, groups: Sequence[Group], state: FilterState, rewards: Rewards = outcome_rewards
) -> tuple[list[TrainingSample], FilterState]:
    """GRPO's samples: chooses groups by the spread of their rewards and computes advantages within each.

    Nothing else decides which groups are learned from. It reads config.learner: skip_zero_variance_groups,
    dynamic_sampling, group_filter and advantage.

    Returns:
      (samples, state of the group filter after them)
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
