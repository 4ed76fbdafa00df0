"""The policy as the voice of an explorer that works by rules: it says each rule-made query in other words.

The rules still choose the calls. A paraphrase takes the place of its query if it passes all checks, in this
order (CHECKS):

    no_answer   the policy gives none: no text, cut, or the engine fails
    same        it is the query
    too_long    it has more than TIMES the query's characters
    control     it holds a control token, or a control character that the query lacks
    value       it lacks an argument of the reference calls that stands in the query
    tool_name   it names a tool that the query does not name
    not_solved  the policy does not solve the task from the new words

The last check concerns a whole task: in one of a few rollouts its calls must reach the reference outcome.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax.explorers.base import Abstractor, Exploration, Limits, Proposal, Roles, Shorten
from coevolve_jax.explorers.llm.prompting import question
from coevolve_jax.explorers.policy.client import Client
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.engine import Engine
from coevolve_jax.types import Task, Trajectory, Turn

CHECKS = ("no_answer", "same", "too_long", "control", "value", "tool_name", "not_solved")
TIMES = 2.0

Roll = Callable[[Sequence[Task], Sequence[int]], Sequence[Trajectory]]  # one rollout per task, by its seed


def worded(roles: Roles, config: ConfigDict, chat: Chat, engine: Engine, roll: Roll) -> Roles:
    """Returns the roles with queries in the policy's words. D_0 and the held-out tasks keep the rules' words.

    config: the run's config; explorers.scripted.DEFAULTS has the settings. roll: by the policy, at the
    temperature of training.
    """
    client = Client(config.explorer, chat, engine)
    words = Wording(roles.abstractor, client, chat, roll, config.explorer.wording_attempts)
    return roles._replace(abstractor=words, costs=client.costs, llm_calls=client.llm_calls, initial=roles)


class Wording:
    """An Abstractor over another one. It changes words alone, and draws after the other one's draws.

    It counts in `client.costs`: wording_asked and wording_kept (queries), wording_lost/CHECK, and
    rollouts/wording with their sampled_tokens/wording. attempts: rollouts per task, at most; 0: no rollout.
    """

    def __init__(self, abstractor: Abstractor, client: Client, chat: Chat, roll: Roll, attempts: int):
        self._abstractor, self._client, self._chat = abstractor, client, chat
        self._roll, self._attempts = roll, attempts

    def abstract(
        self, explorations: Sequence[Exploration], limits: Limits, shorten: Shorten
    ) -> list[list[Proposal]]:
        groups = self._abstractor.abstract(explorations, limits, shorten)
        made = [(e, p) for e, own in zip(explorations, groups, strict=True) for p in own]
        answers = iter(self._ask(made))
        final = iter(self._agreed(made, [self._reworded(e, p, answers) for e, p in made]))
        return [[next(final) for _ in own] for own in groups]

    def _ask(self, made: Sequence[tuple[Exploration, Proposal]]) -> list[str | None]:
        """Returns a paraphrase of each turn of each proposal, in order; None for none."""
        questions = [
            question("word", int(e.rng.integers(2**31)), _about(p, n), query=turn.query)
            for e, p in made
            for n, turn in enumerate(p.turns)
        ]
        self._client.costs["wording_asked"] += len(questions)
        return self._client.words("word", questions)

    def _reworded(self, e: Exploration, p: Proposal, answers: Iterator[str | None]) -> Proposal:
        """Takes the paraphrases that pass the checks of a single query."""
        tools, turns = [t["function"]["name"] for t in e.tools], []
        for turn in p.turns:
            answer = next(answers)
            lost = "no_answer" if answer is None else fault(turn, answer, tools, self._chat.controls)
            self._lose(lost, 1)
            turns.append(turn if answer is None or lost else dataclasses.replace(turn, query=answer))
        rules = tuple(turn.query for turn in p.turns) if tuple(turns) != p.turns else ()
        return dataclasses.replace(p, turns=tuple(turns), rule_queries=rules)

    def _agreed(
        self, made: Sequence[tuple[Exploration, Proposal]], worded: Sequence[Proposal]
    ) -> list[Proposal]:
        """Gives tasks that no attempt solves their rule-made queries back."""
        final, left = list(worded), [n for n, p in enumerate(worded) if p.rule_queries]
        seeds = {n: made[n][0].rng.integers(2**32, size=self._attempts).tolist() for n in left}
        for attempt in range(self._attempts if left else 0):
            done = self._roll([_task(worded[n]) for n in left], [seeds[n][attempt] for n in left])
            self._client.costs["rollouts/wording"] += len(done)
            self._client.costs["sampled_tokens/wording"] += sum(int(t.mask.sum()) for t in done)
            left = [n for n, t in zip(left, done, strict=True) if not t.outcome.success]
        for n in left if self._attempts else ():
            final[n] = made[n][1]
            self._lose("not_solved", _changed(worded[n]))
        self._client.costs["wording_kept"] += sum(map(_changed, final))
        return final

    def _lose(self, check: str, count: int) -> None:
        if check:
            self._client.costs[f"wording_lost/{check}"] += count


def fault(turn: Turn, answer: str, tools: Sequence[str], controls: Callable[[str], bool]) -> str:
    """Returns the first of CHECKS that a paraphrase fails by its text alone; "" for none.

    turn: with the rule-made query and its calls. tools: names of all tools on offer. controls: whether a text
    holds a control token.
    """
    plain = lambda text: " ".join(text.split()).rstrip(".").lower()
    values = {value for call in turn.calls for value in _leaves(call.arguments)}
    new_tools = (t for t in tools if _stands(t, answer) and not _stands(t.lower(), turn.query.lower()))
    checks = (
        ("same", plain(answer) == plain(turn.query)),
        ("too_long", len(answer) > TIMES * len(turn.query)),
        ("control", controls(answer) or not all(c.isprintable() or c in turn.query for c in answer)),
        ("value", not all(_survives(value, turn.query, answer) for value in values)),
        ("tool_name", any(new_tools)),
    )
    return next((name for name, failed in checks if failed), "")


def _leaves(value: Any) -> Iterator[str]:
    """The texts and numbers in a value, as a query writes them."""
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(part)
    elif isinstance(value, str):
        yield value
    elif value is not None and not isinstance(value, bool):
        yield json.dumps(value)


def _survives(value: str, query: str, answer: str) -> bool:
    """Whether a value that stands in the query stands in the answer: in quotes, if the query quotes it."""
    quoted = re.compile(rf"""['"‘“`]{re.escape(value)}['"’”`]""")
    if quoted.search(query):
        return bool(quoted.search(answer))
    return not _stands(value, query) or _stands(value, answer)


def _stands(value: str, text: str) -> bool:
    """Whether a value stands in a text, and not as a part of a longer word or number."""
    return bool(value) and bool(re.search(rf"(?<![\w.-]){re.escape(value)}(?!\w|[.-]\w)", text))


def _changed(p: Proposal) -> int:
    """The number of queries that the policy worded."""
    return sum(turn.query != rule for turn, rule in zip(p.turns, p.rule_queries))


def _task(p: Proposal) -> Task:
    scenario = p.context.task
    return Task(f"{p.context.id}/wording", scenario.environment, scenario.scenario, p.turns, p.description)


def _about(p: Proposal, turn: int) -> dict[str, Any]:
    """LLMCall.about of a query."""
    return {"context": p.context.id, "triplets": p.triplets, "turn": turn}
