"""Origins of tasks and of refused proposals: an exploration, and the questions to a model that it took."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from coevolve_jax.analysis.loading import Run
from coevolve_jax.records.llm_calls import Packer, all_lines, whole


def origins(run: Run) -> list[dict]:
    """Returns one origin for each time that a context was explored.

    An origin is {"context": its id, "exploration": row of explorations.jsonl, "llm_calls": rows of
    llm_calls.jsonl}. exploration: None where the file has no row, as for held-out tasks.
    """
    explored, asked = defaultdict(list), by_exploration(run.llm_calls)
    for row in run.explorations:
        explored[row["context"]["id"]].append(row)
    return [
        {"context": context, "exploration": row, "llm_calls": llm_calls or []}
        for context in {**explored, **asked}
        for row, llm_calls in itertools.zip_longest(explored[context], asked.get(context, ()))
    ]


def by_exploration(llm_calls: Iterable[Mapping]) -> dict[str, list[list[Mapping]]]:
    """Splits questions by the id of their context, then by exploration of it. Leaves a strategy's own out.

    An exploration begins with the first step of its first round. Earlier questions, such as a reflection,
    belong to the first exploration.
    """
    found: dict[str, list[list[Mapping]]] = {}
    for row in llm_calls:
        about = row["about"]
        if "context" not in about:
            continue
        times = found.setdefault(about["context"], [[]])
        begins = row["role"] == "explore" and about["round"] == about["step"] == 0
        if begins and any(other["role"] == "explore" for other in times[-1]):
            times.append([])
        times[-1].append(row)
    return found


def packed(run: Run, found: Sequence[Mapping]) -> Iterator[dict]:
    """Yields the origins as rows of the page. Each is packed alone, so it has all lines of its prompts."""
    lines = all_lines(run.llm_calls)
    for origin in found:
        llm_calls = list(Packer().pack(whole(row, lines) for row in origin["llm_calls"]))
        yield {**origin, "llm_calls": llm_calls}


def by_task(tasks: Iterable[Mapping], found: Sequence[Mapping]) -> dict[str, int]:
    """Maps the id of each task to the index of its origin. Tasks without one are left out."""
    made, contexts = {}, {}
    for place, origin in enumerate(found):
        contexts.setdefault(origin["context"], place)
        for proposal in (origin["exploration"] or {}).get("proposals", ()):
            made[proposal["task"]] = place
    places = {task["id"]: made.get(task["id"], contexts.get(task["lineage"]["context"])) for task in tasks}
    return {task: place for task, place in places.items() if place is not None}


def refused(found: Sequence[Mapping], used: Mapping[str, int]) -> list[dict]:
    """Rows for lists: refused proposals, and explorations that gave no proposal. used: from `by_task`."""
    fruitful, rows, named = set(used.values()), [], Counter()
    for place, origin in enumerate(found):
        explored = origin["exploration"] or {"step": 0, "proposals": [], "context": {"signal": None}}
        lost = [(n, p) for n, p in enumerate(explored["proposals"]) if p["task"] is None]
        if not explored["proposals"] and place not in fruitful:
            lost = [(None, {"reason": "no_task_came_of_it", "description": ""})]
        for number, proposal in lost:
            named[origin["context"]] += 1
            rows.append(
                {
                    "id": f"{origin['context']} · {named[origin['context']]}",
                    "origin": "refused",
                    "signal": explored["context"]["signal"],
                    "step": explored["step"],
                    "reason": proposal["reason"],
                    "description": proposal["description"],
                    "row": place,
                    "proposal": number,
                }
            )
    return rows
