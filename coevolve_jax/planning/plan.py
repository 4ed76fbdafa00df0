"""Bytes per device of one update of a model on a machine, and of rollouts in the same process, from shapes alone.

Parameters, optimiser and gradients are exact: their shapes come from `jax.eval_shape`, their shards from the
rules of distributed/sharding.py. Activations and log-probabilities are arithmetic, which docs/notes/memory.md
explains and tests/planning/test_plan.py compares with the compiler's own account.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.losses import uses_kl
from coevolve_jax.grpo.optimizer import make_optimizer
from coevolve_jax.models import expert_all_to_all, hf_io
from coevolve_jax.models.paged import PAGE
from coevolve_jax.models.qwen import QwenConfig
from coevolve_jax.planning.topologies import GB, TOPOLOGIES, Topology
from coevolve_jax.rollout.native.store import COLUMNS, ladder, least_tokens, part_pages

# Of a device's memory; the rest is the runtime's, the collectives' and fragmentation. JAX takes 0.75 of a GPU's
# unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise; the documented commands set it to this share.
USABLE = 0.9
PUBLISHED = Path(__file__).parents[2] / "configs" / "models"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes per device of a step, when most is alive: in a backward pass, in the optimiser's step, or in rollouts.

    parameters: the policy. reference: the frozen start, 0 without a KL term. optimizer: Adam's moments. gradients: the float32 sum
    over micro-batches, to which each layer's is added in place. activations: what every layer keeps for its backward pass. layer:
    the work of one layer and its weights, gathered. logprobs: the logits of one chunk, the unembedding and its
    gradient; they are gone before the backward pass reaches the layers, so only the larger of the two counts.

    With learner.optimizer_offload the optimizer is next to nothing, host: what of its host's memory it takes for each device,
    and in_flight: what the optimiser's step has of that on the device at one time, before and after.

    engine: the weights that an in-process engine computes with, where they are not the policy's own. cache: of its conversations,
    which is given back before an update; not where rollouts run ahead, so beside it.
    """

    parameters: int
    reference: int
    optimizer: int
    gradients: int
    activations: int
    layer: int
    logprobs: int
    host: int = 0
    in_flight: int = 0
    engine: int = 0
    cache: int = 0
    ahead: bool = False

    @property
    def kept(self) -> int:
        """All the time."""
        return self.parameters + self.reference + self.optimizer + self.engine

    @property
    def update(self) -> int:
        # A compiler may copy the moments before it writes them, as XLA does on CPUs.
        work = max(self.optimizer, self.in_flight, self.activations + max(self.layer, self.logprobs))
        return self.kept + self.gradients + work

    @property
    def rollouts(self) -> int:
        """While the cache is there."""
        return self.cache + (self.update if self.ahead else self.kept)

    @property
    def total(self) -> int:
        return max(self.update, self.rollouts)

    def fits(self, topology: Topology) -> bool:
        return self.total <= USABLE * topology.memory


def load_model(name: str) -> QwenConfig:
    """The architecture of a Hugging Face folder, or of a published model in configs/models by its name."""
    for path in (Path(name) / "config.json", PUBLISHED / f"{Path(name).name}.json"):
        if path.is_file():
            return QwenConfig.from_hf(json.loads(path.read_text()))
    known = ", ".join(sorted(path.stem for path in PUBLISHED.glob("*.json")))
    raise ValueError(f"config.model is {name!r}: neither a folder with a config.json nor one of {known}.")


def make_mesh(topology: Topology, sizes: Mapping[str, int]) -> AbstractMesh:
    """The config's mesh on the topology's devices: fsdp takes what the other axes leave.

    Raises ValueError where they do not divide the devices.
    """
    others = {axis: sizes.get(axis, 1) for axis in sharding.AXES if axis != "fsdp"}
    fsdp, rest = divmod(topology.devices, math.prod(others.values()))
    if rest or not fsdp:
        named = ", ".join(f"config.mesh.{axis}={size}" for axis, size in others.items())
        raise ValueError(f"{named} do not divide {topology.devices} devices: choose other sizes.")
    return AbstractMesh(tuple((others | {"fsdp": fsdp})[axis] for axis in sharding.AXES), sharding.AXES)


