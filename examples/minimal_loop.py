"""CoEvolve in one file: GRPO on a training set that grows where the policy is weak (arXiv 2604.15840).

    python examples/minimal_loop.py     # about two minutes on two CPU cores

An agent learns to use tools by reinforcement learning. A fixed training set soon teaches it little: the agent
solves most tasks, and its weak spots are rare in the set. So the set evolves with the agent. The agent's own
rollouts show where it is weak. An explorer returns to these places in the real environment, and turns its
findings into new tasks. Nobody writes a task by hand.

    D_0 = N validated tasks from unguided exploration
    for each GRPO step t:
        1. K rollouts for each of a batch of tasks from D_t
        2. GRPO update of the policy
        3. weakness signals from these rollouts: forgetting, boundary, rare
        4. every F steps: reflect -> explore -> abstract -> validate; D_{t+1} = D_t + the valid tasks

`run` is these lines. The functions below it are its pieces, in order. They give the rollouts, signals and new
tasks of coevolve_jax/train.py bit for bit; tests/examples/test_minimal_loop.py shows it. Checkpoints, logs,
evaluation, several hosts and further options of the config are left out.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import zip_longest
from statistics import fmean
from typing import NamedTuple

import numpy as np
from absl import app
from ml_collections import ConfigDict
from tqdm import tqdm

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.distributed.sharding import make_mesh
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.packing import pack
from coevolve_jax.loop.initial import leak_guard
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.pipeline import SynthesisRequest, Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import SIGNAL_KINDS, SUCCESS, Evidence, Group, Signal, Task, TrainingSample


class StepRecord(NamedTuple):
    """One GRPO step: K rollouts of each task, the signals in them, and the tasks by which D_t then grew."""

    step: int
    groups: list[Group]
    signals: list[Signal]
    new_tasks: list[Task]


def run(config: ConfigDict) -> Iterator[StepRecord]:
    """Runs the algorithm, and yields after each GRPO step. config: the same that train.py takes."""
    c = config
    configs.check(c)
    mesh = make_mesh(**c.mesh)
    policy = build.policy(c.model, mesh, build.trained_dtype(c.learner))
    learner = Learner(
        policy.config, c.learner, policy.params, temperature=c.rollout.temperature, mesh=mesh, seed=c.seed
    )
    state = learner.init(policy.params)
    with (
        build.env_pool(c) as env_pool,  # the real environment, in worker processes
        closing(build.engine(c, policy)) as engine,  # samples tokens
        closing(build.agent(c, policy, engine, env_pool)) as agent,  # messages, tool calls, answers
    ):
        # Rules play the explorer's roles (reflect, explore, abstract, judge); in the paper an LLM does.
        roles = build.explorer(c)
        synthesizer_with = lambda guard: build.synthesizer(c, roles, env_pool, guard, agent.fits)
        # The tasks to evaluate on come first: leak control keeps their like out of training.
        wanted = c.evaluation.tasks, "held_out", c.evaluation.seed
        held_out = explore_freely(c, synthesizer_with(None), build.held_out_scenarios(c), *wanted)
        synthesizer = synthesizer_with(leak_guard(c, list(held_out)))
        # D_0: N tasks from unguided exploration
        tasks = explore_freely(c, synthesizer, build.scenarios(c), c.data.initial_tasks, "initial", c.seed)

        scores: dict[str, list[float]] = {}  # of each task, by its id, oldest first
        actions: Counter[str] = Counter()  # c_p: how often each action was taken
        evidence: list[Evidence] = []  # signals since the last evolution

        for step in range(c.steps):
            # 1. K rollouts for each of a batch of tasks from D_t; the environment rewards each
            n, k = c.rollout.tasks_per_step, c.rollout.group_size
            batch = draw_batch(list(tasks), n, c.data.min_evolved_share, rng_for(c.seed, "sample", step))
            seeds = rng_for(c.seed, "rollout", step).integers(2**32, size=(n, k)).tolist()
            with tqdm(total=n * k, desc=f"step {step}: rollouts", leave=False) as bar:
                groups = agent.rollout_groups(
                    batch, seeds, c.rollout.temperature, on_done=lambda rollout: bar.update()
                )

            # 2. GRPO update: clipped ratio and KL to the first policy, on the tokens that the policy wrote
            packed = pack(
                training_samples(groups), pack_length=c.learner.pack_length,
                rows_per_microbatch=c.learner.rows_per_microbatch, max_rows=n * k,
            )  # fmt: skip
            state, _ = learner.update(state, packed)
            engine.update_weights(learner.policy(state), step + 1)

            # 3. Weakness signals, with the rollouts that show them
            found = weakness_signals(c, step, groups, scores, actions)
            evidence += found

            # 4. Every F steps D_t evolves, except in the last steps: new tasks are to be trained on
            new_tasks = []
            if (step + 1) % c.evolution.every == 0 and step < c.steps - c.evolution.freeze_last_steps:
                new_tasks, evidence = evolve(c, step, evidence, synthesizer, tasks), []
            yield StepRecord(step, groups, [e.signal for e in found], new_tasks)


# ---- D_0 -------------------------------------------------------------------------------------------
def explore_freely(
    config: ConfigDict, synthesizer: Synthesizer, scenarios: Sequence[Task], wanted: int, kind: str, seed: int
) -> TaskPool:
    """Makes tasks by acting without a goal in random scenarios, and validates them as all others."""
    tasks = TaskPool(key=build.family(config).task_key)
    request = SynthesisRequest(wanted, kind, step=0, rng=rng_for(seed, kind))
    with tqdm(total=wanted, desc=f"{kind} tasks", leave=False) as bar:
        synthesizer.synthesize_unguided(tasks, scenarios, request, all_or_none=True, on_added=bar.update)
    return tasks


# ---- 1. The batch ----------------------------------------------------------------------------------
def draw_batch(tasks: Sequence[Task], n: int, evolved_share: float, rng: np.random.Generator) -> list[Task]:
    """Draws n of the tasks, which are more, uniformly. Reserves a share of the batch for evolved tasks."""
    order = np.argsort(rng.exponential(size=len(tasks))).tolist()  # a random order
    evolved = [i for i in order if tasks[i].lineage.kind != "initial"]
    reserved = evolved[: math.ceil(round(evolved_share * n, 9))]
    others = [i for i in order if i not in reserved][: n - len(reserved)]
    return [tasks[[*reserved, *others][i]] for i in rng.permutation(n)]


# ---- 2. GRPO (arXiv 2402.03300, section 4.1.2) -----------------------------------------------------
def group_advantages(rewards: Sequence[float]) -> np.ndarray:
    """Compares each rollout with its group: (R_i - mean) / std, [K] float32."""
    r = np.asarray(rewards, np.float64)
    return ((r - r.mean()) / (r.std() + 1e-6)).astype(np.float32)


def training_samples(groups: Sequence[Group]) -> list[TrainingSample]:
    """Gives every token of a rollout the rollout's advantage."""
    samples = []
    for group in groups:
        if len(set(group.rewards)) > 1:  # where all rewards are equal, no rollout is better than another
            for t, advantage in zip(group.valid, group_advantages(group.rewards), strict=True):
                samples.append(TrainingSample(t, np.full(len(t.ids), advantage)))
    return samples


