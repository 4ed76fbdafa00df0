"""Questions that methods put to the explorer's language model (Lab.ask), and how they read its answers.

The prompts are prompts/*.md. An answer is one line, which goes into other prompts as data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coevolve_jax.llm.prompting import Prompts, Question, call_line, line, seed_of
from coevolve_jax.strategies.base import Lab
from coevolve_jax.types import Call, Context, Task

LONGEST = 120  # characters of a demand

_prompts = Prompts(Path(__file__).parent / "prompts")
_quoted = lambda text: json.dumps(line(text), ensure_ascii=False)


def skills(lab: Lab, drawn: Mapping[str, tuple[Sequence[str], Context]]) -> dict[str, str]:
    """Words for skills that Socratic-SWE draws: when the missed call is due, and what it needs.

    drawn: skill -> (its parts: missed action, action instead, how it ended; the context of a draft).
    """
    values = {
        key: {
            **dict(zip(("missed", "instead", "how"), parts, strict=True)),
            **_task(c.task),
            "calls": [call_line(item) for item in c.plan if isinstance(item, Call)],
        }
        for key, (parts, c) in drawn.items()
    }
    return _asked(lab, "distil", "socratic", values, "explorer")


def guidelines(lab: Lab, weak: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Agent-World's guidelines for new tasks.

    weak: action -> attempts and misses; mistakes, as texts; others, the actions of its toolset.
    """
    values = {
        action: {**facts, "action": action, "mistakes": [_quoted(m) for m in facts["mistakes"]]}
        for action, facts in weak.items()
    }
    return _asked(lab, "guide", "agent_world", values, "explorer")


def principles(lab: Lab, shown: Mapping[str, Mapping[str, Any]], characters: int) -> dict[str, str]:
    """EvolveR's principles, of at most `characters` characters each; longer ones count as no answer.

    shown: name -> do: whether it is a guiding one; request: what a user said; good and bad: the calls at
      which a success and a failure part, as JSON values of `Call`, or None.
    """
    told = lambda call: call_line(Call.from_json(call)) if call else ""
    values = {
        name: {
            "do": facts["do"],
            "request": line(facts["request"]),
            "good": told(facts["good"]),
            "bad": told(facts["bad"]),
            "characters": characters,
        }
        for name, facts in shown.items()
    }
    return _asked(lab, "distil", "evolver_distil", values, most=characters)


def successes(lab: Lab, shown: Mapping[str, Mapping[str, Any]], characters: int) -> dict[str, str]:
    """Evolving-RL's skills in words, of at most `characters` characters; longer ones count as no answer.

    shown: task -> request: what a user said; calls: those that did it, as JSON values of `Call`.
    """
    values = {
        id: {
            "request": line(facts["request"]),
            "calls": [call_line(Call.from_json(call)) for call in facts["calls"]],
            "characters": characters,
        }
        for id, facts in shown.items()
    }
    return _asked(lab, "distil", "evolving_rl", values, most=characters)


def same(lab: Lab, pairs: Mapping[str, tuple[str, str]]) -> set[str]:
    """Names of the pairs of principles that are one. pairs: name -> their texts."""
    values = {name: {"one": _quoted(a), "other": _quoted(b)} for name, (a, b) in pairs.items()}
    said = _asked(lab, "merge", "evolver_merge", values)
    return {name for name, text in said.items() if text.lower().strip(".! ") == "yes"}


def grades(lab: Lab, tasks: Sequence[Task]) -> dict[str, int]:
    """Middo's grades of tasks by their words, from 1 to 10, by task id; 0 for an answer that is no grade."""
    values = {t.id: {**_task(t), "calls": [call_line(call) for call in t.calls]} for t in tasks}
    said = {id: text.strip(". ") for id, text in _asked(lab, "grade", "middo", values, "abstractor").items()}
    return {id: int(text) if text in map(str, range(1, 11)) else 0 for id, text in said.items()}


def demands(lab: Lab, wanted: Mapping[str, tuple[Task, Sequence]]) -> dict[str, str]:
    """SEIF's demands in a user's words, by name; sentences beyond LONGEST characters count as no answer.

    wanted: name -> (the task, its demand of strategies/seif.py).
    """
    values = {
        name: {**_task(task), "demand": demand[0], "what": demand[1], "characters": LONGEST}
        for name, (task, demand) in wanted.items()
    }
    return _asked(lab, "demand", "seif", values, most=LONGEST)


def _task(task: Task) -> dict[str, Any]:
    return {"system": line(task.system), "requests": [line(turn.query) for turn in task.turns]}


def _asked(
    lab: Lab,
    role: str,
    prompt: str,
    values: Mapping[str, Mapping[str, Any]],
    reader: str = "",
    most: float = math.inf,
) -> dict[str, str]:
    """Asks one question for each name, and returns the usable answers by name.

    reader: as in `Lab.ask`. most: characters of a usable answer.
    """
    questions: list[Question] = [
        _prompts.question(prompt, seed_of(prompt, name), {"subject": name}, **own)
        for name, own in values.items()
    ]
    answers = lab.ask(role, questions, reader=reader) if questions else []
    return {name: said for name, said in zip(values, answers, strict=True) if said and len(said) <= most}
