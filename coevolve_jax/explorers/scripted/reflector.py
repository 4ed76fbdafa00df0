"""The scripted reflection: puts the statistics of a group into words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coevolve_jax.explorers.evidence import context_id, divergence, focus, mistakes, quoted, split
from coevolve_jax.types import Call, Context, Evidence, Step


class Reflector:
    def __init__(self, action_pattern: Callable[[Call], str]):
        self._action_pattern = action_pattern

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        return [reflect(e, self._action_pattern) for e in evidence]


def reflect(evidence: Evidence, action_pattern: Callable[[Call], str]) -> Context:
    signal, task, trajectory = evidence.signal, evidence.task, evidence.trajectory
    successes, failures = split(evidence)
    at, good, bad = divergence(successes, failures)
    failed = [s for s in trajectory.steps if s.error]
    cause = trajectory.outcome.reason
    if failed:
        cause = f"{quoted(failed[0].text, 80)} -> {quoted(failed[0].observation, 120)}"
    pattern = ""
    if signal.kind == "boundary":
        pattern = (
            f"{len(successes)} of {len(successes) + len(failures)} succeed; "
            f"they part at call {at + 1}: {_name(good)} against {_name(bad)}"
        )
    elif signal.kind == "forgetting":
        pattern = "solved before, not any more"
    elif signal.kind == "rare":
        pattern = f"{signal.pattern} is hardly ever called"
    return Context(
        id=context_id(evidence),
        signal=signal.kind,
        task=task,
        summary=f"Called {', '.join(trajectory.actions) or 'nothing'}; reward {trajectory.outcome.reward:g}.",
        failure_cause=cause,
        instability_pattern=pattern,
        focus_pattern=focus(evidence, action_pattern),
        avoid=mistakes(trajectory),
    )


def _name(step: Step | None) -> str:
    return "end" if step is None else step.action or "no tool"
