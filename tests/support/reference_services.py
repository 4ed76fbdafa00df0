"""The services of reference_loop.py, each as directly as docs/guides/understand_the_code.md states it.

These are a conversation, a round of exploration, validation, whether a rollout can hold a task, the group
filter and similarity to the evaluation tasks.
A rollout is a Trajectory; the world is families/lamps.py; the policy is `write` of loop_fakes.py.
"""

import dataclasses
import math
from collections import Counter

import numpy as np

from coevolve_jax.explorers.base import Episode, Exploration
from coevolve_jax.types import Observation, Outcome, Step, Trajectory, Triplet
from tests.support.families import lamps
from tests.support.loop_fakes import CHAT, write


def converse(limits, weights, version, task, index, seed, temperature):
    """One rollout. It is append-only: new tokens only follow the existing ones."""
    world = lamps.Lamps()
    world.reset(task)
    seen, logprobs, versions = [], [], []  # logprobs, versions: None for tokens that the policy did not write
    feed = lambda new: (
        seen.extend(new),
        logprobs.extend([None] * len(new)),
        versions.extend([None] * len(new)),
    )
    feed(CHAT.prompt(lamps.tools(task), task.turns[0].query))
    steps, starts, turn, acted, message, stop = [], [0], 0, 0, -1, None
    while stop is None:
        if len(seen) + limits.max_new_tokens > limits.max_length:
            stop = "context_limit"
            break
        said, message = write(weights, version, seen, seed, temperature), message + 1
        seen += said.ids.tolist()
        logprobs += said.logprobs.tolist()
        versions += said.versions.tolist()
        calls = CHAT.parse(said.ids) if said.finish == "stop" else []
        if said.finish != "stop":
            stop = "token_limit" if said.finish == "length" else "engine"
        elif not calls:
            world.end_turn()
            turn, acted = turn + 1, 0
            if turn == len(task.turns):
                stop = "done"
            else:
                starts.append(len(seen))
                feed(CHAT.user(task.turns[turn].query))
        elif acted == limits.max_steps:
            stop = "step_limit"
        else:
            acted, texts = acted + 1, []
            for p in calls:
                answer = world.step(p.call) if p.call else Observation('{"error": "malformed"}', error=True)
                cut = len(answer.text) > limits.max_observation
                texts.append(answer.text[: limits.max_observation] + "..." * cut)
                offered = p.call and p.call.name in task.scenario["tools"]
                pattern = lamps.action_pattern(p.call) if offered else "" if p.call else None
                steps.append(Step(turn, p.text, p.call, texts[-1], answer.error, pattern, message))
                if not answer.valid:  # the world is lost: the conversation ends here
                    stop = "environment"
                    break
            if stop is None:
                feed(CHAT.observations(texts))
    if stop == "context_limit":  # no message answers an observation that does not fit
        seen, logprobs, versions = (x[: limits.max_length] for x in (seen, logprobs, versions))
    outcome = Outcome(0.0, False, valid=False, reason="gone") if stop == "engine" else world.score()
    return Trajectory(
        task.id, index, np.asarray(seen), np.asarray([p is not None for p in logprobs], bool),
        np.asarray([p or 0.0 for p in logprobs], np.float32),
        np.asarray([-1 if v is None else v for v in versions]), tuple(starts), tuple(steps), stop, outcome,
    )  # fmt: skip


def explore(rounds, steps, explorer, context, rng):
    """R rounds of S steps, each round in a fresh world."""
    triplets, tools = [], lamps.tools(context.task)
    for round in range(rounds):
        world, history = lamps.Lamps(), []
        world.reset(context.task)
        while len(history) < steps:
            (call,) = explorer.act([Episode(context, tools, tuple(history), round, rng)])
            if call is None or call.name not in context.task.scenario["tools"]:
                break
            answer = world.step(call)
            if not answer.valid:
                break
            history.append(Triplet(len(triplets) + len(history), round, call, answer))
        triplets += history
    return Exploration(context, tools, tuple(triplets), None)


def validate(least, limits, validator, proposal):
    """Validates a proposal in a fresh world, which must score its calls a success.

    Returns (verdict, reason, turns kept, whether judge and world agree: "JUDGE_WORLD", "" where it was not
    asked). least: the fewest calls of a task. limits: those of a rollout.
    """
    offered = proposal.context.task.scenario["tools"]
    if any(call.name not in offered for call in proposal.calls):
        return "discard", "not_offered", 0, ""
    world = lamps.Lamps()
    task = dataclasses.replace(proposal.context.task, turns=proposal.turns)
    world.reset(task)
    answers = []
    for turn in proposal.turns:
        answers.append(tuple(world.step(call) for call in turn.calls))
        world.end_turn()
    score = world.score()
    if not score.valid:
        return "discard", "environment", 0, ""
    short = lambda turns: fits(
        limits, dataclasses.replace(task, turns=proposal.turns[:turns]), sum(answers, ())
    )
    (opinions,) = validator.judge([proposal], [tuple(answers)])
    failures = [
        "step_failed" if any(a.error for a in row) else opinion for row, opinion in zip(answers, opinions)
    ]
    liked = "no" if any(opinions) else "yes"
    wrong = [i for i, failure in enumerate(failures) if failure]
    if not wrong and score.success:
        if len(proposal.calls) < least:
            return "discard", "too_short", 0, ""
        whole = len(failures)
        agreed = f"{liked}_yes"
        return ("accept", "reproduced", whole, agreed) if short(whole) else ("discard", "too_long", 0, "")
    why = failures[wrong[0]] if wrong else "state_differs"
    good = min([*wrong, len(failures), round(score.progress * len(failures))])
    if good and sum(len(turn.calls) for turn in proposal.turns[:good]) >= least:
        return ("retain", why, good, f"{liked}_no") if short(good) else ("discard", "too_long", 0, "")
    return "discard", "too_short" if good else why, 0, ""


