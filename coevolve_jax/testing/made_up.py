"""Made-up rollouts, tasks and services, with which strategies run without a model or an environment."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.llm.prompting import Question, seed_of
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import Branch
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.pipeline import SynthesisRequest, SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import (
    QUERY,
    Call,
    Context,
    Evidence,
    Group,
    Hint,
    Lineage,
    Outcome,
    Step,
    Task,
    Trajectory,
    Turn,
)


@dataclasses.dataclass
class MadeUpRoll:
    """A strategies.base.Roll of made-up rollouts: longer tasks fail more often, one in twenty is invalid.

    closed: whether `collect` has returned. altered: whether invalid rollouts show something else.
    first_steps: of the first rollout, before that.
    """

    config: ConfigDict
    step: int
    made: list[Group] = dataclasses.field(default_factory=list)
    hints: list = dataclasses.field(default_factory=list)
    closed: bool = False
    altered: bool = False
    first_steps: tuple[Step, ...] = ()

    def __call__(
        self,
        tasks: Sequence[Task],
        k: int,
        hints: Callable[[Task, int], Hint | None] | None = None,
        role: str = "policy",
    ) -> list[Group]:
        assert not self.closed, (
            f"{self.config.strategy.name}: roll of step {self.step} was called after collect had returned; "
            "use lab.probe there."
        )
        rng = rng_for(self.config.seed, "rollout" if role == "policy" else role, self.step, len(self.made))
        groups = [
            Group(task, tuple(made_up_rollout(rng, task, m, self.step) for m in range(k))) for task in tasks
        ]
        steps = groups[0].trajectories[0].steps if groups and k else ()
        self.first_steps = self.first_steps or steps
        if hints:
            groups = [
                Group(g.task, tuple(_hinted(t, hints(g.task, t.rollout_index)) for t in g.trajectories))
                for g in groups
            ]
            given = [hints(g.task, t.rollout_index) for g in groups for t in g.trajectories]
            self.hints += [said(hint, steps) for hint in given]
        if self.altered:
            groups = [Group(g.task, tuple(map(_altered, g.trajectories))) for g in groups]
        self.made += groups
        return groups


def _altered(trajectory: Trajectory) -> Trajectory:
    """Returns a valid rollout as it is, and an invalid one with other calls, another end and reward 1."""
    if trajectory.outcome.valid:
        return trajectory
    steps = tuple(Step(0, "tool_7", Call("tool_7", {"x": -2}), '{"error": "lost"}', True) for _ in range(3))
    return dataclasses.replace(
        trajectory, steps=steps, outcome=Outcome(1.0, True, valid=False), ending=f"{trajectory.task_id}: lost"
    )


def _hinted(trajectory: Trajectory, hint: Hint | None) -> Trajectory:
    """The rollout with the hint before its task on record. One of two uses a macro that it is offered."""
    told = ((0, hint.before_task),) if hint and hint.before_task else ()
    used = hint.macros[0].name if hint and hint.macros and trajectory.rollout_index % 2 else ""
    steps = tuple(dataclasses.replace(s, macro=used) for s in trajectory.steps)
    return dataclasses.replace(trajectory, hints=told, steps=steps)


def made_up_rollout(rng: np.random.Generator, task: Task, rollout_index: int, step: int) -> Trajectory:
    """Makes up a rollout. Each message has one call and 6 tokens, after 6 others.

    One that succeeds makes the task's reference calls. A failed one leaves them somewhere: it stops there, or
    makes another call, in error or not, or writes a text that is no call. Each makes one step or more. A
    held-out query, which has no reference calls, gets two calls and no reward.
    """
    calls = (Call("tool_0", {"x": 0}), Call("tool_1", {"x": 1})) if task.is_query else task.calls
    right, valid = bool(rng.random() < 1 / (1 + len(calls) / 3)), bool(rng.random() < 0.95)
    solved = right and valid and not task.is_query
    steps = tuple(Step(0, c.name, c, "{}", error=False) for c in calls)
    if not right:
        left, how, tool = rng.integers((len(calls), 4, 8)).tolist()
        other, error = Call(f"tool_{tool}", {"x": -1}), how == 1
        steps = steps[:left]
        if how == 3:
            steps += (Step(0, "I cannot.", None, '{"error": "no call"}', error=True),)
        elif how or not left:
            steps += (Step(0, other.name, other, '{"error": "no"}' if error else "{}", error),)
    mask = np.arange(12 * len(steps)) % 12 >= 6
    return Trajectory(
        task_id=task.id,
        rollout_index=rollout_index,
        ids=rng.integers(0, 50, len(mask)).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -rng.random(len(mask)), 0).astype(np.float32),
        versions=np.where(mask, step, -1).astype(np.int32),
        turn_starts=(0,),
        steps=tuple(dataclasses.replace(s, message=i) for i, s in enumerate(steps)),
        stop="done" if valid else "environment",
        outcome=Outcome(float(solved), solved, valid),
        ending=f"{task.id}: right" if right else f"{task.id}: wrong {rng.integers(2)}",
    )


@dataclasses.dataclass
class MadeUpLab:
    """A strategies.base.Lab of made-up tasks.

    probed: whether it was asked for rollouts. numbers: how many tasks it made, by kind and step.
    own_patterns: as in the Lab. altered: as in MadeUpRoll. added: ids of the tasks that it added to D_t.
    """

    config: ConfigDict
    tasks: TaskPool
    scenarios: Sequence[Task] = tuple(Task(f"scenario_{i}", "made_up", {"id": i}) for i in range(3))
    probed: bool = False
    numbers: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)
    own_patterns: bool = False
    altered: bool = False
    added: set[str] = dataclasses.field(default_factory=set)

    def offered(self, scenario: Task) -> frozenset[str]:
        return frozenset(f"tool_{i}" for i in range(8))

    def ask(self, role: str, questions: Sequence[Question], *, reader: str = "") -> list[str | None]:
        """Answers with a number from 1 to 9 and, to one question in four, nothing."""
        made = [rng_for(self.config.seed, "ask", 0, seed_of(role, q.user)).integers(1, 13) for q in questions]
        return [str(n) if n < 10 else None for n in made]

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        return [
            Context(f"{e.signal.kind}/{e.task.id}", e.signal.kind, e.task, focus_pattern=e.trajectory.actions)
            for e in evidence
        ]

    def synthesize(
        self, contexts: Sequence[Context], *, into: TaskPool | None = None, **wanted: Any
    ) -> SynthesisStats:
        request = SynthesisRequest(**wanted)
        return self._add(contexts[: request.wanted], request, into)

    def synthesize_unguided(
        self, *, scenarios: Sequence[Task] | None = None, into: TaskPool | None = None, **wanted: Any
    ) -> SynthesisStats:
        request = SynthesisRequest(**wanted)
        free = [unguided(s, f"{request.kind}-{s.id}") for s in scenarios or self.scenarios]
        return self._add([free[i % len(free)] for i in range(request.wanted)], request, into)

    def adopt(
        self, tasks: Sequence[Task], *, kind: str, solved: Mapping[str, float] | None = None
    ) -> SynthesisStats:
        assert all(task.turns for task in tasks)
        line = lambda t: dataclasses.replace(t.lineage, kind=kind, solved=(solved or {}).get(t.id))
        own = [dataclasses.replace(t, lineage=line(t)) for t in tasks]
        return SynthesisStats(proposed=len(tasks), accepted=len(tasks), added=self._put(own, None))

    def probe(self, tasks: Sequence[Task], k: int, step: int) -> list[Group]:
        self.probed = True
        return MadeUpRoll(self.config, step, altered=self.altered)(tasks, k, role="probe")

    def influence(
        self, goal: Sequence[Group], groups: Sequence[Group], *, preconditioned: bool = True
    ) -> list[float]:
        self.probed = True
        rng = rng_for(self.config.seed, "influence", *(len(g.task.calls) for g in (*goal, *groups)))
        return rng.uniform(-1, 1, len(groups)).tolist()

    def branch(
        self, tasks: Sequence[Task], goal: Sequence[Task], *, updates: int, batch: int, k: int, step: int
    ) -> Branch:
        self.probed = True
        number = self.numbers["branch", step]
        self.numbers["branch", step] += 1
        made = [Group(task, ()) for task in goal] * number
        roll = MadeUpRoll(self.config, step, made, altered=self.altered)
        before, after = (roll(goal, 1, role="branch") for _ in range(2))
        return Branch(before, after)

    def _add(
        self, contexts: Sequence[Context], request: SynthesisRequest, into: TaskPool | None
    ) -> SynthesisStats:
        kind, step, new = request.kind, request.step, []
        for context in contexts:
            number = self.numbers[kind, step]
            self.numbers[kind, step] += 1
            new.append(made_up_task(f"{kind}-{step}-{number}", request.rng, kind, step, context))
        if request.admit is not None:
            new = [task for task, word in zip(new, request.admit(new), strict=True) if word.refusal is None]
        added = self._put(new, into)
        return SynthesisStats(proposed=len(contexts), accepted=added, added=added)

    def _put(self, new: Sequence[Task], into: TaskPool | None) -> int:
        """Puts tasks into a pool, D_t by default. Returns how many it took."""
        verdicts = (self.tasks if into is None else into).add(new)
        taken = {task.id for task, refusal in zip(new, verdicts, strict=True) if refusal is None}
        self.added |= taken if into is None else set()
        return len(taken)


def made_up_task(
    id: str,
    rng: np.random.Generator,
    kind: str = "initial",
    step: int = 0,
    context: Context | None = None,
) -> Task:
    """Makes up a task of 1 to 6 calls of 8 tools, or one that follows a context's plan and limits."""
    least, most = (context and context.calls) or (1, 6)
    asked = [*context.plan, *context.must] if context else []
    names = [p.name if isinstance(p, Call) else p for p in asked][:most]
    count = max(int(rng.integers(least, most + 1)), len(names))
    names += [f"tool_{rng.integers(8)}" for _ in range(count - len(names))]
    calls = tuple(Call(name, {"x": int(rng.integers(1000))}) for name in names)
    parts = min((context and context.turns) or 1, count)
    turns = tuple(Turn("do it", calls[i::parts]) for i in range(parts))
    born = Lineage(kind, step=step)
    if context is not None:
        born = Lineage(kind, context.signal, context.parent or context.task.id, context.id, step=step)
    return Task(id, "made_up", {"id": id}, turns, lineage=born)


def made_up_pool(config: ConfigDict) -> TaskPool:
    """Makes up a D_0 of the config's size, with its queries."""
    tasks, rng = TaskPool(), rng_for(config.seed, "initial")
    tasks.add([made_up_task(f"initial-0-{i}", rng) for i in range(config.data.initial_tasks)])
    if config.evaluation.queries:
        queries = [made_up_task(f"query-0-{i}", rng, QUERY) for i in range(config.evaluation.queries)]
        tasks.add([task.without_calls() for task in queries])
    return tasks


def said(hint: Hint | None, steps: Sequence[Step]) -> tuple | None:
    """Returns what a hint says to a rollout with these steps, for comparison."""
    return hint and (hint.before_task, hint.before_step and hint.before_step(steps), hint.macros)
