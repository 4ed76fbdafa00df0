"""Measures whether the influence score of a task repeats: drafts are scored by two halves of their rollouts.

python benchmarks/influence.py --config=configs/bfcl_headroom.py --output=runs/influence.json

A score that chooses tasks by their gradient (INFUSER, arXiv 2606.09052) is the cosine between the gradient of
a task's group and that of development tasks. Here the base policy rolls every draft and every development
task out 16 times. The score of the first 8 is compared with that of the other 8, over all drafts: Spearman's
rho, and what Spearman and Brown make of it for all 16. The same is done for the share solved p and for
p (1 - p). A score that does not repeat chooses by noise.
"""

import datetime
import json
import os
import time
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import jax
import numpy as np
from absl import app, flags
from ml_collections import config_flags
from scipy.stats import spearmanr
from tqdm import tqdm

from coevolve_jax import build
from coevolve_jax.comparison.cells import machine
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.advantages import group_advantages
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.packing import pack_for
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.synthesis.choice import balanced
from coevolve_jax.synthesis.pipeline import SynthesisRequest
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, TrainingSample

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
_DRAFTS = flags.DEFINE_integer("drafts", 64, "Drafts to score.", lower_bound=8)
_DEV = flags.DEFINE_integer("dev", 24, "Development tasks, as many actions as can be.", lower_bound=2)
_HALF = flags.DEFINE_integer("half", 8, "Rollouts of a half.", lower_bound=2)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the figures.")


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's rho of a [n] and b [n]; None where either is constant."""
    if len(set(a.tolist())) < 2 or len(set(b.tolist())) < 2:
        return None
    return float(spearmanr(a, b).statistic)


def main(_) -> None:
    c, start = _CONFIG.value, time.perf_counter()
    policy, family, k = build.policy(c.model), build.family(c), _HALF.value
    with build.env_pool(c) as env_pool:
        agent = build.agent(c, policy, build.engine(c, policy), env_pool)
        synthesizer = build.synthesizer(c, build.explorer(c), env_pool, None, agent.fits)
        scenarios = build.scenarios(c)
        apart = scenarios[: len(scenarios) // 4]  # development tasks are of other scenarios than drafts

        def explored(among, wanted, kind):
            tasks = TaskPool(key=family.task_key)
            request = SynthesisRequest(wanted=wanted, kind=kind, step=0, rng=rng_for(c.seed, kind))
            synthesizer.synthesize_unguided(tasks, among, request)
            return list(tasks)

        drafts = explored(scenarios[len(apart) :], _DRAFTS.value, "draft")
        dev = balanced(explored(apart, 10 * _DEV.value, "dev"), _DEV.value, rng_for(c.seed, "dev choice"))
        groups = []
        for part in tqdm((drafts, dev), desc="rollouts", unit="set"):
            seeds = rng_for(c.seed, "influence", len(part)).integers(2**32, size=(len(part), 2 * k)).tolist()
            groups.append(agent.rollout_groups(part, seeds, c.rollout.temperature))
        agent.close()

    with c.unlocked():
        c.learner.kl_coef = 0.0
    mesh = sharding.make_mesh()
    learner = Learner(policy.config, c.learner, policy.params, temperature=1.0, mesh=mesh)
    program = jax.jit(lambda params, batch: learner.gradients(params, None, batch, None)[0])

    def gradient(group: Group) -> np.ndarray:
        """The gradient of a half group's GRPO loss [parameters]; zeros where nothing can be learned."""
        rewards = [t.outcome.reward for t in group.valid]
        samples = [
            TrainingSample(t, np.full(len(t.ids), a, np.float32))
            for t, a in zip(group.valid, group_advantages(rewards, estimator=c.learner.advantage))
        ]
        batch = pack_for(c.learner, samples, max_rows=k)
        leaves = jax.tree.leaves(program(policy.params, sharding.place_batch(mesh, batch, axis=1)))
        return np.concatenate([np.asarray(leaf, np.float32).ravel() for leaf in leaves])

    halves = lambda group: [
        Group(group.task, tuple(t for t in group.trajectories if t.rollout_index // k == half))
        for half in (0, 1)
    ]
    split = [[halves(g) for g in part] for part in groups]
    vectors = [
        np.array([[gradient(h) for h in pair] for pair in tqdm(part, desc="gradients", unit="task")])
        for part in split
    ]
    of_drafts, of_dev = vectors
    goal = of_dev.mean(0)  # [2, parameters]
    second = np.square(of_drafts.mean(1)).mean(0) + 1e-16  # stands for Adam's, over all drafts
    cosine = lambda a, b: float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30))
    scores = {
        "cosine": lambda g, d: cosine(g, d),
        "preconditioned": lambda g, d: cosine(g / np.sqrt(second), d),
    }
    solved = [[solve_rate(h) for h in pair] for pair in split[0]]
    columns = {
        name: np.array([[f(pair[h], goal[h]) for h in (0, 1)] for pair in of_drafts])
        for name, f in scores.items()
    }
    p = np.array([[np.nan if x is None else x for x in pair] for pair in solved])
    columns |= {"p": p, "p(1-p)": p * (1 - p)}
    weak = set(c.get("testbed", {}).get("weak_tools", ()))
    calls_weak = np.array([bool(weak & set(d.actions)) for d in drafts], float)
    live = (p.mean(1) > 0) & (p.mean(1) < 1)
    found = {
        "date": f"{datetime.date.today()}", "machine": machine(), "config": c.model, "seed": int(c.seed),
        "drafts": len(drafts), "dev": len(dev), "rollouts_of_a_half": k,
        "drafts_with_both_outcomes": int(live.sum()), "drafts_with_weak_tools": int(calls_weak.sum()),
        "cosine_of_the_goals": cosine(goal[0], goal[1]), "scores": {},
    }  # fmt: skip
    for name, values in columns.items():
        for among, rows in (("all", np.ones(len(live), bool)), ("both_outcomes", live)):
            rho = correlation(values[rows, 0], values[rows, 1])
            found["scores"][f"{name}/{among}"] = {
                "drafts": int(rows.sum()),
                "half_to_half": rho,
                "spearman_brown": None if rho is None or rho <= 0 else 2 * rho / (1 + rho),
                "with_weak_tool": correlation(values[rows].mean(1), calls_weak[rows]),
            }
    found["seconds"] = round(time.perf_counter() - start)
    text = json.dumps(found, indent=1)
    print(text)
    if _OUTPUT.value:
        Path(_OUTPUT.value).write_text(text + "\n")


if __name__ == "__main__":
    app.run(main)
