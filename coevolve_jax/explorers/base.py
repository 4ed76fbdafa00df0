"""The four roles of an explorer, each one method over a batch, so that one over HTTP can ask for many answers at once.

`coevolve_jax.explorers.<name>` (or any module) is a kind of explorer: its `make(config, family) -> Roles` is what
config.explorer.name = "<name>" (or the module's dotted path) calls. A module with ASKS_POLICY = True asks the policy of
the run: `make(config, family, chat, engine)` (explorers/policy). One with RECORDS_MODEL = True is told who answered the
run so far: `make(config, family, recorded)`, see Roles.served. A batch may be empty, and what a method
returns has one entry per entry of the batch, in its order. What a role gets is shared: it changes none of it.
All randomness comes from the generators of the episodes and explorations.

The environment is nowhere in here: executing calls, shortening and the environment's own score are the same for
all explorers (synthesis/). coevolve_jax.testing.explorer checks an implementation;
docs/guides/add_explorer.md shows one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from coevolve_jax.types import Call, Context, Evidence, Observation, Task, Triplet, Turn


class Family(Protocol):
    """What an explorer may ask the environment family (envs/family.py): the function schemas that it offers in a task,
    what it counts as the action of a call, and what a user says to ask for one ("": nothing of its own)."""

    @property
    def tools(self) -> Callable[[Task], list[dict]]: ...

    @property
    def action_pattern(self) -> Callable[[Call], str]: ...

    @property
    def wording(self) -> Callable[[Call], str]: ...


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is wanted of abstraction: calls and user turns of a task, and proposals per context at most."""

    proposals: int
    min_calls: int = 2
    max_calls: int = 6
    max_turns: int = 3


@dataclasses.dataclass(frozen=True)
class Episode:
    """One round of exploration at one of its steps.

    tools: function schemas that the environment offers; nothing else is executed. history: the steps of this
    round so far. round: from 0. rng: the context's own generator, the same object at all its steps and rounds.
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
    """All that was done under one context. triplets[i].index is i; every round starts in the scenario's initial
    state. rng: for what is made of it."""

    context: Context
    tools: Sequence[dict]
    triplets: tuple[Triplet, ...]
    rng: np.random.Generator


@dataclasses.dataclass(frozen=True)
class Goal:
    """What some steps of one round reach: their effects and their answers. wanted: indices of these steps.

    Shortening fills the other two. steps: those that the goal needs, in order. asked: positions in `steps` whose
    answers are part of the goal.
    """

    exploration: Exploration
    wanted: tuple[int, ...]
    steps: tuple[Triplet, ...] = ()
    asked: tuple[int, ...] = ()


# Re-executes goals in the real environment and finds their steps (synthesis/shorten.py). None: the goal cannot be
# reached again.
Shorten = Callable[[Sequence[Goal]], list[Goal | None]]


# What a fresh environment answers to the calls of each user turn.
Answers = tuple[tuple[Observation, ...], ...]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A task before validation. observations[i] is what exploration recorded for the i-th call.

    triplets: the index of each call's exploration step. asked: positions of the
    calls whose answers the user asks for.
    """

    context: Context
    description: str
    turns: tuple[Turn, ...]
    triplets: tuple[int, ...]
    observations: tuple[Observation, ...]
    asked: tuple[int, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(c for turn in self.turns for c in turn.calls)


class Reflector(Protocol):
    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        """What each signal-annotated trajectory tells. Ids of contexts are unique in a run; task and signal are
        the evidence's."""
        ...


class Explorer(Protocol):
    def act(self, episodes: Sequence[Episode]) -> list[Call | None]:
        """The next call of each episode; None ends its round, and so does a tool that it does not offer.

        With config.explorer.solve also asked for tasks to be solved: the context's signal is then "solve", its task
        has the user's messages so far and no calls, round is the last message's, and None says that it is done.
        """
        ...


class Abstractor(Protocol):
    def abstract(
        self, explorations: Sequence[Exploration], limits: Limits, shorten: Shorten
    ) -> list[list[Proposal]]:
        """Goal-directed tasks from each exploration, within the limits and different from each other.

        How they are worded and split into user turns is up to the role; what the policy must know to make
        the calls has to stand in the queries. shorten: finds which steps a goal needs; to be called with the
        goals of all explorations at once.
        """
        ...


class Validator(Protocol):
    def judge(
        self, proposals: Sequence[Proposal], answers: Sequence[Answers]
    ) -> list[list[str | None] | None]:
        """For each user turn of each proposal why it does not meet the goal, as a reason in one word or few; None
        where it does. None instead of a list is no opinion.

        Asked for what may be kept: the environment's check passed, and the answers were those that exploration
        recorded, in the first turns at least; and for some that failed, to see whether it agrees.
        """
        ...


@dataclasses.dataclass
class Dialogue:
    """A question that a role put to a model, and what came back.

    about: what it was asked for: "context", its id, and the place there: "round" and "step" (steps done in it so far)
    of an exploration; "triplets" of the proposal that is judged or solved, of which "turn" and "step" are at hand.
    answers: as the model wrote them; a second one where the first was of no use and the model was told so, in
    `complaint`. fault: the name of why there is no answer in the end; "" where there is. tokens: of all answers.
    """

    role: str
    about: Mapping[str, Any]
    system: str
    user: str
    answers: list[str] = dataclasses.field(default_factory=list)
    complaint: str = ""
    fault: str = ""
    tokens_in: int = 0
    tokens_out: int = 0


class Roles(NamedTuple):
    """An explorer: who plays the four roles. name: how the lineage of its tasks calls it.

    Kinds can be mixed: `roles._replace(validator=other.validator)`. costs: what it has spent since it was made or
    resumed, by key of the ledger; the roles add to it. None: nothing is spent. dialogues: what was asked of a model,
    in order; the roles add to it, and who logs it takes it out (lab.py). None: no model is asked. initial: who makes D_0
    and the held-out tasks; None: these as well. unanswered: given what some questions cost, says in one sentence why
    nobody answers any, "" where that is not so; None: nobody is asked who could be away. served: names the model that
    answers, as JSON values that a run records, and raises ValueError where it is away; None: there is none to record.
    """

    name: str
    reflector: Reflector
    explorer: Explorer
    abstractor: Abstractor
    validator: Validator
    costs: Counter | None = None
    dialogues: list[Dialogue] | None = None
    initial: Roles | None = None
    unanswered: Callable[[Mapping[str, float]], str] | None = None
    served: Callable[[], Mapping[str, Any]] | None = None
