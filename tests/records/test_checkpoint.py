"""One step, one atomic save: exact bits, damage, kills, concurrent work."""

import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevolve_jax.records import checkpoint
from tests.support.checkpoints import latest_step
from tests.support.paths import ROOT

STATE = {"pool": [{"id": "größe", "score": 0.1 + 0.2}], "history": {}, "none": None}


class Moments(NamedTuple):
    mu: dict
    count: jax.Array


def arrays(step):
    """A deterministic function of the step, of every dtype in a run."""
    rng = np.random.default_rng(step)
    bits = rng.integers(0, 2**16, size=(7, 3), dtype=np.uint16)
    return {
        "params": {
            "w": jnp.asarray(rng.normal(size=(33, 5)), jnp.float32),
            "b": jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16),
        },
        "opt": (Moments({"w": jnp.full((4,), step, jnp.float32)}, jnp.int32(step)), ()),
        "key": jax.random.PRNGKey(step),
        "steps": rng.integers(0, 2**40, size=3),
    }


def bits(tree):
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def folders(directory):
    return sorted(p.name for p in directory.iterdir())


def save(directory, step, tree, state, keep=2):
    with closing(checkpoint.Writer()) as writer:
        writer.save(directory, step, tree, state, keep=keep)


def saved(directory, *steps, keep=2):
    with closing(checkpoint.Writer()) as writer:
        for step in steps:
            writer.save(directory, step, arrays(step), {**STATE, "step": step}, keep=keep)


def restored(directory, **kwargs):
    step, tree, state = checkpoint.restore(directory, arrays(0), **kwargs)
    assert bits(tree) == bits(arrays(step))
    assert state == {**STATE, "step": step}
    assert jax.tree.structure(tree) == jax.tree.structure(arrays(0))
    return step


def test_every_bit_comes_back(tmp_path):
    saved(tmp_path / "new" / "folder", 40)
    assert folders(tmp_path / "new" / "folder") == ["step_00000040"]
    assert restored(tmp_path / "new" / "folder") == 40


def test_nan_payloads_infinities_and_negative_zero_keep_their_bits(tmp_path):
    words = jnp.asarray([0x7FC00001, 0xFFC12345, 0x7F800000, 0x80000000, 1], jnp.uint32)
    tree = {"x": jax.lax.bitcast_convert_type(words, jnp.float32)}
    save(tmp_path, 0, tree, {})
    assert bits(checkpoint.restore(tmp_path, tree)[1]) == bits(tree)


def test_like_gives_the_kind_and_the_sharding(tmp_path):
    saved(tmp_path, 1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays(1))
    like["key"] = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=sharding)
    like["steps"] = np.zeros(3, np.int64)
    _, tree, _ = checkpoint.restore(tmp_path, like)
    assert bits(tree) == bits(arrays(1))
    assert tree["key"].sharding == sharding
    assert isinstance(tree["steps"], np.ndarray) and isinstance(tree["params"]["w"], jax.Array)


def test_nothing_saved_is_none(tmp_path):
    assert checkpoint.restore(tmp_path / "absent", arrays(0)) is None
    assert latest_step(tmp_path / "absent") is None


def test_the_newest_are_kept_and_leftovers_go(tmp_path):
    for cut_short in ("step_00000001", "step_00000099"):
        (tmp_path / cut_short).mkdir()
        (tmp_path / cut_short / "half").write_text("x")
    saved(tmp_path, 1, 2, 3, 12)
    assert folders(tmp_path) == ["step_00000003", "step_00000012"]
    assert latest_step(tmp_path) == 12
    saved(tmp_path, 13, keep=1)
    assert folders(tmp_path) == ["step_00000013"]


def truncate(folder):
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder):
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lose_a_file(folder):
    next(p for p in folder.rglob("d/*") if p.is_file()).unlink()


def lose(name):
    return lambda folder: (folder / name).unlink()


def garble_manifest(folder):
    (folder / "manifest.json").write_bytes(b"\xff\x00{")


def empty(folder):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


DAMAGES = [truncate, flip, lose_a_file, lose("state.json"), lose("manifest.json"), garble_manifest, empty]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_named_and_the_one_before_is_used(tmp_path, damage):
    saved(tmp_path, 1, 2)
    damage(tmp_path / "step_00000002")
    before = folders(tmp_path)
    warnings = []
    assert restored(tmp_path, warn=warnings.append) == 1
    assert len(warnings) == 1 and "step_00000002" in warnings[0] and "damaged" in warnings[0]
    assert folders(tmp_path) == before
    # The run resumes from step 1 and reaches step 2 again: the damaged folder makes way.
    saved(tmp_path, 2)
    assert restored(tmp_path, warn=warnings.append) == 2 and len(warnings) == 1


def test_a_damaged_later_step_is_not_counted_among_the_kept(tmp_path):
    saved(tmp_path, 1, 9)
    flip(tmp_path / "step_00000009")
    saved(tmp_path, 2, keep=1)
    assert folders(tmp_path) == ["step_00000002"]
    assert restored(tmp_path) == 2


