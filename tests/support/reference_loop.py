"""The algorithm once more, as slow and obvious Python: what the package's loop must do, step by step.

With the package it shares types and the generators of seeding.rng_for. With the package's tests it shares the
world, the policy and the roles (families/lamps.py, loop_fakes.py). It shares no logic.
reference_services.py holds its services. A group is (task, rollouts).
"""

import copy
import dataclasses
import math
from collections import Counter
from statistics import fmean

import numpy as np

from coevolve_jax.explorers.base import Limits
from coevolve_jax.seeding import rng_for, salted
from coevolve_jax.types import Context, Evidence, Group, Lineage, Outcome, Signal, Task
from tests.support.families import lamps
from tests.support.loop_fakes import START, as_rows, next_weights
from tests.support.reference_services import (
    as_learned,
    calls_made,
    converse,
    cosines,
    explore,
    filter_groups,
    ids,
    known_cosines,
    shares_held,
    tokens,
    valid,
    validate,
)

KINDS = ("forgetting", "boundary", "rare")


class Exhausted(Exception):
    """Unguided exploration finds no more new tasks."""


@dataclasses.dataclass
class State:
    """The whole state between two steps, which a checkpoint holds."""

    step: int = 0  # GRPO steps done
    weights: int = START
    tasks: list = dataclasses.field(default_factory=list)  # D_t, in order of birth
    records: dict = dataclasses.field(
        default_factory=dict
    )  # task id -> [born, times scored, first, last score, times in a row that all rollouts were alike]
    scores: dict = dataclasses.field(default_factory=dict)  # task id -> all its scores
    actions: Counter = dataclasses.field(default_factory=Counter)  # pattern -> how often it was taken
    evidence: list = dataclasses.field(default_factory=list)  # since the last evolution
    # Statistics of the group filter: running mean, running variance, groups seen
    spreads: tuple = (0.0, 0.0, 0)
    signals: Counter = dataclasses.field(default_factory=Counter)  # by kind
    made: Counter = dataclasses.field(default_factory=Counter)  # counts of evolution's proposals by outcome
    ledger: Counter = dataclasses.field(default_factory=Counter)
    # An evolution beside training: the step after which it began, and the State at that time
    under_way: tuple = ()

    def copy(self):
        return State(**{name: copy.copy(value) for name, value in vars(self).items()})


