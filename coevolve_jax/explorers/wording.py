"""The policy as the voice of an explorer that works by rules: it says each rule-made query in other words.

The rules still choose the calls. A paraphrase takes the place of its query if it passes the checks of
paraphrase.py, and the policy then solves the task from the new words: in one of a few rollouts its calls
reach the reference outcome. Otherwise the rules' words stay.

The same policy speaks and listens. So the rollouts show that the words say enough for it, not that they are
good English.

A count of lost queries has the name of a check in paraphrase.py, or of one of these:

    no_answer   the policy gives none: no text, cut, or the engine fails
    not_solved  the policy does not solve the task from the new words; the task loses all of them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax.explorers.base import Abstractor, Exploration, Limits, Proposal, Roles, Shorten
from coevolve_jax.explorers.llm.lines import question
from coevolve_jax.explorers.paraphrase import fault
from coevolve_jax.explorers.policy.client import Client
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.engine import Engine
from coevolve_jax.types import Task, Trajectory

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


def _changed(p: Proposal) -> int:
    """The number of queries that the policy worded."""
    return sum(turn.query != rule for turn, rule in zip(p.turns, p.rule_queries))


def _task(p: Proposal) -> Task:
    scenario = p.context.task
    id = f"{p.context.id}/wording"
    return Task(id, scenario.environment, scenario.scenario, p.turns, p.description, system=scenario.system)


def _about(p: Proposal, turn: int) -> dict[str, Any]:
    """LLMCall.about of a query."""
    return {"context": p.context.id, "triplets": p.triplets, "turn": turn}
