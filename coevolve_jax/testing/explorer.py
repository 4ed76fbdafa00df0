"""The conformance suite of explorers: the contract of their roles (explorers/base.py). Run it on your own."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.explorers.base import (
    Answers,
    Episode,
    Exploration,
    Goal,
    Limits,
    Proposal,
    Roles,
    Shorten,
)
from coevolve_jax.explorers.evidence import signature
from coevolve_jax.explorers.plans import fulfilled
from coevolve_jax.synthesis.explore import Tools, explore, offered_names, unguided
from coevolve_jax.synthesis.lineage import Birth
from coevolve_jax.synthesis.pipeline import run_pipeline
from coevolve_jax.synthesis.settings import Settings
from coevolve_jax.synthesis.shorten import shorten
from coevolve_jax.synthesis.validate import Verdict
from coevolve_jax.types import (
    SIGNAL_KINDS,
    Call,
    Context,
    Evidence,
    Group,
    Outcome,
    Signal,
    Step,
    Task,
    Trajectory,
)

EVIDENCE_TASKS = 4
WANTED = Limits(proposals=3)


def check_explorer(
    roles: Roles,
    tools: Tools,
    env_pool: EnvPool,
    scenarios: Sequence[Task],
    *,
    limits: Limits = WANTED,
    rounds: int = 2,
    steps: int = 8,
    seed: int = 0,
    deterministic: bool = True,
) -> None:
    """Runs the roles in the real environment, unguided, under signals and with plans, and checks all answers.

    It does not check whether focus and avoid are heeded, nor the wording, nor the validator's judgement.

    scenarios: about ten bare ones. In some of them the explorer must find a task that is accepted.
    deterministic: False where the generators do not determine the answers, as with an LLM that samples. Equal
    runs may then differ, and so may a batch and its entries one by one. Exploration need not follow plans.
    Most plans, not all, must then come first in abstraction.

    Raises:
      AssertionError: one sentence that names the role and its fault.
    """
    _require(isinstance(roles, Roles), f"make returns a {type(roles).__name__}: it must be Roles.")
    _require(
        isinstance(roles.name, str) and roles.name != "", "Roles.name is empty: tasks' lineage shows it."
    )
    role = _Watched(roles, env_pool, deterministic)
    watched = Roles(roles.name, role, role, role, role, roles.costs)
    service = functools.partial(shorten, env_pool)
    _check_empty(roles, service)
    contexts = [unguided(s, f"unguided-{n}") for n, s in enumerate(scenarios)]

    def run(contexts: Sequence[Context], kind: str) -> list[Verdict]:
        settings, rng = Settings(limits, rounds, steps), np.random.default_rng(seed)
        return run_pipeline(watched, tools, env_pool, contexts, settings, Birth(kind), rng).verdicts

    verdicts = run(contexts, "initial")
    accepted = [v.task for v in verdicts if v.verdict == "accept" and v.task is not None]
    reasons = dict(Counter(v.reason for v in verdicts))
    _require(
        bool(accepted),
        f"Of {len(verdicts)} proposals from {len(scenarios)} scenarios none was accepted ({reasons}): the "
        "explorer finds too little, or its validator refuses what the environment scores a success.",
    )
    if deterministic:
        _require(run(contexts, "initial") == verdicts, "Two runs from equal generators gave different tasks.")
    explorations = explore(
        watched.explorer, tools, env_pool, contexts, rounds=1, steps=steps, rng=np.random.default_rng(seed)
    )
    small = Limits(1, limits.min_calls, limits.min_calls, 1)
    nothing = dataclasses.replace(explorations[0], triplets=())
    watched.abstractor.abstract([nothing, *explorations], small, service)
    _check_plans(role, explorations[:EVIDENCE_TASKS], limits, service)

    early, late = (evidence_of(env_pool, accepted[:EVIDENCE_TASKS], step) for step in (0, 1))
    guided = watched.reflector.reflect(early)
    again = {c.id for c in guided} & {c.id for c in watched.reflector.reflect(late)}
    _require(not again, f"reflector.reflect gives the id {sorted(again)[:1]} to contexts of two steps.")
    planned = [
        dataclasses.replace(unguided(task, f"planned-{n}"), plan=task.calls)
        for n, task in enumerate(accepted[:EVIDENCE_TASKS])
    ]
    run([*guided, planned[0]], "signal")
    if deterministic:
        rng = np.random.default_rng(seed)
        _check_followed(explore(role, tools, env_pool, planned, rounds=1, steps=steps, rng=rng))


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise AssertionError(message)


def _answer(name: str, method: Callable, *args: Any) -> list:
    """Returns a role's answer to the batch args[0]: a list with an entry for each of its entries."""
    try:
        answer = method(*args)
    except Exception as error:
        raise AssertionError(f"{name} raises {error!r} on a batch of {len(args[0])}.") from error
    _require(isinstance(answer, list), f"{name} returns a {type(answer).__name__}: it must be a list.")
    _require(
        len(answer) == len(args[0]), f"{name} returns {len(answer)} entries for a batch of {len(args[0])}."
    )
    return answer


