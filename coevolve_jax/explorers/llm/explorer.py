"""Exploration by a language model: one action in the real environment at a time, all contexts at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from coevolve_jax.explorers.base import Episode
from coevolve_jax.explorers.llm.lines import call_lines, history, lead, question, tool_lines
from coevolve_jax.llm.answers import Client
from coevolve_jax.types import Call

MAX_ARGUMENTS = 4000  # characters of JSON


class Action(BaseModel):
    """The model's next action. tool: "" ends the round."""

    thought: str = Field(default="", max_length=2000)
    tool: str = Field(max_length=100)
    arguments: dict[str, Any] = Field(default_factory=dict)


class Explorer:
    def __init__(self, client: Client):
        self._client = client

    def act(self, episodes: Sequence[Episode]) -> list[Call | None]:
        """Explores or, where the signal is "solve", does what the user asks."""
        role = "solve" if any(e.context.signal == "solve" for e in episodes) else "explore"
        questions = [
            question(
                role,
                int(e.rng.integers(2**31)),
                _about(e),
                tools=tool_lines(e.tools),
                round=e.round,
                steps=history(e.history),
                options=call_lines(e.options),
                **lead(e.context),
            )
            for e in episodes
        ]
        answers = self._client.ask(role, questions, Action)
        return [self._call(e, answer) for e, answer in zip(episodes, answers, strict=True)]

    def _call(self, episode: Episode, answer: Action | None) -> Call | None:
        if answer is None or not answer.tool:
            return None
        refusal = ""
        if answer.tool not in {t["function"]["name"] for t in episode.tools}:
            refusal = "no_such_tool"
        elif len(json.dumps(answer.arguments)) > MAX_ARGUMENTS:
            refusal = "long_arguments"
        if refusal:
            self._client.costs[f"llm_refused/{refusal}"] += 1
            return None
        return Call(answer.tool, answer.arguments)


def _about(episode: Episode) -> dict[str, Any]:
    """LLMCall.about of an episode. A task being solved belongs to the context that it was made under."""
    context, step = episode.context, len(episode.history)
    if context.signal != "solve":
        return {"context": context.id, "round": episode.round, "step": step}
    born = context.task.lineage
    return {"context": born.context, "triplets": born.triplets, "turn": episode.round, "step": step}