class Loop:
    """The loop. soon: evolutions beside training run when they begin; otherwise at the last moment."""

    def __init__(self, config, roles, soon=True):
        self.c, self.roles, self.soon = config, roles, soon
        self.luck = salted(config.seed, config.rollout.salt)
        self.states, self.rows, self.signal_rows = {}, {}, {}  # by step
        self.similarities = {}  # task id -> cosine to each evaluation task

    def run(self, start=None, until=None):
        """Runs from the start, or the checkpoint of step `start`, up to step `until`. Returns the events."""
        c = self.c
        self.events, self.begun, self.ended = [("learner", c.rollout.temperature, c.seed)], {}, float("inf")
        if start is None:
            self.version, self.s = 0, State()
            self.begin()
        else:
            self.version, self.s = start, self.states[start].copy()
            self.events.append(("engine", self.s.weights, self.version))
        self.evaluation = [*lamps.tasks("test"), *self.held_out]
        if self.s.under_way:  # the pending evolution starts again
            self.set_off(*self.s.under_way)
        last, coming = min(c.steps, until or c.steps), []
        for step in range(self.s.step, last):
            self.begun[step] = len(self.events)
            # 1. A batch of tasks, K rollouts each. Rollouts of the next steps may start, with the present
            # weights.
            while len(coming) <= c.rollout.max_staleness and (not coming or step + len(coming) < c.steps):
                coming.append(self.collect(step + len(coming)))
            groups, costs = coming.pop(0)
            groups = [(task, [self.unless_stale(t, step) for t in rollouts]) for task, rollouts in groups]
            # 2. GRPO update of the policy.
            self.events.append(("compute_advantages", [task.id for task, _ in groups]))
            learned = self.compute_advantages(groups)
            stale = c.rollout.max_staleness > 0 and c.learner.tis_cap > 0 and c.learner.epochs == 1
            told = sorted(as_learned(t, a, step if stale else None) for t, a in learned)
            for _ in range(c.learner.epochs):
                self.events.append(("update", told))
                self.s.weights = next_weights(self.s.weights, [ids(t) for t, _ in learned])
            self.version = step + 1
            self.events.append(("engine", self.s.weights, self.version))
            # 3. Weakness signals.
            self.events.append(("observe", step))
            found = self.observe(step, groups)
            # 4. Every F steps the training set evolves.
            grown = self.evolve_beside(step) if c.evolution.async_steps else self.evolve(step)
            self.s.step = step + 1
            self.note(step, groups, learned, found, grown, costs)
            if self.s.step % c.checkpoint.every == 0 or self.s.step == last:
                self.events.append(("saved", self.s.step))
        self.ended = len(self.events)
        if self.s.under_way and not self.soon:
            self.events += self.found[2]
        if last == c.steps:
            self.after = self.evaluate()
            self.events.append(("policy saved", self.s.weights))
        return self.events

    def begin(self):
        """Held-out tasks of scenarios without training; D_0 without human tasks; success before RL."""
        c, training = self.c, [s.scenario for s in lamps.scenarios("train")]
        fair = [s for s in lamps.scenarios("test") if s.scenario not in training]
        self.held_out, self.evaluation = [], []
        rng = rng_for(c.evaluation.seed, "held_out")
        self.explore_unguided(self.held_out, None, fair, c.evaluation.tasks, "held_out", 0, rng)
        self.evaluation = [*lamps.tasks("test"), *self.held_out]
        self.initial = self.unguided(c.data.initial_tasks, "initial", 0, rng_for(c.seed, "initial"))
        self.before = self.evaluate()
        self.states[0] = self.s.copy()

    # --- Rollouts -------------------------------------------------------------------------------------------

    def roll(self, jobs, temperature):
        """jobs: (task, rollout index, seed)."""
        self.events.append(("rollouts", temperature, [(task.id, m, seed) for task, m, seed in jobs]))
        done = [converse(self.c.rollout, self.s.weights, self.version, *job, temperature) for job in jobs]
        self.events.append(("trajectories", [tokens(t) for t in done]))
        return done

    def evaluate(self):
        """Success rates on the held-out tasks by sampling and by greedy decoding."""
        c, rates = self.c.evaluation, []
        for samples, temperature in ((c.num_rollouts, c.temperature), (1, 0.0)):
            seeds = rng_for(c.seed, "evaluation").integers(2**32, size=len(self.held_out) * samples).tolist()
            jobs = [(task, m) for task in self.held_out for m in range(samples)]
            done = self.roll([(*job, seed) for job, seed in zip(jobs, seeds)], temperature)
            valid = [t.outcome.success for t in done if t.outcome.valid]
            rates.append(fmean(valid) if valid else None)
        return rates

    # --- 1. Which tasks -------------------------------------------------------------------------------------

    def collect(self, step):
        """A batch of tasks with their rollouts.

        With dynamic sampling, a group whose rewards are all equal draws another task, for some rounds.
        """
        c, groups, costs = self.c, [], Counter()
        for round in range(1 + c.learner.dynamic_sampling):
            again = [round] if round else []
            alive = [g for g in groups if len({t.outcome.reward for t in valid(g[1])}) > 1]
            missing = c.rollout.tasks_per_step - len(alive)
            if missing <= 0:
                break
            batch = self.draw(
                missing, [task.id for task, _ in groups], rng_for(self.luck, "sample", step, *again)
            )
            if not batch:
                break
            k = c.rollout.group_size
            seeds = rng_for(self.luck, "rollout", step, *again).integers(2**32, size=(len(batch), k)).tolist()
            done = self.roll(
                [(task, m, seeds[i][m]) for i, task in enumerate(batch) for m in range(k)],
                c.rollout.temperature,
            )
            groups += [(task, done[i * k : (i + 1) * k]) for i, task in enumerate(batch)]
            costs["rollouts/policy"] += len(done)
            costs["sampled_tokens/policy"] += sum(int(t.mask.sum()) for t in done)
        return groups, costs

    def draw(self, n, barred, rng):
        """Draws n different tasks, whatever was drawn before; a share of them from evolution's tasks."""
        by_id = {task.id: task for task in self.s.tasks if task.id not in barred}
        whole, rest = (0, min(n, len(by_id))) if barred else (n // len(by_id), n % len(by_id))
        luck = dict(zip(by_id, rng.exponential(size=len(by_id)).tolist()))

        def rank(id):
            _, visits, _, last, alike = self.s.records[id]
            weight = 1.0 if not visits or self.c.data.sampling == "uniform" else max(
                self.c.data.sampling_floor, 4 * last * (1 - last)
            )  # fmt: skip
            retired = 0 < self.c.data.retire_after <= alike
            return (np.inf if retired or not weight else luck[id] / weight, luck[id])

        order = sorted(by_id, key=rank)
        new = [id for id in order if by_id[id].lineage.kind != "initial" and rank(id)[0] < np.inf]
        first = new[: math.ceil(round(self.c.data.min_evolved_share * rest, 6))]
        batch = list(by_id) * whole + first + [id for id in order if id not in first][: rest - len(first)]
        return [by_id[batch[i]] for i in rng.permutation(len(batch))]

    def unless_stale(self, t, step):
        """Turns a rollout into none where a token comes from weights that are too old."""
        written = t.versions[t.mask]
        if t.outcome.valid and len(written) and step - min(written) > self.c.rollout.max_staleness:
            return dataclasses.replace(
                t, outcome=Outcome(0.0, False, valid=False, reason="sampled by weights that are too old")
            )
        return t

    # --- 2. What is learned ---------------------------------------------------------------------------------

    def compute_advantages(self, groups):
        """(rollout, advantage) for all valid rollouts of the groups that count."""
        c, chosen = self.c.learner, [valid(rollouts) for _, rollouts in groups if valid(rollouts)]
        rewards = lambda group: [t.outcome.reward for t in group]
        spread = lambda group: float(np.std(rewards(group))) if len(set(rewards(group))) > 1 else 0.0
        alive = [group for group in chosen if spread(group) > 0]
        if c.skip_zero_variance_groups or c.dynamic_sampling or c.group_filter:
            chosen = alive
        if c.group_filter:
            kept, self.s.spreads = filter_groups(c, [spread(group) for group in alive], *self.s.spreads)
            chosen = [alive[i] for i in kept]
        learned = []
        for group in chosen:
            mean, n = fmean(rewards(group)), len(group)
            for t in group:
                if c.overlong_filtering and t.stop in ("token_limit", "step_limit", "context_limit"):
                    continue
                above = t.outcome.reward - mean
                by = {"group_std": spread(group) + 1e-6, "group_mean": 1, "leave_one_out": max(n - 1, 1) / n}
                learned.append((t, above / by[c.advantage] if spread(group) else 0.0))
        return learned

    # --- 3. What the rollouts show --------------------------------------------------------------------------

    def observe(self, step, groups):
        """Forgetting, boundary and rare signals, from the valid rollouts alone."""
        c, s, found = self.c.signals, self.s, []
        everything = [t for _, rollouts in groups for t in valid(rollouts)]
        s.actions = s.actions + Counter(action for t in everything for action in t.actions)
        for task, rollouts in groups:
            group = valid(rollouts)
            if not group:
                continue
            score, before = fmean(t.outcome.reward for t in group), s.scores.get(task.id, ())[-c.window :]
            successes = [t.outcome.reward >= 0.5 for t in group]
            for t, success in zip(group, successes):
                rarest = min(t.actions, key=lambda p: (s.actions[p], p), default=None)
                signals = {
                    "forgetting": max(before, default=0) >= 0.5 > score and not success,
                    "boundary": any(successes) and not all(successes),
                    "rare": rarest and s.actions[rarest] / sum(s.actions.values()) < c.rare_percent / 100,
                }
                for kind in KINDS:
                    if signals[kind]:
                        pattern = rarest if kind == "rare" else None
                        signal = Signal(kind, task.id, t.rollout_index, step, pattern)
                        found.append(Evidence(signal, Group(task, tuple(group))))
            s.scores = {**s.scores, task.id: (*s.scores.get(task.id, ()), score)}
            born, times, first, last, alike = s.records[task.id]
            alike = 0 if score not in (0.0, 1.0) else alike + 1 if score == last else 1
            s.records[task.id] = born, times + 1, score if first is None else first, score, alike
        if any(self.evolves(later) for later in range(step, self.c.steps)):  # no later action is asked for
            s.evidence = [*s.evidence, *found]
        return found

    # --- 4. How the training set evolves --------------------------------------------------------------------

    def evolve_beside(self, step):
        """Tasks found with today's D_t join it config.evolution.async_steps steps later."""
        grown, size = None, len(self.s.tasks)
        if self.s.under_way and step == self.s.under_way[0] + self.c.evolution.async_steps:
            grown, then, heard = self.found
            self.events += [] if self.soon else heard
            new = then.tasks[size:]
            self.s.tasks += new
            self.s.records.update({t.id: then.records[t.id] for t in new})
            self.s.ledger.update(then.ledger - self.s.under_way[1].ledger)
            self.s.under_way = ()
        if not self.s.under_way:
            if self.evolves(step):
                self.s.under_way = (step, self.s.copy())
                self.set_off(*self.s.under_way)
                self.s.evidence = []
            else:
                self.evolve(step)
        return grown

    def set_off(self, step, then):
        """Evolves from the state `then` and sets self.found = (outcome, state after it, events)."""
        here, events, self.s, self.events = self.s, self.events, then.copy(), []
        grown = self.evolve(step)
        begun, *heard = self.events  # the start is an event at once
        self.found = grown, self.s, heard
        self.s, self.events = here, [*events, begun, *(heard if self.soon else [])]

    def evolves(self, step):
        c = self.c.evolution
        too_late = step + 1 + c.async_steps > self.c.steps - c.freeze_last_steps
        return self.c.strategy.name != "static" and (step + 1) % c.every == 0 and not too_late

    def evolve(self, step):
        self.events.append(("evolve", step, len(self.s.tasks), [r[1:4] for r in self.s.records.values()]))
        if not self.evolves(step):
            return None
        c = self.c.evolution
        rng, stats = rng_for(self.luck, "evolve", step), Counter()
        if self.c.strategy.name == "random":
            kind, stats = "random", self.unguided(c.tasks, "random", step, rng)
        else:
            bound = self.c.data.max_tasks
            full = bound and len(self.s.tasks) >= bound
            kind, chosen = "signal", self.select([] if full else self.s.evidence, rng)
            self.s.evidence = []
            self.s.ledger["reflections"] += len(chosen)
            self.events.append(("evidence", [as_rows(e) for e in chosen]))
            contexts = type(self.roles)().reflect(chosen)
            wanted = self.room(self.s.tasks, self.c.data.max_tasks, c.tasks, stats)
            for _ in range(3):  # passes over the same contexts, while tasks are missing
                if contexts and stats["added"] < wanted:
                    missing = wanted - stats["added"]
                    stats += self.grow(self.s.tasks, contexts, missing, kind, step, stats["proposed"], rng)
        for key, name in (
            ("environment_steps",) * 2,
            ("tasks_proposed", "proposed"),
            ("tasks_added", "added"),
        ):
            self.s.ledger[f"{key}/{kind}"] += stats[name]
        return stats

    def select(self, evidence, rng):
        """Takes kinds in turn, each (kind, task) once, with a failed rollout if any; else in random order."""
        shuffled = [evidence[i] for i in rng.permutation(len(evidence))]
        failed_first = [e for e in shuffled if not e.trajectory.outcome.success]
        failed_first += [e for e in shuffled if e.trajectory.outcome.success]
        queues = {kind: {} for kind in sorted(KINDS)}
        for e in failed_first:
            if e.task.id not in queues[e.signal.kind]:
                queues[e.signal.kind][e.task.id] = e
        in_turn, queues = [], [list(queue.values()) for queue in queues.values()]
        while any(queues):
            in_turn += [queue.pop(0) for queue in queues if queue]
        return in_turn[: self.c.evolution.contexts]

    def unguided(self, wanted, kind, step, rng):
        """Grows D_t by `wanted` tasks from free exploration of the training scenarios."""
        bound = self.c.data.max_tasks
        return self.explore_unguided(self.s.tasks, bound, lamps.scenarios("train"), wanted, kind, step, rng)

    def room(self, pool, bound, wanted, stats):
        """How many of the wanted tasks fit into the pool; counts the others."""
        fitting = min(wanted, max(bound - len(pool), 0)) if bound else wanted
        if fitting < wanted:
            stats["refused/pool_full"] += wanted - fitting
        return fitting

    def explore_unguided(self, pool, bound, scenarios, wanted, kind, step, rng):
        total, in_vain = Counter(), 0
        wanted = self.room(pool, bound, wanted, total)
        while total["added"] < wanted:
            missing, contexts = wanted - total["added"], []
            for n, i in enumerate(rng.choice(len(scenarios), min(32, max(4, missing)))):
                id = f"{kind}-{step}-context-{total['contexts'] + n}"
                contexts.append(Context(id, None, scenarios[i], "Free exploration of the scenario."))
            stats = self.grow(pool, contexts, missing, kind, step, total["proposed"], rng)
            total += stats
            in_vain = 0 if stats["added"] else in_vain + 1
            if in_vain == 20 and kind == "random":  # D_t grows by fewer
                break
            if in_vain == 20:
                raise Exhausted
        return total

    def grow(self, pool, contexts, wanted, kind, step, first, rng):
        """explore -> abstract -> validate; D_t gains `wanted` at most. first: the first proposal's number."""
        e, d = self.c.evolution, self.c.data
        spawn = lambda: [np.random.default_rng(int(x)) for x in rng.integers(2**63, size=len(contexts))]
        explored = [
            explore(e.rounds, e.steps, self.roles, context, own) for context, own in zip(contexts, spawn())
        ]
        explored = [dataclasses.replace(x, rng=own) for x, own in zip(explored, spawn())]
        limits = Limits(e.proposals, d.min_calls, d.max_calls, d.max_turns)
        proposed = self.roles.abstract(explored, limits, None)
        # The first proposal of every context precedes the second of any.
        in_turn = [row[i] for i in range(e.proposals) for row in proposed if i < len(row)]
        stats = Counter(contexts=len(contexts), environment_steps=sum(len(x.triplets) for x in explored))
        verdicts = [validate(d.min_calls, self.c.rollout, self.roles, proposal) for proposal in in_turn]
        stats.update(f"judge_agreement/{agreed}" for *_, agreed in verdicts if agreed)
        for n, (proposal, (verdict, reason, turns_kept, _)) in enumerate(zip(in_turn, verdicts)):
            if stats["added"] == wanted:
                break
            stats.update(["proposed", {"accept": "accepted", "retain": "retained"}.get(verdict, "discarded")])
            if verdict != "discard":
                origin, kept = proposal.context, proposal.turns[:turns_kept]
                used = proposal.triplets[: sum(len(turn.calls) for turn in kept)]
                lineage = Lineage(
                    kind, origin.signal, origin.task.id, origin.id, "lamplighter", used, verdict, reason,
                    step,
                    focus=tuple(origin.focus_pattern),
                )  # fmt: skip
                id = f"{kind}-{step}-{first + n}"
                patterns = tuple(lamps.action_pattern(call) for turn in kept for call in turn.calls)
                named = (origin.task.scenario, kept, proposal.description, lineage)
                task = Task(id, "lamps", *named, patterns=patterns)
                reason = self.refusal(pool, task)
                if reason is None:
                    pool.append(task)
                    if pool is self.s.tasks:
                        self.s.records[id] = step, 0, None, None, 0
            stats["added" if verdict != "discard" and reason is None else f"refused/{reason}"] += 1
        return stats

    def refusal(self, pool, task):
        """Why a valid task is refused: too close to an evaluation task, or a duplicate."""
        if self.evaluation:
            by_features = cosines(lamps.features(task), [lamps.features(t) for t in self.evaluation])
            others = [calls_made(t) for t in self.evaluation]
            two = [len({str(call) for call in t.calls if call.arguments}) > 1 for t in self.evaluation]
            held = shares_held(calls_made(task), others, two)
            by_calls = list(map(max, known_cosines(calls_made(task), others), held))
            limits = {"features": self.c.data.leak_threshold, "arguments": self.c.data.leak_call_threshold}
            self.similarities[task.id] = {"features": by_features, "arguments": by_calls}
            same = any(task.calls == t.calls for t in self.evaluation if t.calls)
            if same or max(by_features) >= limits["features"] or max(by_calls) >= limits["arguments"]:
                return "near_evaluation"
        if any((t.scenario, t.calls) == (task.scenario, task.calls) for t in pool):
            return "duplicate"
        return None

    # --- What the run records -------------------------------------------------------------------------------

    def note(self, step, groups, learned, found, grown, costs):
        everything = [t for _, rollouts in groups for t in rollouts]
        good = valid(everything)
        mean = lambda values: fmean(values) if (values := list(values)) else None
        steps, per_group = [x for t in good for x in t.steps], [valid(g) for _, g in groups if valid(g)]
        ages = [step - v for t in good for v in t.versions[t.mask]]
        by_origin = lambda first: mean(
            t.outcome.success
            for task, g in groups
            for t in valid(g)
            if (task.lineage.kind == "initial") == first
        )
        counts = {kind: sum(e.signal.kind == kind for e in found) for kind in KINDS}
        self.s.signals.update(counts)
        self.s.ledger.update(costs)
        self.s.ledger["learned_trajectories"] += len(learned)
        self.s.ledger["learned_tokens"] += sum(int(t.mask.sum()) for t, _ in learned)
        self.s.made.update(grown or {})
        self.rows[step] = {
            "step": step, "reward": mean(t.outcome.reward for t in good),
            "success": mean(t.outcome.success for t in good),
            "success_initial": by_origin(True), "success_new": by_origin(False),
            "valid": len(good) / len(everything),
            "mixed_groups": mean(len({t.outcome.success for t in g}) == 2 for g in per_group),
            "mean_turn_calls": mean(len(t.steps) / len(t.turn_starts) for t in good),
            "malformed": mean(x.call is None for x in steps), "length": mean(len(t.ids) for t in good),
            "staleness_mean": mean(ages) or 0.0, "staleness_max": max(ages, default=0),
            "tasks": len(self.s.tasks),
            "groups": {"rolled_out": len(groups), "learned_from": len({t.task_id for t, a in learned if a})},
            "signals": counts, "evolution": grown, "loss": float(len(learned)),
        }  # fmt: skip
        self.signal_rows[step] = [e.signal.to_json() for e in found]
        self.states[step + 1] = self.s.copy()