# ---- 3. Weakness signals (CoEvolve, section 3) -----------------------------------------------------
def weakness_signals(
    config: ConfigDict, step: int, groups: Sequence[Group], scores: dict, actions: Counter
) -> list[Evidence]:
    """Finds where the policy is weak, by plain statistics. `scores` and `actions` learn from the rollouts.

    A task's score is the mean reward of its K rollouts. A score or reward from 0.5 on is a success.

    forgetting: the task's score is no success, but one of its last W scores was. Failed rollouts carry it.
    boundary: some of the K rollouts succeed, others fail. All of them carry it.
    rare: the rollout took an action p with c_p / N_actions < theta percent, counted over the whole run.
    """
    for group in groups:
        for t in group.valid:  # invalid are those that our own machinery failed
            actions.update(t.actions)
    n_actions = actions.total()
    found = []
    for group in (g for g in groups if g.valid):
        score, past = fmean(group.rewards), scores.setdefault(group.task.id, [])
        forgotten = score < SUCCESS and any(s >= SUCCESS for s in past[-config.signals.window :])
        mixed = len({t.outcome.success for t in group.valid}) == 2
        past.append(score)
        for t in group.valid:
            where = group.task.id, t.rollout_index, step
            rarest = min(set(t.actions), key=lambda p: (actions[p], p), default=None)
            if forgotten and not t.outcome.success:
                found.append(Evidence(Signal("forgetting", *where), group))
            if mixed:
                found.append(Evidence(Signal("boundary", *where), group))
            if rarest and actions[rarest] / n_actions < config.signals.rare_percent / 100:
                found.append(Evidence(Signal("rare", *where, pattern=rarest), group))
    return found