def plan(
    model: QwenConfig,
    learner: ConfigDict,
    mesh: Any,
    *,
    rows: int,
    length: int,
    run: ConfigDict | None = None,
) -> Plan:
    """learner: that section of a config. rows: of a micro-batch, on each device or group of devices that split them.
    length: tokens of a row. run: the whole config, where its engine is to be counted. Raises ValueError where the mesh does not
    divide a parameter, and for adapters."""
    if learner.lora_rank:
        raise ValueError(
            f"config.learner.lora_rank is {learner.lora_rank}: adapters cannot be planned; set it to 0."
        )
    params = hf_io.abstract_params(model, jnp.dtype(learner.param_dtype))
    opt_state = jax.eval_shape(make_optimizer(learner).init, params)
    on_host = learner.optimizer_offload
    gradients = [jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)]
    if learner.param_dtype != "float32":  # of which the one at work is added as a whole
        gradients.append(params)
    reference = hf_io.abstract_params(model, jnp.dtype(learner.dtype)) if uses_kl(learner) else {}
    tokens = rows * length // sharding.context_parts(mesh)
    activations, work = _activations(model, learner, mesh, tokens)
    weights, cache = _in_process(run, model, mesh) if run and run.engine.name == "native" else (0, 0)
    return Plan(
        parameters=shard_bytes(mesh, params),
        reference=shard_bytes(mesh, reference),
        optimizer=0 if on_host else shard_bytes(mesh, opt_state),
        gradients=shard_bytes(mesh, gradients),
        activations=activations,
        layer=work
        + _gathered(params["layers"], learner, mesh)
        + _whole_rows(model, learner, mesh, rows * length),
        logprobs=_logprobs(model, learner, mesh, tokens),
        host=shard_bytes(mesh, opt_state) if on_host else 0,
        in_flight=_in_flight(mesh, params, learner) if on_host else 0,
        engine=weights,
        cache=cache,
        ahead=bool(cache and run and run.rollout.max_staleness),
    )


def check_fits(config: ConfigDict, model: QwenConfig, mesh: Any, memory: int | None) -> None:
    """Raises ValueError, with the smallest change that mends it, where the update, or rollouts in this process, would need more
    than `memory` bytes of a device, or where the engine's pages hold no conversation.

    None: not known, as of CPUs, where only pages are looked at; so with adapters, which are not planned.
    """
    if memory is not None and not config.learner.lora_rank:
        _check_memory(config, model, mesh, memory)
    if config.engine.name == "native" and (tokens := config.engine.cache_tokens):
        part_pages(tokens, _longest(config), _engine_parts(config, mesh))


