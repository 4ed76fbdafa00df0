"""Two processes train one policy, write one checkpoint and one model for other meshes, and sample from it."""

import contextlib
import itertools
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from coevolve_jax import event_loop
from coevolve_jax.build import Policy
from coevolve_jax.config import load_file
from coevolve_jax.distributed import sharding
from coevolve_jax.distributed.gathering import on_one_device
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.loop import rendezvous
from coevolve_jax.loop.leader import follow, lead
from coevolve_jax.models import hf_io
from coevolve_jax.records import checkpoint
from coevolve_jax.rollout.engine import Request, Sampling
from coevolve_jax.rollout.native.engine import NativeEngine
from coevolve_jax.rollout.native.lockstep import LockstepEngine
from coevolve_jax.testing.engine import ask, moved
from tests.distributed.test_sharding import MODELS, QWEN3, batches, random_params, settings, start
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

STEPS = 3


def learner_on(mesh, folder):
    """The learner, and the policy's parameters from the folder, placed on the mesh."""
    config, params = hf_io.load(Path(folder) / "start", mesh=mesh)
    return Learner(config, settings(config), params, temperature=1.0, mesh=mesh), params


def updates(learner, params):
    state, losses = learner.init(params), []
    for _, batch in zip(range(STEPS), batches(settings(QWEN3))):
        state, metrics = learner.update(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def one_of_two(folder, address, index):
    """The program of each process, which owns two of the mesh's four devices."""
    sharding.start_processes(f"{address},2,{index}")
    assert jax.process_count() == 2 and len(jax.local_devices()) == 2
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    learner, params = learner_on(mesh, folder)
    kernel = params["layers"]["mlp"]["up_proj"]["kernel"]
    assert not kernel.is_fully_addressable
    assert sum(shard.data.size for shard in kernel.addressable_shards) == kernel.size // 2
    state, losses = updates(learner, params)
    # Only the first process's Python state may reach the disk.
    with contextlib.closing(checkpoint.Writer()) as writer:
        writer.save(Path(folder) / "checkpoints", STEPS, state, {"process": int(index), "losses": losses})
    hf_io.save(Path(folder) / "policy", QWEN3, state.params, max_shard_bytes=20_000)
    whole = on_one_device(state.params)
    assert whole["norm"]["scale"].is_fully_addressable
    np.savez(Path(folder) / f"whole_{index}.npz", **named(whole))
    sampled_together(Path(folder), mesh)


def named(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def learn_beside(folder, address, index):
    """The program of each process, with one device: updates beside sampling change no sample.

    Rollouts that run ahead of the update work like this.
    """
    sharding.start_processes(f"{address},2,{index}")
    learner, params = learner_on(sharding.make_mesh(fsdp=2), folder)
    policy, config = Policy(QWEN3, params, None, None), engine_config(**{"rollout.max_staleness": 1})
    config.mesh.tensor = 1
    requests = [ask(i, np.arange(5, 25), seed=i, stop=(), new=24) for i in range(5)]

    def sample(engine):
        completions = event_loop.run(engine.generate(requests))
        engine.release(range(5))
        return np.stack([c.ids for c in completions])

    with rendezvous.coordinated(config):
        if jax.process_index() > 0:
            return follow(learner, policy, config)
        leader = lead(learner, policy, config)
        with contextlib.closing(leader), contextlib.closing(leader.engine(folder)) as engine:
            want, state = sample(engine), leader.init(policy.params)
            with ThreadPoolExecutor(1) as thread:
                got = thread.submit(sample, engine)
                for batch in itertools.cycle(batches(settings(QWEN3))):
                    state, _ = leader.update(state, batch)
                    if got.done():
                        break
                np.testing.assert_array_equal(got.result(), want)


def engine_config(**changes):
    c = load_file(ROOT / "configs/bfcl_tiny.py")
    c.engine.update(max_concurrency=5, sharded=True)
    c.mesh.update(fsdp=2, tensor=2)
    c.rollout.update(max_length=160, max_new_tokens=40)
    c.update_from_flattened_dict(changes)
    return c


def sampled_together(folder, mesh):
    """Saves the leader's samples, computed by both processes, of a model with experts and their routing."""
    model, config = MODELS["qwen3_moe"], engine_config(**{"learner.replay_routing": True})
    place = lambda params: jax.device_put(params, sharding.param_shardings(mesh, params))
    params = random_params(model, seed=2)
    after = place(moved(params))
    unused = dict.fromkeys(("flops", "score", "update", "aim", "influence"))
    learner = SimpleNamespace(routing=(0, 0), scores=False, policy=lambda state, dtype: after, **unused)
    policy = Policy(model, place(params), None, None)
    with rendezvous.coordinated(config):
        if jax.process_index() > 0:
            return follow(learner, policy, config)
        leader = lead(learner, policy, config)
        with contextlib.closing(leader), contextlib.closing(leader.engine(folder)) as engine:
            assert isinstance(engine, LockstepEngine)
            np.savez(folder / "together.npz", **converse(engine, lambda: leader.policy(None)))
            check_what_is_kept(leader)


def converse(engine, updated, between=lambda turn: None):
    """Three turns of seven conversations in five slots; the last turn has other weights. Returns samples by
    name.

    Some conversations share a prompt. Each turn also asks a request that is refused, and releases one
    conversation, which comes back.
    """
    rng, said = np.random.default_rng(0), {}
    prompts = [rng.integers(5, 60, n).astype(np.int32) for n in (20, 20, 3, 34, 9, 9, 20)]
    prompts[1] = prompts[6] = prompts[0]
    refused = Request(9, prompts[0], Sampling(max_new_tokens=4, stop_ids=(7,), json_schema="{}"))
    for turn in range(3):
        asked = [
            ask(i, p, seed=i, new=12 + i, stop=(7,), temperature=0.5 + i / 7) for i, p in enumerate(prompts)
        ]
        for i, c in enumerate(event_loop.run(engine.generate(asked))):
            said |= {f"ids {turn} {i}": c.ids, f"logprobs {turn} {i}": c.logprobs}
            said |= {f"versions {turn} {i}": c.versions}
            said |= {} if c.routing is None else {f"routing {turn} {i}": c.routing}
            prompts[i] = np.concatenate([prompts[i], c.ids, rng.integers(5, 60, 3 * i)]).astype(np.int32)
        with pytest.raises(ValueError, match="does not constrain"):
            event_loop.run(engine.generate([refused]))
        between(turn)
        engine.release([turn])  # it comes back with all its tokens
        if turn == 1:
            engine.update_weights(updated(), 1)
    engine.release(range(7))
    assert engine.counts["decode_tokens"] == sum(len(x) for name, x in said.items() if name.startswith("ids"))
    return said


def check_what_is_kept(leader):
    """After all conversations there is no cache, and the service drops what all processes have received."""
    lockstep = leader._part._lockstep
    assert lockstep.engine._store.cache is None and not lockstep._requests
    assert len(rendezvous._service().key_value_dir_get("coevolve/turn/")) <= 2


def afterwards(folder):
    """The program of a process with eight devices: restores on one device and on a mesh, trains alone."""
    alone = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(sharding.AXES)), sharding.AXES)
    learner, params = learner_on(alone, folder)
    step, state, python = checkpoint.restore(Path(folder) / "checkpoints", learner.abstract_state)
    assert step == STEPS and python["process"] == 0
    want, losses = updates(learner, params)
    np.testing.assert_allclose(python["losses"], losses, rtol=1e-5, atol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, state, want)

    other, _ = learner_on(sharding.make_mesh(fsdp=4, tensor=2), folder)
    again = checkpoint.restore(Path(folder) / "checkpoints", other.abstract_state)[1]
    where = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
    assert where(again) == where(other.abstract_state)
    jax.tree.map(np.testing.assert_array_equal, again, state)

    config, policy = hf_io.load(Path(folder) / "policy")
    assert config == QWEN3
    jax.tree.map(np.testing.assert_array_equal, policy, state.params)
    for index in range(2):
        whole = np.load(Path(folder) / f"whole_{index}.npz")
        jax.tree.map(np.testing.assert_array_equal, dict(whole), named(state.params))

    model, params = MODELS["qwen3_moe"], random_params(MODELS["qwen3_moe"], seed=2)
    one = NativeEngine(model, params, slots=5, max_length=160, max_new_tokens=40, seed=0, record_routing=True)
    np.savez(Path(folder) / "one.npz", **converse(one, lambda: moved(params)))