def _check_empty(roles: Roles, service: Shorten) -> None:
    _answer("reflector.reflect", roles.reflector.reflect, [])
    _answer("explorer.act", roles.explorer.act, [])
    _answer("abstractor.abstract", roles.abstractor.abstract, [], Limits(1), service)
    _answer("validator.judge", roles.validator.judge, [], [])


def _check_followed(explorations: Sequence[Exploration]) -> None:
    """Requires that each exploration makes the calls of its plan, which are those of its task, in order."""
    for e in explorations:
        plan = e.context.task.calls
        _require(
            bool(fulfilled(plan, e.triplets, signature)),
            f"explorer.act leaves the plan {', '.join(map(signature, plan))} of the context {e.context.id} "
            f"aside for {', '.join(signature(t.call) for t in e.triplets)}: the plan comes first "
            "(explorers/plans.py).",
        )


def _check_plans(
    role: _Watched, explorations: Sequence[Exploration], limits: Limits, service: Shorten
) -> None:
    """Plans what each exploration's last goal does, and requires that it becomes the first goal.

    Generators go on from the first draws, so that a role which does not read the plan draws other goals.
    """
    planned = []
    for e, goals in zip(explorations, _goals(role, explorations, limits, service), strict=True):
        if goals and len(goals[-1].wanted) <= limits.max_calls:
            plan = tuple(e.triplets[i].call for i in sorted(goals[-1].wanted))
            planned.append(dataclasses.replace(e, context=dataclasses.replace(e.context, plan=plan)))
    left_out = [
        e.context
        for e, goals in zip(planned, _goals(role, planned, limits, service), strict=True)
        if not goals
        or not fulfilled(e.context.plan, [e.triplets[i] for i in sorted(goals[0].wanted)], signature)
    ]
    for context in left_out:
        _require(
            not role.deterministic and 2 * len(left_out) < len(planned),
            f"abstractor.abstract leaves the plan {', '.join(map(signature, context.plan))} of the context "
            f"{context.id} out of its first goal: steps that follow a plan come first (explorers/plans.py).",
        )


def _goals(
    role: _Watched, explorations: Sequence[Exploration], limits: Limits, service: Shorten
) -> list[list[Goal]]:
    """Returns the goals that abstraction makes of each exploration, in order."""
    made: dict[str, list[Goal]] = {e.context.id: [] for e in explorations}

    def noted(goals: Sequence[Goal]) -> list[Goal | None]:
        for goal in goals:
            made.setdefault(goal.exploration.context.id, []).append(goal)
        return service(goals)

    role.abstract(explorations, limits, noted)
    return [made[e.context.id] for e in explorations]


