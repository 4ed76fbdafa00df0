"""Success by tool: of the tasks that hold it, and of its calls where all earlier ones were made."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from coevolve_jax.envs.base import action_pattern, canonical
from coevolve_jax.types import Call, Task, Trajectory


def reached_calls(task: Task, trajectory: Trajectory) -> Iterator[tuple[Call, bool]]:
    """The reference calls up to the first that was missed, as (call, whether it was made).

    A successful trajectory made them all, in its own way. With a full context no call counts as missed.
    """
    for number, turn in enumerate(task.turns):
        steps = [s for s in trajectory.steps if s.turn == number]
        for i, call in enumerate(turn.calls):
            made = steps[i].call if i < len(steps) else None
            right = made is not None and canonical(made.to_json()) == canonical(call.to_json())
            if not right and i >= len(steps) and trajectory.stop == "context_limit":
                return
            yield call, right or trajectory.outcome.success
            if not right and not trajectory.outcome.success:
                return


def by_tool(
    tasks: Sequence[Task],
    rolled: Mapping[str, Sequence[Trajectory]],
    tool_of: Callable[[Call], str] = action_pattern,
) -> dict[str, dict[str, float]]:
    """For each tool, the success of its tasks and of its calls where all earlier calls were made.

    rolled: trajectories by task id. tool_of: what counts as the tool of a call.
    """
    holding: dict[str, list[Task]] = {}
    reached, made = Counter(), Counter()
    for task in tasks:
        for tool in set(map(tool_of, task.calls)):
            holding.setdefault(tool, []).append(task)
        for call, right in (pair for t in rolled[task.id] for pair in reached_calls(task, t)):
            reached[tool_of(call)] += 1
            made[tool_of(call)] += right
    return {
        tool: {
            "tasks": len(own),
            "success": float(np.mean([t.outcome.success for task in own for t in rolled[task.id]])),
            "calls_reached": reached[tool],
            "call_success": made[tool] / max(reached[tool], 1),
        }
        for tool, own in holding.items()
    }


def table(
    rows: Mapping[str, Mapping[str, float]], weak: Mapping[str, Mapping], share: Mapping[str, float]
) -> str:
    """Lines of the table; tools that exploration meets most often come first."""
    lines = [
        f"{'tool':28} {'weak by':22} {'met in':>6} {'tasks':>5} {'success':>7} {'reached':>7} {'made':>5}"
    ]
    for tool in sorted(rows, key=lambda name: (-share[name], name)):
        row = rows[tool]
        planted = f"{weak[tool]['error']} {weak[tool]['rate']:.0%}" if tool in weak else ""
        lines.append(
            f"{tool:28} {planted:22} {share[tool]:6.1%} {row['tasks']:5} {row['success']:7.0%} "
            f"{row['calls_reached']:7} {row['call_success']:5.0%}"
        )
    return "\n".join(lines)