def test_no_flipped_byte_of_the_manifest_goes_unnoticed(tmp_path):
    saved(tmp_path, 1)
    manifest = tmp_path / "step_00000001" / "manifest.json"
    good = manifest.read_bytes()
    for i in range(0, len(good), 7):
        bad = bytearray(good)
        bad[i] ^= 0x11
        manifest.write_bytes(bad)
        with pytest.raises(ValueError, match="No intact checkpoint"):
            checkpoint.restore(tmp_path, arrays(0), warn=lambda message: None)
    manifest.write_bytes(good)
    assert restored(tmp_path) == 1


def test_all_damaged_is_one_sentence_that_names_them(tmp_path):
    saved(tmp_path, 1, 2)
    flip(tmp_path / "step_00000001")
    truncate(tmp_path / "step_00000002")
    with pytest.raises(ValueError, match="step_00000002.*step_00000001.*another workdir") as error:
        checkpoint.restore(tmp_path, arrays(0), warn=lambda message: None)
    assert "\n" not in str(error.value)
    assert folders(tmp_path) == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize("step", [1, 2])
def test_an_intact_checkpoint_is_never_overwritten(tmp_path, step):
    saved(tmp_path, 1, 2)
    with pytest.raises(FileExistsError, match="intact"):
        save(tmp_path, step, arrays(7), {})
    assert restored(tmp_path) == 2


def change(**kwargs):
    return lambda like: {**like, **kwargs}


@pytest.mark.parametrize(
    "edit, word",
    [
        (change(extra=jnp.zeros(2)), "'extra' it holds nothing and the run needs float32"),
        (lambda like: {k: v for k, v in like.items() if k != "key"}, "'key' it holds uint32.* needs nothing"),
        (change(key=jnp.zeros(3, jnp.uint32)), r"'key' it holds uint32\[2\] and the run needs uint32\[3\]"),
        (change(key=jnp.zeros(2, jnp.int32)), "'key' it holds uint32.* needs int32"),
    ],
)
def test_another_structure_is_refused_in_one_sentence(tmp_path, edit, word):
    saved(tmp_path, 1)
    with pytest.raises(ValueError, match=word):
        checkpoint.restore(tmp_path, edit(arrays(1)))


