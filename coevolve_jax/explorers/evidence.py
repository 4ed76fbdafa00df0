"""Facts that a group of rollouts gives about a signal, shared by all reflectors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from coevolve_jax.types import Call, Evidence, Step, Trajectory

MAX_AVOIDED = 8


def signature(call: Call) -> str:
    """One canonical line per call: equal calls give equal text, whatever the order of the arguments.

    5.0 is written as 5, since environments compare by ==.
    """
    arguments = json.loads(json.dumps(dict(call.arguments), ensure_ascii=False), parse_float=_number)
    return f"{call.name}({json.dumps(arguments, sort_keys=True, ensure_ascii=False)})"


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def context_id(evidence: Evidence) -> str:
    """Id of the context that reflects on this evidence, unique in a run."""
    signal = evidence.signal
    parts = [signal.kind, str(signal.step), evidence.task.id, str(signal.rollout_index)]
    return "/".join([*parts, signal.pattern] if signal.pattern else parts)


def mistakes(trajectory: Trajectory) -> tuple[str, ...]:
    """Mistakes that exploration should avoid: at most MAX_AVOIDED different lines, in order of appearance.

    A line is `attempt(step): error`, or `not a call: text` for a step without a call. The error and the text
    are quoted.
    """
    lines = []
    for step in trajectory.steps:
        if step.call is not None and step.error:
            lines.append(f"{attempt(step)}: {quoted(step.observation, 120)}")
        elif step.call is None:
            lines.append(f"not a call: {quoted(step.text, 80)}")
    return tuple(dict.fromkeys(lines))[:MAX_AVOIDED]


def attempt(step: Step) -> str:
    """One line for a step with a call: its `signature`, or `no tool` where it calls none of the task.

    The name of no tool is quoted, since the policy made it up.
    """
    assert step.call is not None
    return signature(step.call) if step.action else f"no tool: {quoted(step.call.name, 80)}"


def quoted(text: str, most: int) -> str:
    """The first `most` characters as a JSON string, so that nobody takes them for an instruction."""
    return json.dumps(text[:most], ensure_ascii=False)


def divergence(
    successes: Sequence[Trajectory], failures: Sequence[Trajectory]
) -> tuple[int, Step | None, Step | None]:
    """Finds the call at which a failed rollout leaves the successful one that it follows longest.

    Returns (position, step of the success, step of the failure), or (0, None, None) without a pair. A step is
    None where its rollout has already ended. The latest such position over all pairs separates the two sides
    best.
    """
    best = (-1, None, None)
    for success in successes:
        for failure in failures:
            good = [s for s in success.steps if s.call is not None]
            bad = [s for s in failure.steps if s.call is not None]
            at = next(
                (i for i, (a, b) in enumerate(zip(good, bad)) if _unlike(a.call, b.call)),
                min(len(good), len(bad)),
            )
            if at > best[0]:
                best = (at, good[at] if at < len(good) else None, bad[at] if at < len(bad) else None)
    return max(best[0], 0), best[1], best[2]


def _unlike(a: Call | None, b: Call | None) -> bool:
    assert a is not None and b is not None
    return signature(a) != signature(b)


def focus(evidence: Evidence, action_pattern: Callable[[Call], str]) -> tuple[str, ...]:
    """Action patterns to explore again, most important first. action_pattern: the environment family's.

    A call to no tool of the task has none.

    forgetting: the patterns of the task's reference calls, in order.
    rare: those of calls that show the rare pattern, then of the calls just before them.
    boundary: those of the calls at which successful and failed rollouts part, then of calls that failed.

    Without such a pattern, the reference calls give them.
    """
    signal, task, trajectory = evidence.signal, evidence.task, evidence.trajectory
    if signal.kind == "forgetting":
        names = [action_pattern(call) for call in task.calls]
    elif signal.kind == "rare":
        taken = [s.action for s in trajectory.steps if s.call is not None]
        rare = [i for i, action in enumerate(taken) if action == signal.pattern]
        names = [taken[i] for i in rare] + [taken[i - 1] for i in rare if i]
    else:
        _, good, bad = divergence(*split(evidence))
        names = [step.action for step in (good, bad) if step is not None]
        names += [step.action for step in trajectory.steps if step.error]
    names = [n for n in dict.fromkeys(names) if n] or [action_pattern(c) for c in task.calls]
    return tuple(dict.fromkeys(names))


def split(evidence: Evidence) -> tuple[list[Trajectory], list[Trajectory]]:
    """Splits the group into (successes, failures), by rollout_index. Invalid rollouts are in neither."""
    members = sorted(evidence.group.valid, key=lambda t: t.rollout_index)
    return [t for t in members if t.outcome.success], [t for t in members if not t.outcome.success]