@dataclasses.dataclass(frozen=True)
class _Watched:
    """Plays all four roles by calling `roles`, and checks every batch and every answer."""

    roles: Roles
    env_pool: EnvPool
    deterministic: bool

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        name, role = "reflector.reflect", self.roles.reflector
        contexts = self._answers(name, lambda batch: role.reflect(batch), evidence)
        for e, context in zip(evidence, contexts):
            _check_context(e, context)
        twice = [i for i, n in Counter(c.id for c in contexts).items() if n > 1]
        _require(not twice, f"{name} gives the id {twice[:1]} to several contexts.")
        return contexts

    def act(self, episodes: Sequence[Episode]) -> list[Call | None]:
        name, role = "explorer.act", self.roles.explorer
        calls = self._answers(name, lambda batch: role.act(batch), episodes)
        for e, call in zip(episodes, calls):
            if call is not None:
                _check_call(name, call, e.tools)
        beginning = any(e.round == 0 and not e.history for e in episodes)
        _require(
            not beginning or any(c is not None for c in calls),
            f"{name} calls no tool in the first step of any of {len(episodes)} episodes.",
        )
        return calls

    def abstract(
        self, explorations: Sequence[Exploration], limits: Limits, shorten: Shorten
    ) -> list[list[Proposal]]:
        name, role = "abstractor.abstract", self.roles.abstractor
        groups = self._answers(name, lambda batch: role.abstract(batch, limits, shorten), explorations)
        for exploration, group in zip(explorations, groups):
            _require(
                len(group) <= limits.proposals,
                f"{name} makes {len(group)} proposals of one context: at most {limits.proposals} are wanted.",
            )
            for p in group:
                _check_proposal(p, exploration, limits)
            different = {tuple(map(signature, p.calls)) for p in group}
            _require(len(different) == len(group), f"{name} makes the same proposal of one context twice.")
        proposals = [p for group in groups for p in group]
        for p, run in zip(proposals, self.env_pool.execute([(p.context.task, p.calls) for p in proposals])):
            _require(
                not run.valid or run.observations == p.observations,
                f"{name} proposes {_line(p)}, which answers otherwise in a fresh environment than in the "
                "exploration.",
            )
        return groups

    def judge(
        self, proposals: Sequence[Proposal], answers: Sequence[Answers]
    ) -> list[list[str | None] | None]:
        name, role = "validator.judge", self.roles.validator
        judge = lambda batch: role.judge([p for p, _ in batch], [own for _, own in batch])
        found = self._answers(name, judge, list(zip(proposals, answers, strict=True)))
        # Also judge answers that exploration never saw: any verdict is fine, but its form must be valid.
        others = [(p, _other_answers(own)) for p, own in zip(proposals, answers)]
        for judged in (found, self._answers(name, judge, others)):
            for p, reasons in zip(proposals, judged):
                if reasons is None:
                    continue
                _require(
                    len(reasons) == len(p.turns),
                    f"{name} gives {len(reasons)} reasons for a proposal of {len(p.turns)} user turns.",
                )
                wrong = [r for r in reasons if r is not None and not (isinstance(r, str) and r)]
                _require(not wrong, f"{name} gives {wrong[:1]} as a reason: words, or None for passed.")
        return found

    def _answers(self, name: str, method: Callable[[Sequence], list], batch: Sequence) -> list:
        """Returns the answers to a batch, after comparing them with those to its single entries."""
        before, alone = _picture(batch), [_fork(entry) for entry in batch]
        answers = _answer(name, method, batch)
        _require(_picture(batch) == before, f"{name} changes what it is given.")
        for n, entry in enumerate(alone if self.deterministic else ()):
            _require(
                _answer(name, method, [entry])[0] == answers[n],
                f"{name} answers otherwise for an entry alone than for it in a batch of {len(batch)}: "
                "answers must come in the batch's order, each from its own entry and generator only.",
            )
        return answers


def _fork(entry: Any) -> Any:
    """Returns the same entry with a copy of its generator, if it has one."""
    return dataclasses.replace(entry, rng=copy.deepcopy(entry.rng)) if hasattr(entry, "rng") else entry


def _other_answers(answers: Answers) -> Answers:
    return tuple(tuple(dataclasses.replace(o, text="?") for o in turn) for turn in answers)


