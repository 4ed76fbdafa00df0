"""The four roles of an explorer. Each is one method over a batch, so one over HTTP can ask in parallel.

A kind of explorer is a module: `coevolve_jax.explorers.<name>`, or any other. config.explorer.name is
"<name>", or the dotted path of the module. The run calls its `make(config, family) -> Roles`:

  ASKS_POLICY = True: the module asks the run's policy. It has `make(config, family, chat, engine)`
    (explorers/policy).
  RECORDS_MODEL = True: the run records which model answers. The module has `make(config, family, recorded)`
    and gets the record back on resume (Roles.served).

A batch may be empty. A method returns one entry per entry of the batch, in the same order. Arguments are
shared: a role must not change them. All randomness comes from the generators in episodes and explorations.

Roles never touch the environment. All explorers share synthesis/, which executes calls, shortens goals and
scores tasks. coevolve_jax.testing.explorer checks an implementation.
docs/guides/add_explorer.md shows one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.llm.prompting import Question
from coevolve_jax.types import Call, Context, Evidence, Observation, Task, Triplet, Turn


class Family(Protocol):
    """The part of an environment family (envs/family.py) that an explorer may use.

    tools: the function schemas on offer in a task. action_pattern: the action that a call counts as.
    wording: a user's words that ask for a call; "" where the family has none.
    """

    @property
    def tools(self) -> Callable[[Task], list[dict]]: ...

    @property
    def action_pattern(self) -> Callable[[Call], str]: ...

    @property
    def wording(self) -> Callable[[Call], str]: ...


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of abstraction: proposals per context, calls per task, user turns per task."""

    proposals: int
    min_calls: int = 2
    max_calls: int = 6
    max_turns: int = 3
    min_turns: int = 1

    def of(self, context: Context) -> Limits:
        """Returns the limits for one context: what it asks for, as far as these limits allow."""
        clip = lambda n, low, high: min(max(n, low), high)
        calls = context.calls or (self.min_calls, self.max_calls)
        least, most = (clip(n, self.min_calls, self.max_calls) for n in calls)
        turns = (self.min_turns, self.max_turns)
        if context.turns is not None:
            turns = (clip(context.turns, *turns),) * 2
        return Limits(self.proposals, least, most, max_turns=turns[1], min_turns=turns[0])


@dataclasses.dataclass(frozen=True)
class Episode:
    """One round of exploration at one of its steps.

    tools: function schemas that the environment offers; no other call is executed.
    history: the steps of this round so far.
    round: counts from 0.
    rng: the context's own generator, the same object at all its steps and rounds.
    options: calls that the environment says it would take now; empty where it does not say.
    """

    context: Context
    tools: Sequence[dict]
    history: Sequence[Triplet]
    round: int
    rng: np.random.Generator
    options: Sequence[Call] = ()


@dataclasses.dataclass(frozen=True)
class Exploration:
    """All steps that were taken under one context, over all rounds.

    triplets[i].index is i. Every round starts in the scenario's initial state.
    rng: for the draws of abstraction.
    """

    context: Context
    tools: Sequence[dict]
    triplets: tuple[Triplet, ...]
    rng: np.random.Generator


@dataclasses.dataclass(frozen=True)
class Goal:
    """The effects and answers that some steps of one round reach.

    wanted: indices of these steps. Shortening fills the other two fields.
    steps: the steps that the goal needs, in order.
    asked: positions in `steps` whose answers are part of the goal.
    """

    exploration: Exploration
    wanted: tuple[int, ...]
    steps: tuple[Triplet, ...] = ()
    asked: tuple[int, ...] = ()


# Re-executes goals in the real environment and finds their steps (synthesis/shorten.py). None: re-execution
# does not reach the goal again.
Shorten = Callable[[Sequence[Goal]], list[Goal | None]]


# The answers of a fresh environment, one tuple per user turn, one observation per call.
Answers = tuple[tuple[Observation, ...], ...]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A task before validation.

    triplets: the index of each call's exploration step.
    observations: exploration's record of the answer to each call.
    asked: positions of the calls whose answers the user asks for.
    rule_queries: the rules' query of each turn, if a model worded any of them (explorers/wording.py).
    """

    context: Context
    description: str
    turns: tuple[Turn, ...]
    triplets: tuple[int, ...]
    observations: tuple[Observation, ...]
    asked: tuple[int, ...]
    rule_queries: tuple[str, ...] = ()

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(c for turn in self.turns for c in turn.calls)


class Reflector(Protocol):
    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        """Turns each signal-annotated trajectory into a context for exploration.

        The id of a context is unique in a run. Its task and signal are those of the evidence.
        """
        ...


class Explorer(Protocol):
    def act(self, episodes: Sequence[Episode]) -> list[Call | None]:
        """Chooses the next call of each episode. None ends its round, and so does a tool not on offer.

        With config.explorer.solve the role also solves tasks, unless it has SOLVES = False. The context's
        signal is then "solve". Its task holds the user's messages so far and no calls. `round` is the index
        of the last message. None says that the last message is done.
        """
        ...


class Abstractor(Protocol):
    def abstract(
        self, explorations: Sequence[Exploration], limits: Limits, shorten: Shorten
    ) -> list[list[Proposal]]:
        """Makes goal-directed tasks from each exploration, within `limits.of` its context and all different.

        The steps that follow the context's plan, if there are such, are the first goal. The role words the
        tasks and splits them into user turns. The queries must say all that the policy has to
        know for the calls.

        shorten: finds the steps that a goal needs. Call it once, with the goals of all explorations, since it
        re-executes them in one batch.
        """
        ...


class Validator(Protocol):
    def judge(
        self, proposals: Sequence[Proposal], answers: Sequence[Answers]
    ) -> list[list[str | None] | None]:
        """Judges each user turn of each proposal: None for a good turn, else a reason in a word or a few.

        None in place of a proposal's list means no opinion. The role sees proposals that passed the
        environment's check and gave the recorded answers, at least in the first turns. It also sees some
        that failed, which measures its agreement with the environment.
        """
        ...


class Roles(NamedTuple):
    """An explorer: the players of the four roles. Kinds can be mixed: `a._replace(validator=b.validator)`.

    name: the explorer's name in the lineage of its tasks.
    costs: spending by key of the ledger; a resumed run puts its past costs back. The roles add to it. None:
      nothing is spent.
    llm_calls: all questions to a model, in order. The roles append, and the logger takes them out
      (loop/lab.py). None: no model is asked.
    initial: makes D_0 and the held-out tasks. None: these roles do.
    unanswered: takes the costs of some questions. Returns one sentence that says why nothing answers, or ""
      where something does. None: there is no server that could be away.
    served: returns the model that answers, as JSON values that a run records. Raises ValueError where the
      server is away. None: there is no model to record.
    ask: puts a strategy's questions to the model, under the name of a role that pays. Returns one line for
      each, None where no answer is usable. None: no model is asked.
    """

    name: str
    reflector: Reflector
    explorer: Explorer
    abstractor: Abstractor
    validator: Validator
    costs: Counter | None = None
    llm_calls: list[LLMCall] | None = None
    initial: Roles | None = None
    unanswered: Callable[[Mapping[str, float]], str] | None = None
    served: Callable[[], Mapping[str, Any]] | None = None
    ask: Callable[[str, Sequence[Question]], list[str | None]] | None = None
