"""Abstraction by a language model: it picks successful steps for a task and words a user's request for them.

The model names steps by number and writes no calls. So the environment has executed every reference call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from coevolve_jax.explorers.base import Exploration, Goal, Limits, Proposal, Shorten
from coevolve_jax.explorers.evidence import signature
from coevolve_jax.explorers.llm.lines import history, lead, question, tool_lines
from coevolve_jax.explorers.plans import fulfilled
from coevolve_jax.llm.answers import Client
from coevolve_jax.llm.prompting import visible
from coevolve_jax.types import Call, Triplet, Turn


class TurnAnswer(BaseModel):
    query: Annotated[
        str,
        StringConstraints(strip_whitespace=True, min_length=1, max_length=2000),
        BeforeValidator(lambda text: visible(text) if isinstance(text, str) else text),
    ]
    steps: list[int] = Field(min_length=1)


class TaskAnswer(BaseModel):
    """difficulty: from 1 to 5."""

    description: Annotated[str, Field(max_length=500), AfterValidator(visible)]
    difficulty: int = Field(ge=1, le=5)
    turns: list[TurnAnswer] = Field(min_length=1)


class Tasks(BaseModel):
    # A comment, since the schema that the model gets holds the docstring: tasks of the wrong form are left
    # out and counted. An answer without any other is wrong as a whole, and the model is asked again.
    tasks: list[TaskAnswer]
    _lost: int = PrivateAttr(0)

    @property
    def lost(self) -> int:
        return self._lost

    @model_validator(mode="wrap")
    @classmethod
    def _each_alone(cls, data: Any, validate: ModelWrapValidatorHandler[Tasks]) -> Tasks:
        try:
            return validate(data)
        except ValidationError:
            rows = data.get("tasks") if isinstance(data, dict) else None
            alone = [_sound_task(row) for row in rows] if isinstance(rows, list) else []
            good = [task for task in alone if task]
            if not good:
                raise
            made = cls(tasks=good)
            made._lost = len(alone) - len(good)
            return made


def _sound_task(row: Any) -> TaskAnswer | None:
    try:
        return TaskAnswer.model_validate(row)
    except ValidationError:
        return None


class Abstractor:
    def __init__(self, client: Client, action_pattern: Callable[[Call], str]):
        self._client, self._action_pattern = client, action_pattern

    def abstract(
        self, explorations: Sequence[Exploration], limits: Limits, shorten: Shorten
    ) -> list[list[Proposal]]:
        asked = [e for e in explorations if len(_sound(e)) >= limits.of(e.context).min_calls]
        questions = [
            question(
                "abstract",
                int(e.rng.integers(2**31)),
                {"context": e.context.id},
                tools=tool_lines(_used(e)),
                rounds=[history(own) for own in _rounds(e.triplets)],
                planned=self._planned(e, limits.of(e.context)),
                limits=limits.of(e.context),
                **lead(e.context),
            )
            for e in asked
        ]
        answers = self._client.ask("abstract", questions, Tasks)
        found = {
            id(e): self._sound_tasks(e, answer, limits.of(e.context))
            for e, answer in zip(asked, answers, strict=True)
            if answer is not None
        }
        wanted = [found.get(id(e), []) for e in explorations]
        goals = [
            Goal(e, tuple(_steps(task))) for e, own in zip(explorations, wanted, strict=True) for task in own
        ]
        solutions = iter(shorten(goals))
        return [
            self._proposals(e, own, list(itertools.islice(solutions, len(own))), limits.of(e.context))
            for e, own in zip(explorations, wanted, strict=True)
        ]

    def _planned(self, exploration: Exploration, limits: Limits) -> tuple[int, ...]:
        """Returns the steps of the first round that followed the context's whole plan; () where none did."""
        plan, rounds = exploration.context.plan, _rounds(_sound(exploration))
        for steps in rounds:
            found = fulfilled(plan, steps, self._action_pattern) if len(steps) >= limits.min_calls else ()
            if 0 < len(found) <= limits.max_calls:
                return found
        return ()

    def _sound_tasks(self, exploration: Exploration, answer: Tasks, limits: Limits) -> list[TaskAnswer]:
        """Keeps tasks within the limits, made of successful steps of one round, each once and in order.

        Those that do all that was planned come first, the shortest before the others. Refusals count in
        `costs` as llm_refused/REASON.
        """
        rounds, kept = {t.index: t.round for t in _sound(exploration)}, []
        if answer.lost:
            self._client.costs["llm_refused/wrong_form"] += answer.lost
        planned = self._planned(exploration, limits)
        extra = lambda steps: len(steps) if planned and set(planned) <= set(steps) else math.inf
        for task in sorted(answer.tasks, key=lambda task: extra(_steps(task))):
            steps = _steps(task)
            if not set(steps) <= rounds.keys():
                refusal = "no_such_step"
            elif len({rounds[i] for i in steps}) > 1:
                refusal = "two_rounds"
            elif steps != sorted(set(steps)):
                refusal = "steps_out_of_order"
            elif len(task.turns) > limits.max_turns or len(steps) > 2 * limits.max_calls:
                refusal = "task_too_long"
            elif len(task.turns) < limits.min_turns:
                refusal = "too_few_turns"
            else:
                refusal = "" if len(kept) < limits.proposals else "more_than_asked"
            if refusal:
                self._client.costs[f"llm_refused/{refusal}"] += 1
            else:
                kept.append(task)
        return kept

    def _proposals(
        self,
        exploration: Exploration,
        tasks: Sequence[TaskAnswer],
        solutions: Sequence[Goal | None],
        limits: Limits,
    ) -> list[Proposal]:
        proposals: dict[str, Proposal] = {}
        for task, solution in zip(tasks, solutions, strict=True):
            if solution is None:
                refusal = "not_reproducible"
            elif not set(_steps(task)) <= {t.index for t in solution.steps}:
                refusal = "needless_step"  # the query asks for something that the goal does not need
            elif not limits.min_calls <= len(solution.steps) <= limits.max_calls:
                refusal = "too_short_or_long"
            else:
                proposal = _proposal(exploration, task, solution)
                key = " ".join(map(signature, proposal.calls)) if proposal else ""
                refusal = "idle_turn" if proposal is None else "twice" if key in proposals else ""
                if proposal is not None and not refusal:
                    proposals[key] = proposal
            if refusal:
                self._client.costs[f"llm_refused/{refusal}"] += 1
        return list(proposals.values())


