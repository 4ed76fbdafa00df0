"""Accounts of compiled programs against known work; and the list of commands for accelerators."""

import dataclasses
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from coevolve_jax.config import load_file
from coevolve_jax.planning import plan
from coevolve_jax.planning.aot import batches, devices, programs, report
from coevolve_jax.planning.aot import work as works
from coevolve_jax.planning.aot.hlo import Loop
from coevolve_jax.planning.topologies import GB, TOPOLOGIES
from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import hardware

pytestmark = pytest.mark.slow


def read(function, *shapes):
    """The work of the function's compiled program, by kinds of loops."""
    compiled = jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()
    return works.by_loop(compiled.as_text() or "", lambda path: path.rpartition("/")[2])


def test_products_count_in_the_loop_that_they_are_in():
    def program(x, w):
        layers = lambda x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)[0]
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 3, layers, x @ w)

    found = read(program, (32, 64), (64, 64))
    product = 2 * 32 * 64 * 64
    by_trips = {tuple(loop.trips for loop in loops): work.operations for loops, work in found.items()}
    assert {trips: n for trips, n in by_trips.items() if n} == {(): product, (None, 5): product}


def test_a_slice_of_a_large_array_moves_no_more_than_the_slice():
    def program(table, i):
        return jax.lax.fori_loop(
            0, 7, lambda i, x: x + jax.lax.dynamic_index_in_dim(table, i, keepdims=False), i
        )

    found = read(program, (1000, 256), (256,))
    inside = sum(work.bytes for loops, work in found.items() if loops)
    assert 3 * 256 * 4 <= inside < 100 * 256 * 4


TPU_TEXT = """HloModule jit_f, is_scheduled=true

%fused (p0: bf16[128,256], p1: bf16[256,512]) -> bf16[128,512] {
  %p0 = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c.1 = bf16[128,512]{1,0:T(8,128)(2,1)} convolution(%p0, %p1), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[128,64], b: bf16[256,512]) -> bf16[128,512] {
  %a = bf16[128,64]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(1)
  %ags = (bf16[128,64]{1,0:T(8,128)(2,1)}, bf16[128,256]{1,0:T(8,128)(2,1)}) all-gather-start(%a), \
dimensions={1}
  %agd = bf16[128,256]{1,0:T(8,128)(2,1)} all-gather-done(%ags)
  ROOT %f = bf16[128,512]{1,0:T(8,128)(2,1)} fusion(%agd, %b), kind=kOutput, calls=%fused
}
"""


def test_the_tpu_compilers_text_is_read():
    (found,) = works.by_loop(TPU_TEXT, lambda _: "").values()
    assert found.operations == 2 * 128 * 256 * 512
    assert found.collectives == {"all-gather": (1, 128 * 256 * 2)}
    assert found.bytes == 2 * (128 * 256 + 256 * 512 + 128 * 512)
    with pytest.raises(ValueError, match="no text of an HLO module.*'nothing'"):
        works.by_loop("nothing", lambda _: "")


CHAIN = """HloModule jit_h, is_scheduled=true

%begin (p0: bf16[16,32]) -> (bf16[16,32], bf16[64,32]) {
  %p0 = bf16[16,32]{1,0} parameter(0)
  %ag.1 = bf16[64,32]{1,0} all-gather(%p0), channel_id=1, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %cc.1 = (bf16[16,32]{1,0}, bf16[64,32]{1,0}) custom-call(%ag.1), \
custom_call_target="AsyncCollectiveStart"
}

%go_on (p1: bf16[16,32], p2: bf16[64,32]) -> (bf16[64,32], bf16[64,32]) {
  %p1 = bf16[16,32]{1,0} parameter(0)
  %p2 = bf16[64,32]{1,0} parameter(1)
  %two = bf16[64,32]{1,0} add(%p2, %p2)
  %ag.2 = bf16[64,32]{1,0} all-gather(%p1), channel_id=1, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %t = (bf16[64,32]{1,0}, bf16[64,32]{1,0}) tuple(%two, %ag.2)
}

ENTRY %main (a: bf16[16,32]) -> (bf16[64,32], bf16[64,32]) {
  %a = bf16[16,32]{1,0} parameter(0)
  %f.1 = (bf16[16,32]{1,0}, bf16[64,32]{1,0}) fusion(%a), kind=kCustom, calls=%begin
  %b = bf16[64,32]{1,0} get-tuple-element(%f.1), index=1
  ROOT %f.2 = (bf16[64,32]{1,0}, bf16[64,32]{1,0}) fusion(%a, %b), kind=kOutput, calls=%go_on
}
"""