def _picture(inputs: Sequence) -> str:
    """Returns the inputs as text, without the generators, whose state roles may change."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.random.Generator):
            return "generator"
        if isinstance(value, np.ndarray):
            return value.tolist()
        if dataclasses.is_dataclass(value):
            return vars(value)
        return dict(value) if isinstance(value, Mapping) else repr(value)

    return json.dumps(list(inputs), default=plain)


def _line(proposal: Proposal) -> str:
    return ", ".join(map(signature, proposal.calls))


def _check_call(name: str, call: Any, tools: Sequence[dict]) -> None:
    _require(isinstance(call, Call), f"{name} gives a {type(call).__name__} where a Call belongs.")
    _require(
        call.name in offered_names(tools),
        f"{name} calls {call.name!r}, which is not among the tools offered.",
    )
    try:
        names = list(json.loads(json.dumps(dict(call.arguments), allow_nan=False)))
        plain = all(isinstance(n, str) for n in call.arguments) and names == list(call.arguments)
    except (TypeError, ValueError):
        plain = False
    _require(
        plain, f"{name} calls {call.name} with arguments that are no JSON object: {call.arguments!r:.200}."
    )


def _check_context(evidence: Evidence, context: Any) -> None:
    name = "reflector.reflect"
    _require(
        isinstance(context, Context), f"{name} gives a {type(context).__name__} where a Context belongs."
    )
    _require(
        (context.task, context.signal) == (evidence.task, evidence.signal.kind),
        f"{name} gives a context of {context.signal} in {context.task.id} for evidence of "
        f"{evidence.signal.kind} in {evidence.task.id}.",
    )
    for field in ("id", "summary", "failure_cause", "instability_pattern"):
        text = getattr(context, field)
        _require(isinstance(text, str), f"{name} gives a context whose {field} is {text!r}: it must be text.")
        _require(text != "" or field not in ("id", "summary"), f"{name} gives a context without {field}.")
    for field in ("focus_pattern", "avoid"):
        entries = getattr(context, field)
        _require(
            isinstance(entries, tuple) and all(isinstance(entry, str) and entry for entry in entries),
            f"{name} gives a context whose {field} is {entries!r:.200}: it must be a tuple of texts.",
        )
    _require(
        len(context.focus_pattern) > 0, f"{name} gives a context without focus_pattern: nothing to explore."
    )


def _check_proposal(p: Any, exploration: Exploration, limits: Limits) -> None:
    name = "abstractor.abstract"
    _require(isinstance(p, Proposal), f"{name} gives a {type(p).__name__} where a Proposal belongs.")
    _require(
        p.context == exploration.context,
        f"{name} gives a proposal of the context {p.context.id} for an exploration of "
        f"{exploration.context.id}.",
    )
    sizes = f"{len(p.calls)} calls in {len(p.turns)} user turns"
    _require(
        limits.min_calls <= len(p.calls) <= limits.max_calls and 1 <= len(p.turns) <= limits.max_turns,
        f"{name} gives a proposal of {sizes}: the limits are {limits}.",
    )
    _require(
        all(turn.calls and turn.query.strip() for turn in p.turns),
        f"{name} gives a proposal with a user turn that has no query or no calls.",
    )
    _require(bool(p.description.strip()), f"{name} gives a proposal without description.")
    for call in p.calls:
        _check_call(name, call, exploration.tools)
    steps = {t.index: t for t in exploration.triplets}
    _require(
        len(p.triplets) == len(p.observations) == len(p.calls)
        and all(
            i in steps and (steps[i].call, steps[i].observation) == (call, observation)
            for i, call, observation in zip(p.triplets, p.calls, p.observations)
        ),
        f"{name} proposes {_line(p)}, whose calls and observations are not those of the exploration steps "
        f"{p.triplets}.",
    )
    _require(
        list(p.asked) == sorted(set(p.asked) & set(range(len(p.calls)))),
        f"{name} gives a proposal whose asked is {p.asked}: positions of its {len(p.calls)} calls, "
        "ascending.",
    )


def evidence_of(env_pool: EnvPool, tasks: Sequence[Task], step: int) -> list[Evidence]:
    """Returns every kind of signal for each task.

    The group of a task has a success, a failure, a broken rollout and a malformed call.
    """
    return [
        Evidence(Signal(kind, task.id, index, step, pattern), group)
        for task in tasks
        for group in [_group(env_pool, task)]
        for kind, index in zip(SIGNAL_KINDS, (1, 1, 0))
        for pattern in [group.trajectories[0].actions[0] if kind == "rare" else None]
    ]


def _group(env_pool: EnvPool, task: Task) -> Group:
    cut = [*task.calls[:-1], Call("no_such_tool", {})]
    plans = [(task.calls, Outcome(1.0, True)), (cut, Outcome(0.0, False, reason="failed"))]
    runs = env_pool.execute([(task, calls) for calls, _ in plans])
    steps = [
        tuple(Step(0, signature(c), c, o.text, o.error) for c, o in zip(calls, run.observations))
        for (calls, _), run in zip(plans, runs)
    ]
    outcomes = [outcome for _, outcome in plans]
    steps += [(), (Step(0, "call me", None, "That is no call.", True),)]
    outcomes += [Outcome(0.0, False, valid=False, reason="crash"), Outcome(0.0, False, reason="failed")]
    none = np.zeros(0, np.int32)
    return Group(
        task,
        tuple(
            Trajectory(
                task.id,
                n,
                none,
                none.astype(bool),
                none.astype(np.float32),
                none,
                (0,),
                taken,
                "done",
                outcome,
            )
            for n, (taken, outcome) in enumerate(zip(steps, outcomes))
        ),
    )
