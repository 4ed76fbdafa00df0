"""A user's own tools: worlds that share a state, chance of NumPy, odd states, rewards, errors and files."""

import dataclasses
import textwrap

import pytest

from coevolve_jax import config as configs
from coevolve_jax import envs
from coevolve_jax.envs.tools.environment import Instance, World
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.toolcheck import facts
from coevolve_jax.types import Call, Turn
from tests.support.paths import ROOT


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a file and returns its source."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text, name="own_world", kind="Own"):
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        return f"{path}:{kind}" if kind else str(path)

    return write


def worlds(source):
    """Returns scenarios made in this process: the sources below are harmless."""
    return envs.family.module("tools").scenarios("train", {"source": source})


def played(source, *calls):
    """Returns a new world of the source, and its answers to the calls."""
    world = Instance(source, {"seed": 1})
    return world, [world.call(call) for call in calls]


def graded(source, made, reference):
    """Returns the outcome of a task, with these reference calls, in whose world calls were made."""
    world = World()
    world.reset(dataclasses.replace(worlds(source)[0], turns=(Turn("Do it.", reference),)))
    for call in made:
        world.step(call)
    world.end_turn()
    return world.score()


# ---- Worlds that share a state -------------------------------------------------------------------

SHARED = '''
import own_store

class Own:
    def reset(self, seed=0):
        own_store.SUM[:] = [seed]

    def state(self):
        return list(own_store.SUM)

    def add(self, n: int) -> str:
        """Adds.

        Args:
            n: From 1 to 5.
        """
        own_store.SUM[0] += n
        return "added"
'''


def test_a_state_that_worlds_share_is_found_and_gives_no_reward(written):
    written("SUM = [0]", name="own_store")
    source, add = written(SHARED), Call("add", {"n": 2})
    assert [graded(source, made, (add,)).reason for made in ((), (add,), (add, add))] == ["state_shared"] * 3
    config = configs.load_file(ROOT / "configs" / "tools.py", f"source={source}")
    config.environment.workers = 1
    jobs = [(world, (add, add)) for world in worlds(source)[:2]]
    with ProcessPool("tools", workers=1) as pool:
        first, second = pool.execute(jobs), pool.execute(jobs)
        assert not facts._unlike(config, jobs, first, second)
        (unlike,) = facts._unlike(config, jobs, first, facts._side_by_side(pool, jobs))
    assert unlike.call == add and not unlike.alone


def test_numpy_draws_what_the_world_decides_whoever_draws_beside_it(written):
    source = written(
        '''
        import numpy as np

        class Own:
            def reset(self, seed=0):
                if seed:
                    np.random.seed(seed)
                self.first = int(np.random.randint(10**9))

            def roll(self) -> int:
                """Rolls."""
                return int(np.random.randint(10**9))
        '''
    )
    for seed in (0, 1):  # one that does not seed, and one that does
        a, b = Instance(source, {"seed": seed}), Instance(source, {"seed": seed})
        rolls = [[world.call(Call("roll", {})).text for world in (a, b)] for _ in range(3)]
        assert a.state() == b.state() and all(one == other for one, other in rolls)
        assert len({one for one, _ in rolls}) == 3