def test_a_collective_that_goes_on_beside_other_work_counts_once():
    (found,) = works.by_loop(CHAIN, lambda _: "").values()
    assert found.collectives == {"all-gather": (1, 64 * 32 * 2)}


SENT = """HloModule jit_s, is_scheduled=true

ENTRY %main (a: f32[16,4]) -> f32[16,4] {{
  %a = f32[16,4]{{1,0}} parameter(0)
  ROOT %made = {made} {op}(%a), channel_id=1, {groups}, use_global_device_ids=true, \
frontend_attributes={{x="y"}}
}}
"""
GATHERED = "f32[64,4]{1,0}", "all-gather"
MOVED = "f32[16,4]{1,0}", "collective-permute"


@pytest.mark.parametrize(
    "what, groups, within, between",
    [
        (GATHERED, "replica_groups={{0,1,2,3},{4,5,6,7}}", 3 / 4 * 1024, 0),
        (GATHERED, "replica_groups={{0,2,4,6},{1,3,5,7}}", 0, 3 / 4 * 1024),
        (GATHERED, "replica_groups=[2,4]<=[8]", 3 / 4 * 1024, 0),
        (GATHERED, "replica_groups=[2,4]<=[4,2]T(1,0)", 0, 3 / 4 * 1024),
        (GATHERED, "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 3 / 4 * 1024, 0),
        (GATHERED, "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", 0, 3 / 4 * 1024),
        (GATHERED, "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", 3 / 4 * 1024, 0),
        (GATHERED, "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", 0, 1 / 2 * 1024),
        (GATHERED, "replica_groups={}", 0, 7 / 8 * 1024),
        (GATHERED, "replica_groups=of_a_kind_that_is_not_known", 0, 7 / 8 * 1024),
        (("f32[16,4]{1,0}", "all-reduce"), "replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2 / 2 * 256, 0),
        (MOVED, "source_target_pairs={{0,1},{1,0},{2,2}}", 256, 0),
        (MOVED, "source_target_pairs={{0,1},{3,4}}", 0, 256),
        (MOVED, "source_target_pairs={{0,0},{1,1}}", 0, 0),
    ],
)
def test_what_devices_send_goes_over_the_links_of_their_group(what, groups, within, between):
    """Eight devices, four of each host; covers every way in which the compilers write groups."""
    made, op = what
    (found,) = works.by_loop(
        SENT.format(made=made, op=op, groups=groups), lambda _: "", [0] * 4 + [1] * 4
    ).values()
    assert (found.within, found.between) == (within, between)
    twice = works.total([(2, found), (1, found)])
    assert (twice.within, twice.between) == (3 * within, 3 * between)


WINDOWED = """HloModule jit_g, is_scheduled=true

%body (p: (u32[], bf16[100,64], bf16[8,32,64])) -> (u32[], bf16[100,64], bf16[8,32,64]) {
  %p = (u32[]{:T(128)}, bf16[100,64]{1,0:T(8,128)(2,1)}, bf16[8,32,64]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[100,64]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %w = bf16[8,32,64]{2,1,0:T(8,128)(2,1)} get-tuple-element(%p), index=2
  %one = u32[]{:T(128)} constant(1)
  %x1 = bf16[100,1,64]{2,1,0:T(8,128)(2,1)} bitcast(%x)
  %c = bf16[100,8,32]{2,1,0:T(8,128)(2,1)} convolution(%x1, %w), window={size=8 pad=7_7 rhs_reversal=1}, \
dim_labels=b0f_0oi->b0f
  %cps = (bf16[8,32,64]{2,1,0}, bf16[8,32,64]{2,1,0}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%w), channel_id=1
  %cpd = bf16[8,32,64]{2,1,0:T(8,128)(2,1)} collective-permute-done(%cps)
  %n1 = u32[]{:T(128)} add(%i, %one)
  %n2 = u32[]{:T(128)} add(%n1, %one)
  ROOT %t = (u32[]{:T(128)}, bf16[100,64]{1,0}, bf16[8,32,64]{2,1,0}) tuple(%n2, %x, %cpd)
}

%cond (q: (u32[], bf16[100,64], bf16[8,32,64])) -> pred[] {
  %end = u32[]{:T(128)} constant(8)
  %q = (u32[]{:T(128)}, bf16[100,64]{1,0}, bf16[8,32,64]{2,1,0}) parameter(0)
  %j = u32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %less = pred[]{:T(512)} compare(%j, %end), direction=LT
}

ENTRY %main (s: (u32[], bf16[100,64], bf16[8,32,64])) -> (u32[], bf16[100,64], bf16[8,32,64]) {
  %s = (u32[]{:T(128)}, bf16[100,64]{1,0}, bf16[8,32,64]{2,1,0}) parameter(0)
  ROOT %loop = (u32[]{:T(128)}, bf16[100,64]{1,0}, bf16[8,32,64]{2,1,0}) while(%s), \
condition=%cond, body=%body, metadata={op_name="a/while"}
}
"""


def test_a_loop_that_the_tpu_compiler_made_and_unrolled_is_counted():
    """A product whose weights circulate among the devices; its heads are places of a padded window."""
    found = works.by_loop(WINDOWED, lambda path: path)
    inside = found[(Loop("a/while", 4),)]  # from 0 to 8 by twos
    assert inside.operations == 2 * 100 * 64 * 8 * 32
    count, size = inside.collectives["collective-permute"]
    assert count == 1 and size == 8 * 32 * 64 * 2


@pytest.fixture
def four():
    return load_file(ROOT / "configs" / "bfcl_qwen3_4b.py")


PROGRAM = """
from coevolve_jax.planning.aot import batches, programs
from coevolve_jax.config import load_file
from coevolve_jax.distributed import sharding
from coevolve_jax.planning.topologies import GB, Topology
from tests.support.grpo_cases import MODEL
config = load_file("configs/bfcl_tiny.py")
config.learner.update(dtype="float32", epochs=2, tis_cap=2.0, remat=True, logprob_chunk=64)
mesh = sharding.make_mesh(fsdp=8)
size = programs.Size(1, 64)
machine = Topology(8, GB, "cpu", "", 1e12, 1e11, 1e10)
load = batches.load(config, 8, *size, "cpu", None)
accounts = programs.compile_programs(config, MODEL, mesh, machine, size, 1.0, load)
assert list(accounts) == ["update", "score"]
update, score = accounts["update"], accounts["score"]
assert update.fits and update.peak == sum(update.parts.values()) <= GB
assert update.parts["optimizer"] > 2 * update.parts["parameters"] - 8 > 0 and update.parts["work"] > 0
assert set(update.loops) == {"once", "micro-batch", "layer", "vocabulary"}, update.loops.keys()
# The weights of a layer are whole in the layers' loop alone, each time; their gradients are added there.
layer = update.loops["layer"].collectives
assert layer["all-gather"][0] >= 2 and {"reduce-scatter", "all-reduce"} & set(layer), layer
# The unembedding is gathered and its gradient reduced once for a micro-batch, not for each block.
assert not any(account.loops["vocabulary"].collectives for account in accounts.values())
assert update.loops["micro-batch"].collectives["reduce-scatter"][0] == 1
# Products with a layer's matrices: forward twice, one of them again, and backward; \
and the reference's. Attention is beside.
weights = sum(a * b for a, b in ((16, 16), (16, 8), (16, 8), (16, 16), (16, 24), (16, 24), (24, 16)))
once = 2 * 64 * weights
assert 4 * once < update.loops["layer"].operations < 12 * once, update.loops["layer"].operations / once
assert score.loops["layer"].operations < update.loops["layer"].operations / 3
one, whole = programs.seconds(score, machine), programs.seconds(update, machine)
assert all(0 < one[part] < whole[part] for part in whole)
assert max(whole[part] for part in ("products", "memory", "links")) <= whole["overlapped"]
"""


def test_the_update_on_eight_devices_is_accounted_for():
    """The program runs in a process of its own: JAX fixes the number of devices at its start."""
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, cwd=ROOT, env=environment)


OPAQUE = """
import dataclasses, re
import jax
import jax.numpy as jnp
from coevolve_jax.planning.aot import devices, programs
from coevolve_jax.config import load_file
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.models import hf_io
from coevolve_jax.planning.topologies import TOPOLOGIES
from tests.support.grpo_cases import MODEL
learner = load_file("configs/bfcl_tiny.py").learner
learner.update(dtype="bfloat16", remat=True)
sizes = dict(num_hidden_layers=6, hidden_size=512, intermediate_size=1024, num_attention_heads=4, \
num_key_value_heads=4, head_dim=128)
model = dataclasses.replace(MODEL, **sizes)
mesh = sharding.make_mesh(fsdp=4, devices=devices.describe(TOPOLOGIES["v6e-4"]))
reference = hf_io.abstract_params(model, jnp.bfloat16)
made = Learner(model, learner, reference, temperature=1.0, mesh=mesh, seed=0)
text = made.lower(programs.abstract_batch((2, 4, 512), made.routing)).compile().as_text()
layers = {leaf.shape[1:] for leaf in jax.tree.leaves(reference["layers"]) if leaf.ndim == 3}
held = {f"6,{a // s},{b // t}" for a, b in layers for s, t in ((4, 1), (1, 4))}
found = re.findall(r"= bf16\\[([\\d,]+)\\]\\S* (convert|copy|fusion)\\(", text)
whole = [(shape, what) for shape, what in found if shape in held]
assert found and not whole, whole
"""


@pytest.mark.skipif(
    not devices.installed(), reason="the compilers for accelerators are not installed: run make aot"
)
def test_the_compiler_for_tpus_makes_no_copy_of_all_layers():
    """It made a copy in the computation's type before the loop over layers, for policy and reference."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    subprocess.run([sys.executable, "-c", OPAQUE], check=True, cwd=ROOT, env=environment)


def test_a_batch_is_loaded_as_the_run_packs_it(four):
    """Rows that one rollout fills, and rows of BFCL's lengths, whose tokens meet a seventh of the keys."""
    four.rollout.update(tasks_per_step=2, group_size=3)
    row = 25600
    load = lambda lengths, platform="gpu", rows=2: batches.load(four, 2, rows, row, platform, lengths)
    full = load(None)
    assert (full.rows, full.full, full.microbatches) == (6, 1, 2)
    blocks = 2 * row // 128 * (row // 128 + 1) // 2  # in both rows of a device
    assert full.pairs["forward"] == blocks * 128**2
    by_row = load(None, "tpu", 3).pairs["fwd"]  # on TPUs a kernel is called for each row
    assert by_row == row // 512 * (row // 512 + 1) // 2 * 512**2
    some = load(batches.Lengths(2600, 700), rows=1)
    assert some.rows == some.microbatches == 1 and some.blocks < full.blocks / 6
    tokens = some.full * row
    assert 5 * 3300 < tokens < 7 * 3300 and 3300 / 2 < some.pairs["forward"] / tokens < 12800 / 6
    four.learner.prefix_sharing = True
    shared = load(batches.Lengths(2600, 700), "tpu", 1)
    assert shared.full < some.full / 2 and shared.blocks == some.blocks
    assert load(None, "cpu").pairs == {}


def test_an_estimate_is_the_published_peaks():
    work = works.Work(2e12, 4e9, {}, {}, within=2e9, between=1e9)
    account = programs.Account({}, 0, 0, {"layer": work}, {"layer": 10})
    machine = dataclasses.replace(TOPOLOGIES["v6e-8"], operations=1e12, bandwidth=1e9, link=1e9)
    told = programs.seconds(account, machine)
    assert not account.fits  # an account without parts: the compiler refused the program
    assert told == {"products": 20, "memory": 40, "links": 30, "overlapped": 40}
    slower = dataclasses.replace(machine, hosts_link=5e8)  # traffic to another host takes twice as long
    assert programs.seconds(account, slower) == {"products": 20, "memory": 40, "links": 40, "overlapped": 40}


def test_the_weights_of_an_engine_in_the_process_count_beside_an_update():
    account = programs.Account({"parameters": 5, "work": 3}, 8, 10, {}, {})
    assert report._beside(account, 0) is account
    held = report._beside(account, 2)
    assert held.fits and held.peak == sum(held.parts.values()) == 10 and held.parts["engine"] == 2
    assert not report._beside(account, 3).fits
    refused = report._beside(dataclasses.replace(account, parts={}, peak=11), 2)
    assert not refused.parts and not refused.fits and refused.peak == 13


def test_what_does_not_fit_is_told_the_smallest_change_that_does(four):
    model = plan.load_model(four.model)
    mesh = plan.make_mesh(TOPOLOGIES["v6e-4"], {})
    memory = 27 * GB
    change = lambda memory, rows, learner=four.learner: plan.smallest_change(
        model, learner, mesh, memory, rows=rows, length=25600
    )
    total = lambda mesh, rows: plan.plan(model, four.learner, mesh, rows=rows, length=25600).total
    assert "config.learner.rows_per_microbatch=4 " in change(total(mesh, 1), 3)
    assert "config.learner.rows_per_microbatch=8 " in change(total(mesh, 2), 3)
    told = change(memory, 2)  # one row each does not fit either, but a half does
    assert "rows_per_microbatch=2 and config.mesh.context=2 and config.mesh.fsdp=2 (4 devices)" in told
    odd = four.learner.copy_and_resolve_references()
    odd.pack_length_buckets = (8_191,)  # no context axis splits it
    assert "mesh.context" not in change(memory, 2, odd)
    memory = 23 * GB  # no part of a row fits
    told = change(memory, 2)
    assert total(mesh, 1) > memory and told.startswith(
        "set config.learner.rows_per_microbatch=4 and config.learner.optimizer_offload=True ("
    )
    there = four.learner.copy_and_resolve_references()
    there.optimizer_offload = True
    planned = plan.plan(model, there, mesh, rows=1, length=25600)
    assert (
        f"({planned.total / GB:.1f} GB by plan, and {planned.host / GB:.1f} GB of the host's memory" in told
    )
    assert "fsdp=2 (4 devices) and config.learner.optimizer_offload=True" in change(planned.total - 1, 2)
    told = change(15 * GB, 2, there)  # moments that are on the host already do not help
    assert (
        "config.mesh.context=2 and config.mesh.fsdp=4 (8 devices) (" in told
        and "optimizer_offload" not in told
    )
    assert "devices with more memory" in change(GB, 2)
    kept = four.learner.copy_and_resolve_references()
    kept.remat = False
    assert change(total(mesh, 1), 1, kept).startswith("set config.learner.remat=True (")


def test_a_run_that_does_not_fit_is_refused_in_one_sentence(four):
    model, mesh = plan.load_model(four.model), plan.make_mesh(TOPOLOGIES["v6e-4"], {})
    pattern = (
        r"needs about 37\.\d GB of each device, and 35\.0 GB .*: "
        r"set config.learner.rows_per_microbatch=4 \(.*\)\.$"
    )
    with pytest.raises(ValueError, match=pattern):
        plan.check_fits(four, model, mesh, 35 * GB)
    plan.check_fits(four, model, mesh, 80 * GB)
    plan.check_fits(four, model, mesh, None)  # CPUs do not report their memory
    adapted = four.copy_and_resolve_references()
    adapted.learner.lora_rank = 8
    plan.check_fits(adapted, model, mesh, 1)


def test_what_cannot_be_compiled_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"are not in {tmp_path}: run .* -m pip install .*/aot.txt"):
        devices.describe(TOPOLOGIES["v6e-8"], tmp_path)
    with pytest.raises(ValueError, match="Nothing is compiled for this topology"):
        devices.describe(TOPOLOGIES["gpu-1x24"], tmp_path)