def fits(limits, task, answers):
    """Whether a policy that makes the reference calls, one per message, reaches the task's end."""
    seen, spare, answers = (
        len(CHAT.prompt(lamps.tools(task), task.turns[0].query)),
        limits.max_new_tokens,
        iter(answers),
    )
    for i, turn in enumerate(task.turns):
        seen += len(CHAT.user(turn.query)) * (i > 0)
        for n, call in enumerate([*turn.calls, None]):
            if seen + spare > limits.max_length or n > limits.max_steps:
                return False
            said = CHAT.message([call] if call else [])
            if len(said) > spare:
                return False
            seen += len(said)
            if call:
                text = next(answers).text
                cut = len(text) > limits.max_observation
                seen += len(CHAT.observations([text[: limits.max_observation] + "..." * cut]))
    return True


def filter_groups(c, spreads, mean, variance, seen):
    """Drops groups of unusual spread, but not too many: (positions of the others, new statistics).

    c: the section learner. mean, variance, seen: running statistics of the spreads of all earlier groups.
    """
    far, by = c.filter_z * math.sqrt(variance), c.filter_decay
    usual = lambda x: x >= mean - far if c.filter_side == "low" else x <= mean + far
    best_first = sorted(range(len(spreads)), key=lambda i: spreads[i], reverse=c.filter_side == "low")
    fine = [i for i in best_first if seen < c.filter_warmup or usual(spreads[i])]
    kept = max(fine, best_first[: math.ceil(len(spreads) * c.filter_keep)], key=len)
    for x in spreads:
        if seen:
            mean, variance = mean + by * (x - mean), (1 - by) * (variance + by * (x - mean) ** 2)
        else:
            mean = x
        seen += 1
    return sorted(kept), (mean, variance, seen)


def cosines(counts, documents):
    """Cosines of a task's features to those of each evaluation task, weighted by rarity among these."""
    rarity = lambda f: math.log((len(documents) + 1) / (sum(f in d for d in documents) + 0.5))
    weigh = lambda d: {f: n * rarity(f) for f, n in d.items()}
    norm = lambda d: math.sqrt(sum(w * w for w in d.values()))
    mine, theirs = weigh(counts), [weigh(d) for d in documents]
    return [sum(w * d.get(f, 0) for f, w in mine.items()) / (norm(mine) * norm(d) or 1.0) for d in theirs]


def calls_made(task):
    """Counts of a task's calls, each with its arguments."""
    return Counter(lamps.text(call) for call in task.calls)


def shares_held(own, others, counted):
    """The share of each other's calls that these are, by their rareness; 0 for those that are not counted."""
    rareness = lambda call: math.log((len(others) + 1) / (sum(call in other for other in others) + 0.5))
    shares = []
    for other, counts in zip(others, counted, strict=True):
        whole = sum(n * rareness(call) for call, n in other.items())
        part = sum(min(n, own[call]) * rareness(call) for call, n in other.items() if call in own)
        shares.append(part / whole if counts else 0.0)
    return shares


def known_cosines(counts, documents):
    """`cosines`, but features that no evaluation task has do not count."""
    known = {f: n for f, n in counts.items() if any(f in d for d in documents)}
    return cosines(known, documents)


def valid(rollouts):
    return [t for t in rollouts if t.outcome.valid]


def ids(t):
    return tuple(t.ids.tolist())


def tokens(t):
    """All of a rollout as plain values."""
    return (
        ids(t),
        tuple(t.mask.tolist()),
        t.versions.tolist(),
        t.logprobs.tolist(),
        t.turn_starts,
        t.to_json(),
    )


def as_learned(t, advantage, step=None):
    """A rollout as plain values per token: id, whether the policy wrote it, and what it learns from.

    The latter are the advantage, the sampler's log-probability and, given `step`, the age.
    """
    written = t.mask
    ages = [] if step is None else [step - v for v in t.versions[written].tolist()]
    return (
        ids(t),
        tuple(written.tolist()),
        [advantage] * int(written.sum()),
        t.logprobs[written].tolist(),
        ages,
    )