# ---- 4. Evolution (CoEvolve, section 3) ------------------------------------------------------------
def choose_evidence(evidence: Sequence[Evidence], count: int, rng: np.random.Generator) -> list[Evidence]:
    """Takes the kinds of signals in turn, each task once per kind, by a failed rollout if there is one."""
    order = sorted(rng.permutation(len(evidence)), key=lambda i: evidence[i].trajectory.outcome.success)
    by_kind: dict[str, dict[str, Evidence]] = {}
    for i in order:  # failures come first
        signal = evidence[i].signal
        by_kind.setdefault(signal.kind, {}).setdefault(signal.task_id, evidence[i])
    in_turn = zip_longest(*(by_kind[kind].values() for kind in sorted(by_kind)))
    return [e for turn in in_turn for e in turn if e is not None][:count]


def evolve(
    config: ConfigDict, step: int, evidence: Sequence[Evidence], synthesizer: Synthesizer, tasks: TaskPool
) -> list[Task]:
    """Lets D_t, `tasks`, grow where the policy is weak. Returns the new tasks."""
    c, before, rng = config.evolution, len(tasks), rng_for(config.seed, "evolve", step)
    # Reflect: a trajectory becomes a context: why it failed, actions to explore, mistakes to avoid.
    contexts = synthesizer.reflect(choose_evidence(evidence, c.contexts, rng))
    # Explore: act in the real environment under each context, in R rounds of S steps.
    # Abstract: choose goals among the results, find the fewest calls that reach each, word them as a user.
    # Validate: execute each task in a fresh environment. Accept it, keep its first turns, or discard it.
    # Leak control: refuse tasks that resemble one that we evaluate on.
    # D_t grows by at most c.tasks of the rest, and never shrinks.
    synthesizer.synthesize(tasks, contexts, SynthesisRequest(c.tasks, "signal", step, rng))
    return list(tasks)[before:]


# ---- A small run -----------------------------------------------------------------------------------
SETTINGS = {
    "steps": 20,
    "data.initial_tasks": 24,  # N; 100 in the paper
    "rollout.tasks_per_step": 8,  # 32 in the paper
    "rollout.group_size": 8,  # K
    "evolution.every": 5,  # F; 10 in the paper
    "evolution.freeze_last_steps": 5,
    "evolution.tasks": 8,
    "evaluation.tasks": 24,
}


def main(_: Sequence[str]) -> None:
    """Prints what happens in a run of SETTINGS, with the tiny Qwen3 of this repository."""
    config = configs.override(configs.load_file("configs/bfcl_tiny.py"), SETTINGS)
    successes, size = [], config.data.initial_tasks
    for step, groups, signals, new_tasks in run(config):
        outcomes, kinds = [t.outcome for g in groups for t in g.valid], Counter(s.kind for s in signals)
        reward, success = fmean(o.reward for o in outcomes), fmean(o.success for o in outcomes)
        found = ", ".join(f"{kinds[kind]} {kind}" for kind in SIGNAL_KINDS)
        print(f"step {step:2}  reward {reward:.2f}  success {success:.2f}  signals: {found}", flush=True)
        successes.append(success)
        size += len(new_tasks)
        if new_tasks:
            print(f"    D_t grows to {size} tasks. Three of the {len(new_tasks)} new ones:")
        for task in new_tasks[:3]:
            print(f"      for {task.lineage.signal} on {task.lineage.parent}: {task.turns[0].query:.90}")
    first, last = fmean(successes[:5]), fmean(successes[-5:])
    print(f"Success on D_t: {first:.2f} in the first five steps, {last:.2f} in the last five.")
    print("Read on: coevolve_jax/train.py is a whole run, coevolve_jax/strategies/coevolve.py the method.")


if __name__ == "__main__":
    app.run(main)  # which knows --help
