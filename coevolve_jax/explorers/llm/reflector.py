"""Reflection by a language model: it explains a trajectory that carries a signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from coevolve_jax.explorers.evidence import MAX_AVOIDED, attempt, context_id, focus, split
from coevolve_jax.explorers.llm.lines import question, requests
from coevolve_jax.llm.answers import Client
from coevolve_jax.llm.prompting import line, seed_of, step_line
from coevolve_jax.types import Call, Context, Evidence, Task, Trajectory

Line = Annotated[str, Field(max_length=300)]


class Reflection(BaseModel):
    summary: str = Field(max_length=800)
    failure_cause: str = Field(max_length=500)
    instability_pattern: str = Field(max_length=500)
    focus_pattern: list[Line] = Field(max_length=12)
    avoid: list[Line] = Field(max_length=12)


class Reflector:
    def __init__(
        self, client: Client, tools: Callable[[Task], list[dict]], action_pattern: Callable[[Call], str]
    ):
        self._client, self._tools, self._action_pattern = client, tools, action_pattern

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        names = [self._names(e) for e in evidence]
        questions = [
            question(
                "reflect",
                seed_of(context_id(e)),
                {"context": context_id(e)},
                signal=e.signal.kind,
                pattern=e.signal.pattern,
                tools=own,
                system=line(e.task.system),
                requests=requests(e.task),
                reference=[self._action_pattern(call) for call in e.task.calls],
                shown=_steps(e.trajectory),
                outcome=_outcome(e.trajectory),
                others=[{"outcome": _outcome(t), "steps": _steps(t)} for t in _contrast(e)],
            )
            for e, own in zip(evidence, names, strict=True)
        ]
        answers = self._client.ask("reflect", questions, Reflection)
        return [
            _context(e, own, focus(e, self._action_pattern), answer)
            for e, own, answer in zip(evidence, names, answers, strict=True)
        ]

    def _names(self, evidence: Evidence) -> list[str]:
        """Names that a focus may hold: tools on offer, actions of the reference and of the rollouts."""
        tools = [t["function"]["name"] for t in self._tools(evidence.task)]
        reference = [self._action_pattern(call) for call in evidence.task.calls]
        taken = [action for t in evidence.group.trajectories for action in t.actions]
        return list(dict.fromkeys([*tools, *filter(None, reference), *taken]))


def _context(
    evidence: Evidence, offered: Sequence[str], statistics: tuple[str, ...], answer: Reflection | None
) -> Context:
    """Makes the context from the model's answer.

    offered: names that a focus may hold. statistics: the focus by rules (explorers.evidence.focus). It stands
    in where the model gave no answer or named nothing on offer. Without an answer, failure_cause and avoid
    come from the trajectory.
    """
    named = tuple(dict.fromkeys(name for name in answer.focus_pattern if name in offered)) if answer else ()
    return Context(
        id=context_id(evidence),
        signal=evidence.signal.kind,
        task=evidence.task,
        summary=answer.summary if answer else "",
        failure_cause=answer.failure_cause if answer else evidence.trajectory.outcome.reason,
        instability_pattern=answer.instability_pattern if answer else "",
        focus_pattern=named or statistics,
        avoid=tuple(answer.avoid if answer else _failed(evidence.trajectory))[:MAX_AVOIDED],
    )


def _failed(trajectory: Trajectory) -> list[str]:
    """Calls that failed, without the environment's text: prompts show that in the JSON of steps only."""
    failed = (attempt(s) for s in trajectory.steps if s.call is not None and s.error)
    return list(dict.fromkeys(failed))


def _steps(trajectory: Trajectory) -> list[str]:
    return [
        step_line(i, s.call, s.observation, s.error)
        for i, s in enumerate(trajectory.steps)
        if s.call is not None
    ]


def _outcome(trajectory: Trajectory) -> str:
    found = trajectory.outcome
    return f"{'success' if found.success else 'failure'}, reward {found.reward:g}" + (
        f" ({line(found.reason)})" if found.reason else ""
    )


def _contrast(evidence: Evidence) -> list[Trajectory]:
    """Another success and another failure of the same task, where there are such."""
    return [
        next(t for t in side if t is not evidence.trajectory)
        for side in split(evidence)
        if any(t is not evidence.trajectory for t in side)
    ]