def _check_memory(config: ConfigDict, model: QwenConfig, mesh: Any, memory: int) -> None:
    """As of `check_fits`, for a run that can be planned."""
    learner = config.learner
    rows = -(-learner.rows_per_microbatch // sharding.row_parts(mesh))
    size: Any = {"rows": rows, "length": learner.pack_length, "run": config}
    planned, there = plan(model, learner, mesh, **size), f"{memory / GB:.1f} GB are there"
    if planned.update > memory:
        raise ValueError(
            f"The update needs about {planned.update / GB:.1f} GB of each device, and {there}: "
            f"{smallest_change(model, learner, mesh, memory, **size)}."
        )
    if planned.total > memory:
        raise ValueError(
            f"Rollouts{' beside the update' * planned.ahead} need about {planned.total / GB:.1f} GB of each device, {planned.cache / GB:.1f} of them for at most "
            f"{_cached_tokens(config, 1):,} cached tokens, and {there}: {_smaller_cache(config, model, mesh, memory)}."
        )


def smallest_change(
    model: QwenConfig,
    learner: ConfigDict,
    mesh: Any,
    memory: float,
    *,
    rows: int,
    length: int,
    scale: float = 1.0,
    run: ConfigDict | None = None,
) -> str:
    """What to set so that the update takes at most `memory` bytes per device, as the end of a sentence.

    The first that is enough of: layers computed again, fewer rows per micro-batch, both, rows that are split over devices
    besides, moments in the host's memory with these, and all that but the moments on more devices. What changes the
    numbers, such as bfloat16 moments, is not among them. scale: of a compiler's figure to the plan's, by which plans are
    corrected. run: as of `plan`.
    """
    axes, remat, offload = dict(mesh.shape), bool(learner.remat), learner.optimizer_offload
    # Whether layers are computed again, whether moments are with the host, rows, times as many devices, times as many to a row.
    changes = [(True, offload, rows, 1, 1)] * (not remat)
    changes += [(remat, offload, fewer, 1, 1) for fewer in range(rows - 1, 0, -1)]
    split = [2**k for k in range(4)]
    lengths = (length, *learner.pack_length_buckets)
    changes += [(True, moments, 1, 1, parts) for moments in (offload, True) for parts in split]
    changes += [(True, offload, 1, 2**n, parts) for n in range(1, 9) for parts in split]
    for again, moments, fewer, times, parts in changes:
        fsdp, left = divmod(times * axes["fsdp"], parts)
        sizes = axes | {"fsdp": fsdp, "context": parts * axes["context"]}
        if left or (parts > 1 and any(n % (2 * sizes["context"]) for n in lengths)):
            continue
        changed = learner.copy_and_resolve_references()
        changed.remat, changed.optimizer_offload = again, moments
        try:
            larger: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
            planned = plan(model, changed, larger, rows=fewer, length=length, run=run)
        except ValueError:  # so many devices do not divide a parameter
            break
        if scale * planned.update <= memory:
            told = ["config.learner.remat=True"] * (again != remat)
            if fewer != rows or times > 1 or parts > 1:
                told.append(f"config.learner.rows_per_microbatch={fewer * sharding.row_parts(larger)}")
            if parts > 1:
                told.append(f"config.mesh.context={sizes['context']}")
            if times > 1 or parts > 1:
                told.append(f"config.mesh.fsdp={fsdp} ({larger.size} devices)")
            takes = f"{scale * planned.update / GB:.1f} GB by plan"
            if moments != offload:
                told.append("config.learner.optimizer_offload=True")
                takes += f", and {planned.host / GB:.1f} GB of the host's memory for each device"
            return f"set {' and '.join(told)} ({takes})"
    return "no number of such devices holds a row of this length: use devices with more memory"


def _in_process(run: ConfigDict, model: QwenConfig, mesh: Any) -> tuple[int, int]:
    """What the in-process engine has of a device: weights, and the cache when it is full, or grows to that."""
    engine, params = run.engine, hf_io.abstract_params(model, jnp.dtype(run.engine.dtype))
    own = engine.dtype != run.learner.param_dtype or bool(run.rollout.max_staleness)
    sharded = engine.sharded and mesh.size > 1
    parts = _engine_parts(run, mesh)
    whole = sum(math.prod(p.shape) for p in jax.tree.leaves(params)) * jnp.dtype(engine.dtype).itemsize
    weights = shard_bytes(mesh, params) if sharded else whole
    gathered = mesh.size > 1 and not sharded
    cache = _cached_tokens(run, parts) // parts * _token_bytes(run, model, mesh)
    if not engine.cache_tokens:  # rows get more columns, and the old ones are there until then
        cache += cache * sum(ladder(COLUMNS, _longest(run), 2)[-2:-1]) // _longest(run)
    return weights if own or gathered else 0, cache


def _token_bytes(run: ConfigDict, model: QwenConfig, mesh: Any) -> int:
    """Of a device's part of what the cache has of a token: keys and values of its heads, and experts where they are replayed."""
    heads = model.num_key_value_heads // (mesh.shape["tensor"] if run.engine.sharded else 1)
    keys = 2 * model.num_hidden_layers * heads * model.head_dim * jnp.dtype(run.engine.dtype).itemsize
    experts = 2 * len(model.sparse_layers) * model.num_experts_per_tok
    return keys + experts * bool(run.learner.replay_routing)


def _longest(run: ConfigDict) -> int:
    """The tokens that a conversation may have."""
    return run[_longest_section(run)].max_length


def _longest_section(run: ConfigDict) -> str:
    """Whose max_length that is: rollouts', or that of questions to the policy."""
    asks = configs.asks_policy(run) and run.explorer.max_length > run.rollout.max_length
    return "explorer" if asks else "rollout"


def _cached_tokens(run: ConfigDict, parts: int) -> int:
    """What the cache has, at most, when it lies in so many parts: pages, or rows of the longest conversation."""
    if tokens := run.engine.cache_tokens:
        return tokens // PAGE // parts * PAGE * parts
    return -(-run.engine.max_concurrency // parts) * parts * _longest(run)


def _engine_parts(run: ConfigDict, mesh: Any) -> int:
    """Into how many parts of the devices the in-process engine's cache goes."""
    return sharding.token_parts(mesh) if run.engine.sharded else 1


def _smaller_cache(run: ConfigDict, model: QwenConfig, mesh: Any, memory: int) -> str:
    """What to set so that the cache has room beside what is kept, as the end of a sentence: tokens in pages, a power of two, on
    all devices, or on more of them."""
    axes = dict(mesh.shape)
    own, before = run.engine.sharded, run.engine.cache_tokens
    spreads = model.num_key_value_heads % mesh.shape["tensor"] == 0
    wants = [(True, 1)] * (spreads and (mesh.size > 1 or own))
    wants += [(False, 1)] * (not own)
    wants += [(True, 2**n) for n in range(1, 9)] * spreads
    for sharded, times in wants:
        changed = run.copy_and_resolve_references()
        with changed.unlocked():  # it may be from before these options
            changed.engine.update(sharded=sharded, cache_tokens=before)
        larger: Any = AbstractMesh(tuple((axes | {"fsdp": times * axes["fsdp"]}).values()), tuple(axes))
        parts = sharding.token_parts(larger) if sharded else 1
        rows = -(-run.learner.rows_per_microbatch // sharding.row_parts(larger))
        size: Any = {"rows": rows, "length": run.learner.pack_length, "run": changed}
        try:
            without = plan(model, run.learner, larger, **size)
        except ValueError:  # so many devices do not divide a parameter
            break
        room = memory - without.rollouts + without.cache
        tokens = room // _token_bytes(changed, model, larger) * parts
        changed.engine.cache_tokens = min(1 << max(tokens, 1).bit_length() - 1, _cached_tokens(run, 1))
        if changed.engine.cache_tokens // parts // PAGE * PAGE >= _longest(run):
            tokens = changed.engine.cache_tokens
            told = [f"config.engine.cache_tokens={tokens}"] * (tokens != before)
            told += ["config.engine.sharded=True"] * (sharded != own)
            told += [f"config.mesh.fsdp={larger.shape['fsdp']} ({larger.size} devices)"] * (times > 1)
            total = plan(model, run.learner, larger, **size).rollouts
            return f"set {' and '.join(told)} ({total / GB:.1f} GB by plan)"
    return (
        f"no number of such devices holds a conversation of config.{_longest_section(run)}.max_length={_longest(run):,} tokens beside what the "
        "learner keeps: use devices with more memory"
    )


def shard_bytes(mesh: Any, tree: Any) -> int:
    """Bytes that each device holds of a tree of parameters or of optimiser state."""
    shardings = sharding.param_shardings(mesh, tree)
    size = lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(jax.tree.leaves(jax.tree.map(size, tree, shardings)))


def _in_flight(mesh: Any, params: Any, learner: ConfigDict) -> int:
    """Two moments, old and new, of one layer or of all that is in no layer."""
    size = lambda tree: shard_bytes(
        mesh, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(learner.moment_dtype)), tree)
    )
    layers = jax.tree.leaves(params["layers"])[0].shape[0]
    others = {name: leaf for name, leaf in params.items() if name != "layers"}
    return 2 * 2 * max(size(others), size({"layers": params["layers"]}) // layers)


def _gathered(layers: Any, learner: ConfigDict, mesh: Any) -> int:
    """The layer at work in the compute type, the next one on its way, the gradient before it is scattered."""
    tensor, expert = mesh.shape["tensor"], mesh.shape["expert"]
    whole = lambda p: (
        math.prod(p.shape[1:]) // (tensor * (expert if p.ndim == 4 else 1))
    )  # experts stay there
    layer = sum(whole(p) for p in jax.tree.leaves(layers))
    copies = 3 if math.prod(mesh.shape[axis] for axis in sharding.MATRICES) > 1 else 1
    return copies * layer * jnp.dtype(learner.dtype).itemsize


def _whole_rows(c: QwenConfig, learner: ConfigDict, mesh: Any, tokens: int) -> int:
    """Keys and values of rows that are split over devices, and their gradients."""
    if sharding.context_parts(mesh) == 1:
        return 0
    width = c.num_key_value_heads * c.head_dim // mesh.shape["tensor"]
    return 4 * width * tokens * jnp.dtype(learner.dtype).itemsize


def _activations(c: QwenConfig, learner: ConfigDict, mesh: Any, tokens: int) -> tuple[int, int]:
    """What all layers keep from the forward to the backward pass, and what the backward pass of one takes."""
    tensor = mesh.shape["tensor"]
    stream = c.hidden_size
    heads = c.num_attention_heads * c.head_dim // tensor
    kv_heads = c.num_key_value_heads * c.head_dim // tensor
    size, exchanged = tokens * jnp.dtype(learner.dtype).itemsize, 0
    if c.sparse_layers:  # every token once per expert that it goes to, before and after
        chosen = c.num_experts_per_tok
        hidden, copies = chosen * c.moe_intermediate_size // tensor, 2 * chosen * stream
        if mesh.shape["expert"] > 1:  # in the rounds of the backward pass, and then no more of it is there
            exchanged = _exchanged(c, learner, mesh, tokens * chosen)
            hidden, copies = 0, 0
    else:
        hidden, copies = c.intermediate_size // tensor, 0
    # Layer input, both norms' outputs and the stream between; queries, keys and values before and after the
    # rotation, and the heads' output; gate, up and their product.
    kept = 4 * stream + 3 * heads + 3 * kv_heads + 3 * hidden + copies
    # The gradients of the MLP's three hidden arrays and of the stream, which norms take in float32.
    work = 3 * hidden + copies + 4 * stream
    if learner.remat:  # a layer's input is kept, the rest of it computed again
        return size * c.num_hidden_layers * stream, size * (kept + work) + exchanged
    return size * c.num_hidden_layers * kept, size * work + exchanged


def _exchanged(c: QwenConfig, learner: ConfigDict, mesh: Any, pairs: int) -> int:
    """A round of an exchange in the backward pass: tokens and gradients as they are sent and come, and an expert's three
    hidden arrays, with their gradients; in float32 what is added up, of tokens and of a device's experts."""
    devices, tensor = mesh.shape["expert"], mesh.shape["tensor"]
    hidden = c.moe_intermediate_size // tensor
    one_round = expert_all_to_all.room(pairs, devices) * (2 * 3 * hidden + 4 * c.hidden_size)
    experts = c.num_experts // devices * 3 * c.hidden_size * hidden
    sums = pairs // c.num_experts_per_tok * c.hidden_size + experts
    return one_round * jnp.dtype(learner.dtype).itemsize + 4 * sums


def _logprobs(c: QwenConfig, learner: ConfigDict, mesh: Any, tokens: int) -> int:
    """Logits, these below their peak and their exponentials in float32; the unembedding and its gradient."""
    tensor, shards = mesh.shape["tensor"], mesh.size // mesh.shape["tensor"]
    chunk = min(-(-learner.logprob_chunk // shards), tokens)
    table = c.vocab_size * c.hidden_size // tensor
    gathered = jnp.dtype(learner.dtype).itemsize + 4
    return 3 * chunk * (c.vocab_size // tensor) * 4 + table * gathered


def table(config: ConfigDict, topologies: Sequence[str], lengths: Sequence[int], rows: int) -> str:
    """A Markdown table: one line per topology and row length, in GB (10**9 bytes) per device; below it what GPUs
    ask for."""
    model, learner = load_model(config.model), config.learner
    count = sum(math.prod(p.shape) for p in jax.tree.leaves(hf_io.abstract_params(model)))
    names = [field.name for field in dataclasses.fields(Plan) if field.default is dataclasses.MISSING]
    names += ["engine", "cache"] * (config.engine.name == "native")
    lines = [
        f"{os.path.basename(config.model)}: {count:,} parameters, compute in {learner.dtype}, "
        f"{rows} row(s) per device, GB per device",
        "",
        "| topology | mesh | tokens per row | " + " | ".join(names) + " | total | of | fits |",
        "|---|---|" + "---:|" * (len(names) + 3) + "---|",
    ]
    notes: list[str] = []
    if any(TOPOLOGIES[name].platform == "gpu" for name in topologies):
        notes.append(
            f"A plan fits where its total is at most {USABLE:.0%} of the memory: on GPUs start the run with "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}, for JAX takes 75% by itself."
        )
    for name in topologies:
        topology = TOPOLOGIES[name]
        mesh = make_mesh(topology, config.mesh)
        axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        for length in lengths:
            p = plan(model, learner, mesh, rows=rows, length=length, run=config)
            cells = [f"{x / GB:.1f}" for x in (*(getattr(p, name) for name in names), p.total)]
            pages = p.cache and config.engine.cache_tokens
            least = least_tokens(_longest(config), _engine_parts(config, mesh)) if pages else 0
            fits = "yes" if p.fits(topology) and least <= _cached_tokens(config, 1) else "no"
            row = [name, axes, f"{length:,}", *cells, f"{topology.memory // GB}", fits]
            lines.append(f"| {' | '.join(row)} |")
        if least > _cached_tokens(config, 1):
            notes.append(
                f"{name}: the engine wants config.engine.cache_tokens={least} or more, so that each part holds a conversation."
            )
        if p.host:
            each = topology.devices // topology.hosts
            notes.append(f"{name}: the moments take {each * p.host / GB:.1f} GB of the memory of each host.")
    return "\n".join([*lines, *(line for note in notes for line in ("", note))])
