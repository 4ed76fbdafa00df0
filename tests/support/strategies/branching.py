"""A strategy that uses every service of the learner, for tests: influence, then a branch."""

from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import evolves
from coevolve_jax.strategies.growth import draft
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.types import mixed

NEEDS = frozenset({"probe", "influence", "branch"})


class Branching(Static):
    def __init__(self, config, state=None):
        super().__init__(config, state)
        self.config, self.seen = config, list(state["seen"]) if state else []

    def evolve(self, step, lab):
        if not evolves(self.config, step):
            return None
        rng = rng_for(self.config.seed, "evolve", step)
        contexts = [unguided(s, f"draft/{step}/{i}") for i, s in enumerate(lab.scenarios[:4])]
        drafts, made = draft(lab, contexts, step=step, rng=rng)
        groups = lab.probe(list(drafts), 4, step)
        goal = [g for g in groups if g.mixed] or groups
        scores = lab.influence(goal, groups)
        best = max(range(len(groups)), key=lambda i: (scores[i], -i))
        branches = [
            lab.branch([g.task for g in groups], [g.task for g in goal], updates=2, batch=2, k=4, step=step)
            for _ in range(2)
        ]
        self.seen.append(
            {
                "scores": scores,
                "spread": [mixed(sum(g.rewards), len(g.rewards)) for g in groups],
                "before": [
                    [list(map(int, t.ids)) for g in b.before for t in g.trajectories] for b in branches
                ],
                "after": [[list(map(int, t.ids)) for g in b.after for t in g.trajectories] for b in branches],
            }
        )
        return made.adopting(lab.adopt([groups[best].task], kind="signal"), lab.tasks)

    def to_json(self):
        return {**super().to_json(), "seen": self.seen}


make = Branching
