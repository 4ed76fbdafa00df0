"""The limits of a conversation, and a check that a task's reference calls fit into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from coevolve_jax.rollout.chat import Chat
from coevolve_jax.types import Observation, Task


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a conversation.

    max_length: tokens of a whole trajectory. max_new_tokens: tokens of one assistant message.
    max_steps: assistant messages with tool calls per user turn (BFCL: 20; one more fails the task).
    max_observation: characters of a tool result that the policy reads.
    max_messages: assistant messages of the whole conversation; 0 is no limit.
    malformed: the effect of an unreadable tool call. "answer": the policy reads an error. "end_turn": the
        call is recorded and ignored, and a message without any other call ends its turn (as in BFCL's own
        harness).
    """

    max_length: int
    max_new_tokens: int
    max_steps: int = 20
    max_observation: int = 400
    max_messages: int = 0
    malformed: str = "answer"

    def shown(self, answer: str) -> str:
        """Returns the part of a tool's answer that the policy reads."""
        return answer if len(answer) <= self.max_observation else answer[: self.max_observation] + "..."

    def leaves_room(self, length: int) -> bool:
        """Says whether an assistant message of any length may follow `length` tokens."""
        return length + self.max_new_tokens <= self.max_length


def reference_fits(
    limits: Limits,
    chat: Chat,
    tools: Callable[[Task], list[dict]],
    task: Task,
    answers: Sequence[Sequence[Observation]],
) -> bool:
    """Says whether the reference calls, one per message, fit the limits.

    answers[turn][i]: the answer to the i-th call of a turn. True for tasks without reference calls: they have
    no path to measure.
    """
    if 0 < limits.max_messages < len(task.calls) + len(task.turns):
        return False
    length = len(chat.prompt(tools(task), task.turns[0].query, task.system, task.examples))
    for i, turn in enumerate(task.turns):
        length += len(chat.user(turn.query)) if i else 0
        if len(turn.calls) > limits.max_steps:
            return False
        for call, answer in zip(turn.calls, answers[i], strict=True):
            message = len(chat.message([call]))
            if message > limits.max_new_tokens or not limits.leaves_room(length):
                return False
            length += message + len(chat.observations([limits.shown(answer.text)]))
        if not limits.leaves_room(length):
            return False
        length += len(chat.message([]))
    return True
