"""Rollouts of the next steps: what they wait for, and how many run at once."""

import asyncio
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from coevolve_jax.loop.collect import Collector
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.task_pool import TaskPool
from tests.support import loop_fakes
from tests.support.families import lamps

TASKS, K, STEPS = 2, 2, 5
SEEDS = {
    step: rng_for(0, "rollout", step).integers(2**32, size=(TASKS, K)).ravel().tolist()
    for step in range(STEPS)
}
PATIENCE = 60.0  # seconds until a test that would hang fails


class Served:
    """An engine whose requests take time.

    begun: the step of each conversation, in the order of their starts. most: conversations at once.
    """

    batches = False

    def __init__(self, hold=lambda engine, seed: False):
        self.version, self.hold = 0, hold
        self.begun, self.known, self.under_way, self.most = [], set(), set(), 0

    async def generate(self, requests):
        (request,) = requests
        if request.conversation_id not in self.known:
            self.known.add(request.conversation_id)
            self.begun.append(next(step for step, seeds in SEEDS.items() if request.seed in seeds))
            self.under_way.add(request.conversation_id)
            self.most = max(self.most, len(self.under_way))
        async with asyncio.timeout(PATIENCE):
            while self.hold(self, request.seed):
                await asyncio.sleep(0.001)
        return [loop_fakes.write(loop_fakes.START, self.version, request.ids.tolist(), request.seed, 1.0)]

    def release(self, conversation_ids):
        self.under_way -= set(conversation_ids)


def collector(engine, staleness, concurrency, draw=lambda step, tasks, roll: roll(list(tasks), K)):
    """A collector, and its agent. draw: `collect` of its strategy."""
    config = ConfigDict(
        {"seed": 0, "steps": STEPS, "rollout": {"temperature": 1.0, "max_staleness": staleness}}
    )
    tasks = TaskPool()
    tasks.add(lamps.tasks("train")[:TASKS])
    strategy = SimpleNamespace(collect=draw)
    agent = Agent(
        engine, loop_fakes.CHAT, loop_fakes.Worlds(), lamps.tools, Limits(400, 32), concurrency,
        lamps.action_pattern
    )  # fmt: skip
    return Collector(config, strategy, agent, tasks), agent


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_slow_conversation_holds_up_its_own_step_alone(staleness):
    """The first conversation waits until those of the last step that may run have all begun."""
    all_begun = TASKS * K * (1 + staleness)
    engine = Served(lambda engine, seed: seed == SEEDS[0][0] and len(engine.begun) < all_begun)
    collect, agent = collector(engine, staleness, concurrency=3)
    for step in range(STEPS):
        collected = collect(step)
        assert 0 <= collected.usage.utilization["engine"] <= 1
        assert max(engine.begun) <= step + staleness, "older weights than the bound allows"
        engine.version = step + 1  # as after the push of this step's update
    assert engine.most == 3 and sorted(engine.begun) == sorted(list(SEEDS) * TASKS * K)
    agent.close()


def test_the_earlier_steps_conversations_come_first():
    engine = Served()
    collect, agent = collector(engine, staleness=2, concurrency=1)
    for step in range(STEPS):
        collect(step)
    together = TASKS * K * 3  # rollouts that begin with the first step
    assert max(engine.begun[:together]) == 2 and engine.begun[together:] == sorted(engine.begun[together:])
    agent.close()


def test_without_staleness_nothing_begins_before_its_step():
    engine = Served()
    collect, agent = collector(engine, staleness=0, concurrency=16)
    for step in range(STEPS):
        collect(step)
        assert engine.begun == sorted(list(range(step + 1)) * TASKS * K)
    agent.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_no_rollout_escapes_the_ledger_by_a_roll_that_is_kept(staleness):
    """The costs of a step are those of its `collect`."""
    rolls = {}

    def keeps(step, tasks, roll):
        rolls[step] = roll
        return roll(list(tasks), K)

    engine = Served()
    collect, agent = collector(engine, staleness, concurrency=16, draw=keeps)
    assert collect(0).costs["rollouts/policy"] == TASKS * K
    with pytest.raises(ValueError, match=r"`roll` of step 0 after `collect` .* use lab.probe in `evolve`"):
        rolls[0](lamps.tasks("train")[:TASKS], K)
    for step in range(1, STEPS):
        collect(step)
    assert sorted(engine.begun) == sorted(list(SEEDS) * TASKS * K)
    agent.close()