@pytest.mark.parametrize(
    "step, tree, state, keep, error, word",
    [
        (-1, {"x": np.zeros(1)}, {}, 2, ValueError, "step -1"),
        (1, {"x": np.zeros(1)}, {}, 0, ValueError, "keep 0"),
        (1, {"x": 3.0}, {}, 2, ValueError, "'x' is 3.0"),
        (1, {"x": np.zeros(1)}, {"a": np.zeros(1)}, 2, TypeError, "JSON"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path, step, tree, state, keep, error, word):
    with pytest.raises(error, match=word):
        save(tmp_path, step, tree, state, keep=keep)
    assert folders(tmp_path) == []


LOOP = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.records.test_checkpoint import latest_step, saved
directory = Path({directory!r})
step = latest_step(directory) or 0
print("ready", flush=True)
while True:
    step += 1
    saved(directory, step)
    print(step, flush=True)
"""


@pytest.mark.slow
def test_kill_minus_nine_at_any_moment_leaves_a_complete_state(tmp_path):
    """Kills a process that does nothing but save; `restored` compares every bit with the saved step."""
    code = LOOP.format(root=str(ROOT), directory=str(tmp_path))
    delays = np.random.default_rng(0).uniform(0.0, 0.25, size=4)
    cut_short = 0
    for delay in delays:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        announced = int(process.stdout.readline())  # the first save warms up; the delay then hits later ones
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        announced = max([announced, *map(int, process.stdout.read().split())])
        process.wait()
        cut_short += not all((folder / "manifest.json").exists() for folder in tmp_path.iterdir())
        warnings = []
        # Every announced step is there; one more may be committed but not yet announced.
        assert restored(tmp_path, warn=warnings.append) in (announced, announced + 1)
        assert all("its save was cut short" in warning for warning in warnings)
    assert cut_short, "no kill fell into a save: the test has shown nothing"


# The last action before a kill: arrays written, all but the manifest, the commit, half of a deletion.
CUTS = {"_commit": 2, "_digests": 2, "_discard": 3, "epath.gpath.PosixGPath.rmtree": 3}
CUT = """
import os, pkgutil, signal, sys
sys.path.insert(0, {root!r})
from tests.records.test_checkpoint import saved
owner, _, name = "coevolve_jax.records.checkpoint.{at}".rpartition(".")
setattr(pkgutil.resolve_name(owner), name, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
saved({directory!r}, 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("at, step", CUTS.items())
def test_killed_on_the_way_the_old_or_the_new_state_is_complete(tmp_path, at, step):
    saved(tmp_path, 1, 2)
    code = CUT.format(root=str(ROOT), at=at, directory=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert latest_step(tmp_path) == step
    assert restored(tmp_path, warn=lambda message: None) == step
    saved(tmp_path, 4)
    assert len(folders(tmp_path)) == 2 and restored(tmp_path) == 4


@pytest.fixture
def gate(monkeypatch):
    """No checkpoint is committed before it is set; all arrays are written by then."""
    gate, commit = threading.Event(), checkpoint._commit
    monkeypatch.setattr(checkpoint, "_commit", lambda *arguments: gate.wait() and commit(*arguments))
    yield gate
    gate.set()


def test_its_owner_goes_on_and_the_next_save_waits(tmp_path, gate):
    with closing(checkpoint.Writer()) as writer:
        writer.save(tmp_path, 1, arrays(1), {**STATE, "step": 1})
        assert checkpoint.steps(tmp_path) == []
        second = threading.Thread(target=writer.save, args=(tmp_path, 2, arrays(2), {**STATE, "step": 2}))
        second.start()
        second.join(0.2)
        assert second.is_alive() and folders(tmp_path) == ["step_00000001"]
        gate.set()
        second.join()
    assert checkpoint.steps(tmp_path) == [1, 2] and restored(tmp_path) == 2


def test_a_state_that_is_donated_at_once_is_saved_as_it_was(tmp_path, gate):
    """The buffers are overwritten, again and again, before anything is committed."""
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
    state = {"w": jnp.arange(2**21, dtype=jnp.float32), "m": jnp.ones((512, 1024), jnp.bfloat16)}
    state = update(state)  # buffers of XLA's own
    wanted = bits(jax.tree.map(np.copy, state))
    with closing(checkpoint.Writer()) as writer:
        writer.save(tmp_path, 1, state, {})
        for _ in range(20):
            state = update(state)
        assert jax.block_until_ready(state)["w"].shape and checkpoint.steps(tmp_path) == []
        gate.set()
    assert bits(state) != wanted
    assert bits(checkpoint.restore(tmp_path, state)[1]) == wanted


def test_what_a_save_met_is_raised_by_the_next_and_at_the_end(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "_commit", full)
    writer = checkpoint.Writer()
    writer.save(tmp_path, 1, arrays(1), {})
    with pytest.raises(OSError, match="No space left"):
        writer.save(tmp_path, 2, arrays(2), {})
    writer.save(tmp_path, 2, arrays(2), {})
    with pytest.raises(OSError, match="No space left"):
        writer.close()


def test_a_later_state_keeps_the_arrays_and_every_byte_of_it_is_checked(tmp_path):
    with closing(checkpoint.Writer()) as writer:
        writer.save(tmp_path, 1, arrays(1), {**STATE, "step": 1})
        before = bits(checkpoint_of(tmp_path, writer)[1])
        for word in ("a", "b"):
            writer.save_state(tmp_path, 1, {"word": word})
            step, found, state = checkpoint_of(tmp_path, writer)
            assert (step, bits(found), state) == (1, before, {"word": word})
        with pytest.raises(FileNotFoundError):
            writer.save_state(tmp_path, 2, {})
        with pytest.raises(TypeError):
            writer.save_state(tmp_path, 1, {"word": object()})
        assert checkpoint_of(tmp_path, writer)[2] == {"word": "b"}
        own = {checkpoint.DIGEST: "of the run's config", checkpoint.INPUTS: {"config.model": "of its files"}}
        writer.save_state(tmp_path, 1, {"word": "b", **own})
    checkpoint.copy(tmp_path, 1, tmp_path / "copy")
    assert checkpoint.restore(tmp_path / "copy", arrays(0))[2] == {"word": "b"}
    assert checkpoint.restore(tmp_path, arrays(0))[2] == {"word": "b", **own}
    with closing(checkpoint.Writer()) as writer:
        writer.save_state(tmp_path, 1, {"word": "b"})
    manifest = tmp_path / "step_00000001" / "manifest.json"
    good = manifest.read_text()
    (manifest.parent / "manifest.json.tmp").write_text(good[:20])  # killed before the manifest was replaced
    assert checkpoint.restore(tmp_path, arrays(0))[2] == {"word": "b"}
    manifest.write_text(good.replace('\\"b\\"', '\\"c\\"'))
    assert manifest.read_text() != good
    with pytest.raises(ValueError, match="state.json is not as it was saved"):
        checkpoint.restore(tmp_path, arrays(0), warn=lambda message: None)


def checkpoint_of(folder, writer):
    writer.wait()
    return checkpoint.restore(folder, arrays(0))


def test_a_copy_is_a_checkpoint(tmp_path):
    saved(tmp_path / "one", 1, 2)
    checkpoint.copy(tmp_path / "one", 1, tmp_path / "other")
    assert restored(tmp_path / "other") == 1


def test_a_store_has_no_folder_below_the_working_one():
    assert str(checkpoint.absolute("gs://bucket/run")) == "gs://bucket/run"
    assert str(checkpoint.absolute("run")) == str(Path("run").absolute())