def _proposal(exploration: Exploration, task: TaskAnswer, solution: Goal) -> Proposal | None:
    """Splits the goal's steps over the task's turns. Returns None where a turn is left without a step.

    Shortening may keep a step that no turn names. It goes to the first turn that ends after it, else to the
    last turn.
    """
    ends = [turn.steps[-1] for turn in task.turns]
    owner = [next((n for n, end in enumerate(ends) if t.index <= end), len(ends) - 1) for t in solution.steps]
    turns = [
        Turn(turn.query, tuple(t.call for t, own in zip(solution.steps, owner) if own == n))
        for n, turn in enumerate(task.turns)
    ]
    if not all(turn.calls for turn in turns):
        return None
    return Proposal(
        exploration.context,
        f"{task.description} (difficulty {task.difficulty} of 5)",
        tuple(turns),
        tuple(t.index for t in solution.steps),
        tuple(t.observation for t in solution.steps),
        solution.asked,
    )


def _steps(task: TaskAnswer) -> list[int]:
    return [i for turn in task.turns for i in turn.steps]


def _sound(exploration: Exploration) -> list[Triplet]:
    return [t for t in exploration.triplets if not t.observation.error]


def _rounds(triplets: Sequence[Triplet]) -> list[list[Triplet]]:
    return [list(own) for _, own in itertools.groupby(triplets, key=lambda step: step.round)]


def _used(exploration: Exploration) -> list[dict]:
    called = {t.call.name for t in exploration.triplets}
    return [tool for tool in exploration.tools if tool["function"]["name"] in called]