def free_address():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    hf_io.save(folder / "start", QWEN3, random_params(QWEN3))
    both("one_of_two", folder, devices=2)
    return folder


def both(command, folder, devices):
    """Runs a command in two processes with this many devices each."""
    address = free_address()
    processes = [start([__file__, command, str(folder), address, str(i)], devices) for i in range(2)]
    try:
        assert [p.wait(timeout=300) for p in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


def test_two_processes_write_one_checkpoint_and_one_model(folder):
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step_{STEPS:08d}"]
    index = json.loads((folder / "policy" / hf_io.INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 1
    arrays = ["together.npz", "whole_0.npz", "whole_1.npz"]
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoints", "policy", "start", *arrays]


@pytest.fixture(scope="module")
def again(folder):
    """The folder, after another process has read it."""
    assert start([__file__, "afterwards", str(folder)], devices=8).wait(timeout=300) == 0
    return folder


@pytest.mark.nightly
def test_the_checkpoint_is_read_on_one_device_and_on_another_mesh(again):
    assert (again / "one.npz").exists()  # the program writes it last


@pytest.mark.nightly
def test_the_engine_of_two_processes_says_what_that_of_one_device_does(again):
    got, want = np.load(again / "together.npz"), np.load(again / "one.npz")
    assert set(got) == set(want) and len(got) == 3 * 7 * 4
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.nightly
def test_two_processes_sample_the_same_while_they_learn(tmp_path):
    hf_io.save(tmp_path / "start", QWEN3, random_params(QWEN3))
    both("learn_beside", tmp_path, devices=1)


if __name__ == "__main__":
    command, *args = sys.argv[1:]
    {"one_of_two": one_of_two, "learn_beside": learn_beside, "afterwards": afterwards}[command](*args)
