"""Workers on a Ray cluster of three nodes on this machine, one of which is killed in mid-run."""

import dataclasses
import os
import sys
import threading
import time

import pytest
import ray
from ray.cluster_utils import Cluster

from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.types import Call, Task, Turn
from tests.envs.test_env_pool import ADD, ALL, BASE, HANG, SUM, alive
from tests.support.clock import cpu_seconds
from tests.support.families import fragile

pytestmark = pytest.mark.slow

SLOW = Call("power", {"base": 10, "exponent": 10**6})  # 0.1 to 0.3 s


NODE = {"num_cpus": 0, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def started():
    with pytest.MonkeyPatch.context() as patch:  # the nodes find the tests' families
        patch.setenv("PYTHONPATH", os.pathsep.join(os.path.abspath(p) for p in sys.path if p))
        made = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **NODE})
        try:
            made.connect()
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture
def cluster(started):
    """The cluster with three nodes, also after a test that killed one."""
    while len(started.list_all_nodes()) < 3:
        started.add_node(**NODE)
    return started


def kill(cluster, node):
    """Kills a node like a power loss: nothing on it shuts down in order."""
    (victim,) = (n for n in cluster.list_all_nodes() if n.node_id == node)
    cluster.remove_node(victim, allow_graceful=False)


def gone(pid):
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.nightly
def test_a_hang_on_a_node_costs_one_world_and_the_rest_is_as_on_this_machine(cluster):
    jobs = [(task, task.calls) for task in BASE[::20]]
    with (
        ProcessPool("bfcl", workers=1) as here,
        ProcessPool("bfcl", workers=1, timeout=5.0, backend="ray") as pool,
    ):
        assert len({worker.node for worker in pool._workers}) == 3
        assert pool.execute(jobs) == here.execute(jobs)
        env_ids = pool.reset([ALL] * 6)
        observations = pool.step(env_ids, [[ADD[0], HANG] if i == 1 else [ADD[0]] for i in range(6)])
        assert all(o.valid for each in observations for o in each)
        assert [o.fatal for o in observations[1]] == [False, True] and "timeout" in observations[1][1].text
        again = pool.step(env_ids, [[ADD[1]]] * 6)
        assert [o[0].fatal for o in again] == [i == 1 for i in range(6)]
        (outcome,) = pool.score(env_ids[1:2])
        assert outcome.valid and not outcome.reward and "processor time" in outcome.reason
        with pytest.raises(ValueError, match="'nowhere'"):
            pool.reset([dataclasses.replace(ALL, environment="nowhere")])
        pids = pool.pids
    assert all(map(gone, pids))


def test_a_call_that_kills_its_worker_on_a_node_is_the_callers_failure(cluster):
    tasks = [
        Task("t", "fragile", {"fails_in": op, "how": "crash"}, (Turn("do"),)) for op in ("step", "score")
    ]
    with ProcessPool("tests.support.families.fragile", workers=1, backend="ray") as pool:
        env_ids = pool.reset(tasks)
        observations = pool.step(env_ids, [[fragile.FRAGILE]] * 2)
        assert [o.fatal for (o,) in observations] == [True, False] and pool.restarts == 2
        assert [o.valid for o in pool.score(env_ids)] == [True, False]


def test_a_lost_node_costs_no_world(cluster):
    """Its worlds restart on another node and replay their calls; the pending call is repeated."""
    with ProcessPool("bfcl", workers=1, timeout=60.0, backend="ray") as pool:
        env_ids = pool.reset([SUM] * 6)
        pool.step(env_ids, [[ADD[0]]] * 6)
        pool.end_turn(env_ids)
        head = ray.get_runtime_context().get_node_id()
        victim, pid = next((w.node, w.pid) for w in pool._workers if w.node != head)
        before = cpu_seconds(pid)

        def kill_once_it_works():
            while cpu_seconds(pid) < before + 0.1:
                time.sleep(0.005)
            kill(cluster, victim)

        killer = threading.Thread(target=kill_once_it_works)
        killer.start()
        observations = pool.step(env_ids, [[ADD[1], SLOW, SLOW, SLOW]] * 6)
        killer.join()
        assert all(o.valid for each in observations for o in each)
        pool.end_turn(env_ids)
        assert [o.reward for o in pool.score(env_ids)] == [1.0] * 6
        assert pool.restarts >= 1 and victim not in {worker.node for worker in pool._workers}
        assert gone(pid)


def test_without_a_cluster_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def no_cluster(**_):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", no_cluster)
    with pytest.raises(ValueError, match="no Ray cluster runs here: start one"):
        ProcessPool("bfcl", backend="ray")