def test_every_command_for_accelerators_is_in_the_list():
    """Searches files for main.py with a published model's config, and for launch.sh."""
    shown = set()
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/*_qwen*.py")):
        text = path.read_text()
        main = re.search(r"main\.py --config=configs/(bfcl|appworld)_qwen", text)
        launch = re.search(r"^ {4}tpu_scripts/launch\.sh", text, re.M)
        if main or launch:
            shown.add(str(path.relative_to(ROOT)))
    planned = {"configs/bfcl_qwen2_5_0_5b.py"}  # one GPU of 24 GB, whose compiler has no description
    assert shown - planned == {command.place for command in hardware.COMMANDS}
    for command in hardware.COMMANDS:
        assert TOPOLOGIES[command.topology].compiler
        config = load_file(ROOT / "configs" / f"{command.config}.py")
        shown = (ROOT / command.place).read_text()
        length = f"--config.learner.pack_length={command.length} --config.mesh.context={command.context}"
        assert command.length == config.learner.pack_length or length in " ".join(shown.split())
    peaks = (ROOT / "docs" / "notes" / "memory.md").read_text()
    for command in hardware.COMMANDS:
        assert f"`{command.place}`" in peaks


@pytest.mark.skipif(
    not devices.installed(), reason="the compilers for accelerators are not installed: run make aot"
)
@pytest.mark.parametrize("command", [c for c in hardware.COMMANDS if c.quick], ids=lambda c: c.place)
def test_quick_commands_compile_and_fit(command, environ):
    run = subprocess.run(
        [sys.executable, *command.line()], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert "**update**: fits" in run.stdout and "Estimate, no measurement" in run.stdout
