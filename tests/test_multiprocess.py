"""Two processes train one policy and write one checkpoint and one model, which other meshes read."""

import contextlib
import json
import socket
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from test_sharding import QWEN3, batches, random_params, settings, start

from coevolve_jax import checkpoint
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.models import hf_io

STEPS = 3


def learner_on(mesh, folder):
    """The learner, and the policy's parameters read from the folder's checkpoint onto the mesh."""
    config, params = hf_io.load(Path(folder) / "start", mesh=mesh)
    return Learner(config, settings(config), params, temperature=1.0, mesh=mesh), params


def updates(learner, params):
    state, losses = learner.init(params), []
    for _, batch in zip(range(STEPS), batches(settings(QWEN3))):
        state, metrics = learner.update(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def one_of_two(folder, address, index):
    """What each process runs: two of the mesh's four devices are its own."""
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


def afterwards(folder):
    """Another process with eight devices: restores on one of them and on another mesh, and trains alone."""
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


def free_address():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    hf_io.save(folder / "start", QWEN3, random_params(QWEN3))
    address = free_address()
    processes = [start([__file__, "one_of_two", str(folder), address, str(i)], devices=2) for i in range(2)]
    try:
        assert [p.wait(timeout=300) for p in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return folder


def test_two_processes_write_one_checkpoint_and_one_model(folder):
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step_{STEPS:08d}"]
    index = json.loads((folder / "policy" / hf_io.INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoints", "policy", "start"]


def test_the_checkpoint_is_read_on_one_device_and_on_another_mesh(folder):
    assert start([__file__, "afterwards", str(folder)], devices=8).wait(timeout=300) == 0


if __name__ == "__main__":
    command, *args = sys.argv[1:]
    {"one_of_two": one_of_two, "afterwards": afterwards}[command](*args)
