"""Bytes per device of one update of a model on a machine, and of rollouts in the same process.

Only shapes are needed. Parameters, optimiser and gradients are exact: their shapes come from
`jax.eval_shape`, their shards from the rules of distributed/sharding.py. Activations and log-probabilities
are arithmetic. docs/notes/memory.md explains it, and tests/planning/test_plan.py compares it with the
compiler's own account.
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
from coevolve_jax import shipped
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.losses import uses_kl
from coevolve_jax.grpo.optimizer import make_optimizer
from coevolve_jax.models import expert_all_to_all, hf_io
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.models.paged import PAGE
from coevolve_jax.planning.topologies import GB, TOPOLOGIES, Topology
from coevolve_jax.rollout.native.store import COLUMNS, ladder, least_tokens, part_pages

# Share of a device's memory; the rest goes to the runtime, collectives and fragmentation. JAX takes 0.75 of a
# GPU's unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise. The documented commands set it to this share.
USABLE = 0.9
PUBLISHED = shipped.ROOT / "configs" / "models"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes per device when a step needs most: in a backward pass, the optimiser's step, or rollouts.

    Attributes:
      parameters: the policy.
      reference: the frozen start, 0 without a KL term.
      optimizer: Adam's moments, 0 with learner.optimizer_offload.
      gradients: the float32 sum over micro-batches, to which each layer's is added in place.
      activations: what every layer keeps for its backward pass.
      layer: the work of one layer and its weights, gathered.
      logprobs: the logits of one chunk, the unembedding and its gradient. They are gone before the backward
        pass reaches the layers, so only the larger of layer and logprobs counts.
      host: moments in the host's memory, for each device.
      in_flight: the host's moments that the optimiser's step has on the device at one time, before and after.
      engine: the weights that an in-process engine computes with, where they are not the policy's own.
      cache: the cache of the engine's conversations. It is given back before an update, unless rollouts run
        ahead.
      ahead: rollouts run ahead, so the cache is there during an update.
      branch: parameters and moments of the copy that `Lab.branch` trains, if the strategy NEEDS it.
      influence: the float32 gradient of the goal that `Lab.influence` keeps, if the strategy NEEDS it. A
        score has the direction of an update, of the same size, beside the gradient.
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
    branch: int = 0
    influence: int = 0

    @property
    def kept(self) -> int:
        """Bytes that are held all the time, or while there is a branch."""
        return self.parameters + self.reference + self.optimizer + self.engine + self.branch + self.influence

    @property
    def update(self) -> int:
        # The optimiser's step writes moments in place on GPUs and TPUs. XLA's CPU backend copies them first.
        backward = self.activations + max(self.layer, self.logprobs)
        work = max(self.in_flight, self.influence, backward)
        return self.kept + self.gradients + work

    @property
    def rollouts(self) -> int:
        """Bytes while the cache is there."""
        return self.cache + (self.update if self.ahead else self.kept)

    @property
    def total(self) -> int:
        return max(self.update, self.rollouts)

    def fits(self, topology: Topology) -> bool:
        return self.total <= USABLE * topology.memory


def load_model(name: str) -> ModelConfig:
    """The architecture of a Hugging Face folder, or of a published model in configs/models by its name."""
    for path in (shipped.folder(name) / "config.json", PUBLISHED / f"{Path(name).name}.json"):
        if path.is_file():
            return ModelConfig.from_hf(json.loads(path.read_text()))
    known = ", ".join(sorted(path.stem for path in PUBLISHED.glob("*.json")))
    raise ValueError(f"config.model is {name!r}: neither a folder with a config.json nor one of {known}.")


def make_mesh(topology: Topology, sizes: Mapping[str, int], fsdp: int = 0) -> AbstractMesh:
    """The config's mesh on the topology's devices.

    fsdp: that axis; 0: what the other axes leave of the devices. A given one may leave devices unused.

    Raises ValueError where there are too few devices, or the other axes do not divide them.
    """
    others = {axis: sizes.get(axis, 1) for axis in sharding.AXES if axis != "fsdp"}
    parts = math.prod(others.values())
    if parts * fsdp > topology.devices or (not fsdp and topology.devices % parts):
        axes = others | ({"fsdp": fsdp} if fsdp else {})
        named = ", ".join(f"config.mesh.{axis}={size}" for axis, size in axes.items())
        wrong = f"need {parts * fsdp} of" if fsdp else "do not divide"
        raise ValueError(f"{named} {wrong} {topology.devices} devices: choose other sizes.")
    fsdp = fsdp or topology.devices // parts
    return AbstractMesh(tuple((others | {"fsdp": fsdp})[axis] for axis in sharding.AXES), sharding.AXES)


def plan(
    model: ModelConfig,
    learner: ConfigDict,
    mesh: Any,
    *,
    rows: int,
    length: int,
    run: ConfigDict | None = None,
) -> Plan:
    """Plans an update and, with `run`, the rollouts of its in-process engine.

    Args:
      learner: that section of a config.
      rows: rows of a micro-batch on each device, or on each group of devices that split them.
      length: tokens of a row.
      run: the whole config, where its engine and what its strategy NEEDS are to be counted.

    Raises:
      ValueError: the mesh does not divide a parameter, or there are adapters.
    """
    if learner.lora_rank:
        raise ValueError(
            f"config.learner.lora_rank is {learner.lora_rank}: adapters cannot be planned; set it to 0."
        )
    params = hf_io.abstract_params(model, jnp.dtype(learner.param_dtype))
    opt_state = jax.eval_shape(make_optimizer(learner, learner.learning_rate).init, params)
    on_host = learner.optimizer_offload
    gradients = [jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)]
    if learner.param_dtype != "float32":  # a micro-batch's own is added as a whole
        gradients.append(params)
    reference = hf_io.abstract_params(model, jnp.dtype(learner.dtype)) if uses_kl(learner) else {}
    tokens = rows * length // sharding.context_parts(mesh)
    activations, work = _activations(model, learner, mesh, tokens)
    weights, cache = _in_process(run, model, mesh) if run and run.engine.name == "native" else (0, 0)
    needs, moments = configs.needs(run) if run else frozenset(), shard_bytes(mesh, opt_state)
    copies = int("branch" in needs)
    return Plan(
        parameters=shard_bytes(mesh, params),
        reference=shard_bytes(mesh, reference),
        optimizer=0 if on_host else moments,
        gradients=shard_bytes(mesh, gradients),
        activations=activations,
        layer=work
        + _gathered(params["layers"], learner, mesh)
        + _whole_rows(model, learner, mesh, rows * length),
        logprobs=_logprobs(model, learner, mesh, tokens),
        host=(1 + copies) * moments if on_host else 0,
        in_flight=_in_flight(mesh, params, learner) if on_host else 0,
        engine=weights,
        cache=cache,
        ahead=bool(cache and run and run.rollout.max_staleness),
        branch=copies * (shard_bytes(mesh, params) + (0 if on_host else moments)),
        influence=shard_bytes(mesh, gradients[:1]) if "influence" in needs else 0,
    )


def check_fits(config: ConfigDict, model: ModelConfig, mesh: Any, memory: int | None) -> None:
    """Raises ValueError, with the smallest change that mends it, where a run does not fit its devices.

    It fits if the update, and rollouts in this process, need at most `memory` bytes of a device. The engine's
    pages must also hold at least one conversation.

    memory: None where it is not known, as on CPUs; then only pages are checked. Adapters are not planned, so
    with them only pages are checked too.
    """
    if memory is not None and not config.learner.lora_rank:
        _check_memory(config, model, mesh, memory)
    if config.engine.name == "native" and (tokens := config.engine.cache_tokens):
        part_pages(tokens, _longest(config), _engine_parts(config, mesh))


def check_context(config: ConfigDict, model: ModelConfig) -> None:
    """Raises ValueError where conversations may be longer than what the model reads."""
    section, most = _longest_section(config), model.max_position_embeddings
    if _longest(config) > most:
        scaled = ", or raise that number if its rope is scaled for more" if model.rope_scaling else ""
        raise ValueError(
            f"config.{section}.max_length is {_longest(config)}, and {config.model} reads {most} tokens "
            f"(max_position_embeddings in its config.json): lower it{scaled}."
        )


def _check_memory(config: ConfigDict, model: ModelConfig, mesh: Any, memory: int) -> None:
    """Checks the memory for `check_fits`, of a run that can be planned."""
    learner = config.learner
    rows = -(-learner.rows_per_microbatch // sharding.row_parts(mesh))
    size: Any = {"rows": rows, "length": learner.pack_length, "run": config}
    planned, there = plan(model, learner, mesh, **size), f"and {memory / GB:.1f} GB are there"
    if asked := planned.branch + planned.influence:
        there = f"{asked / GB:.1f} of them for strategy {config.strategy.name}, {there}"
    if planned.update > memory:
        raise ValueError(
            f"The update needs about {planned.update / GB:.1f} GB of each device, {there}: "
            f"{smallest_change(model, learner, mesh, memory, **size)}."
        )
    if planned.total > memory:
        raise ValueError(
            f"Rollouts{' beside the update' * planned.ahead} need about {planned.total / GB:.1f} GB of each "
            f"device, {planned.cache / GB:.1f} of them for at most {_cached_tokens(config, 1):,} cached "
            f"tokens, {there}: {_smaller_cache(config, model, mesh, memory)}."
        )


def smallest_change(
    model: ModelConfig,
    learner: ConfigDict,
    mesh: Any,
    memory: float,
    *,
    rows: int,
    length: int,
    scale: float = 1.0,
    run: ConfigDict | None = None,
) -> str:
    """Names settings with which the update takes at most `memory` bytes per device, as the end of a sentence.

    It tries these in order, and names the first that is enough:

      1. Layers computed again (remat).
      2. Fewer rows per micro-batch.
      3. Both.
      4. Rows split over devices as well.
      5. The same with moments in the host's memory.
      6. The same without that, on more devices.

    Changes of the numbers, such as bfloat16 moments, are not tried.

    scale: a compiler's figure divided by the plan's, which corrects plans. run: as for `plan`.
    """
    axes, remat, offload = dict(mesh.shape), bool(learner.remat), learner.optimizer_offload
    # Each change: remat, offload of moments, rows, factors for all devices and for those of a row.
    changes = [(True, offload, rows, 1, 1)] * (not remat)
    changes += [(remat, offload, fewer, 1, 1) for fewer in range(rows - 1, 0, -1)]
    split = [2**k for k in range(4)]
    lengths = (length, *learner.pack_length_buckets)
    places = (offload,) if run and "influence" in configs.needs(run) else (offload, True)
    changes += [(True, moments, 1, 1, parts) for moments in places for parts in split]
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


def _in_process(run: ConfigDict, model: ModelConfig, mesh: Any) -> tuple[int, int]:
    """Bytes of a device that the in-process engine takes: (weights, cache).

    The cache counts when it is full, or while it grows to that.
    """
    engine, params = run.engine, hf_io.abstract_params(model, jnp.dtype(run.engine.dtype))
    own = engine.dtype != run.learner.param_dtype or bool(run.rollout.max_staleness)
    sharded = engine.sharded and mesh.size > 1
    parts = _engine_parts(run, mesh)
    whole = sum(math.prod(p.shape) for p in jax.tree.leaves(params)) * jnp.dtype(engine.dtype).itemsize
    weights = shard_bytes(mesh, params) if sharded else whole
    gathered = mesh.size > 1 and not sharded
    cache = _cached_tokens(run, parts) // parts * _token_bytes(run, model, mesh)
    if not engine.cache_tokens:  # while rows get more columns, the old cache is still there
        cache += cache * sum(ladder(COLUMNS, _longest(run), 2)[-2:-1]) // _longest(run)
    return weights if own or gathered else 0, cache


def _token_bytes(run: ConfigDict, model: ModelConfig, mesh: Any) -> int:
    """Bytes of a device for a cached token: keys and values of its heads, and experts for replay."""
    heads = model.num_key_value_heads // (mesh.shape["tensor"] if run.engine.sharded else 1)
    keys = 2 * model.num_hidden_layers * heads * model.head_dim * jnp.dtype(run.engine.dtype).itemsize
    experts = 2 * len(model.sparse_layers) * model.num_experts_per_tok
    return keys + experts * bool(run.learner.replay_routing)


def _longest(run: ConfigDict) -> int:
    """The most tokens that a conversation may have."""
    return run[_longest_section(run)].max_length


def _longest_section(run: ConfigDict) -> str:
    """The section whose max_length that is. The explorer's counts where it asks the policy."""
    sections = ("rollout", "evaluation", *(["explorer"] if configs.asks_policy(run) else []))
    return max(sections, key=lambda section: run[section].max_length)


def _cached_tokens(run: ConfigDict, parts: int) -> int:
    """The most tokens that the cache has, in so many parts: pages, or rows of the longest conversation."""
    if tokens := run.engine.cache_tokens:
        return tokens // PAGE // parts * PAGE * parts
    return -(-run.engine.max_concurrency // parts) * parts * _longest(run)


def _engine_parts(run: ConfigDict, mesh: Any) -> int:
    """The number of parts of the devices that the in-process engine's cache is divided over."""
    return sharding.token_parts(mesh) if run.engine.sharded else 1


def _smaller_cache(run: ConfigDict, model: ModelConfig, mesh: Any, memory: int) -> str:
    """Names settings with which the cache fits beside what is kept, as the end of a sentence.

    They set a power of two of tokens in pages, and the devices: one, all, or more of them.
    """
    axes = dict(mesh.shape)
    own, before = run.engine.sharded, run.engine.cache_tokens
    spreads = model.num_key_value_heads % mesh.shape["tensor"] == 0
    wants = [(True, 1)] * (spreads and (mesh.size > 1 or own))
    wants += [(False, 1)] * (not own)
    wants += [(True, 2**n) for n in range(1, 9)] * spreads
    for sharded, times in wants:
        changed = run.copy_and_resolve_references()
        with changed.unlocked():  # the config may be older than these options
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
        f"no number of such devices holds a conversation of config.{_longest_section(run)}.max_length="
        f"{_longest(run):,} tokens beside what the learner keeps: use devices with more memory"
    )


def shard_bytes(mesh: Any, tree: Any) -> int:
    """Bytes that each device holds of a tree of parameters or of optimiser state."""
    shardings = sharding.param_shardings(mesh, tree)
    size = lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(jax.tree.leaves(jax.tree.map(size, tree, shardings)))


def _in_flight(mesh: Any, params: Any, learner: ConfigDict) -> int:
    """Bytes of two moments, old and new, of one layer or of all that is in no layer."""
    size = lambda tree: shard_bytes(
        mesh, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(learner.moment_dtype)), tree)
    )
    layers = jax.tree.leaves(params["layers"])[0].shape[0]
    others = {name: leaf for name, leaf in params.items() if name != "layers"}
    return 2 * 2 * max(size(others), size({"layers": params["layers"]}) // layers)


def _gathered(layers: Any, learner: ConfigDict, mesh: Any) -> int:
    """Bytes of gathered layers in the compute type.

    They are the layer at work, the next one on its way, and the gradient before it is scattered.
    """
    tensor, expert = mesh.shape["tensor"], mesh.shape["expert"]
    # Experts stay on their devices.
    whole = lambda p: math.prod(p.shape[1:]) // (tensor * (expert if p.ndim == 4 else 1))
    layer = sum(whole(p) for p in jax.tree.leaves(layers))
    copies = 3 if math.prod(mesh.shape[axis] for axis in sharding.MATRICES) > 1 else 1
    return copies * layer * jnp.dtype(learner.dtype).itemsize


def _whole_rows(c: ModelConfig, learner: ConfigDict, mesh: Any, tokens: int) -> int:
    """Bytes of gathered keys and values, and their gradients, of rows that are split over devices."""
    if sharding.context_parts(mesh) == 1:
        return 0
    width = c.num_key_value_heads * c.head_dim // mesh.shape["tensor"]
    return 4 * width * tokens * jnp.dtype(learner.dtype).itemsize


def _activations(c: ModelConfig, learner: ConfigDict, mesh: Any, tokens: int) -> tuple[int, int]:
    """Bytes that all layers keep from the forward to the backward pass, and bytes that one layer's takes."""
    tensor = mesh.shape["tensor"]
    stream = c.hidden_size
    heads = c.num_attention_heads * c.head_dim // tensor
    kv_heads = c.num_key_value_heads * c.head_dim // tensor
    size, exchanged = tokens * jnp.dtype(learner.dtype).itemsize, 0
    if c.sparse_layers:  # a copy of every token per expert that it goes to, before and after
        chosen = c.num_experts_per_tok
        hidden, copies = chosen * c.moe_intermediate_size // tensor, 2 * chosen * stream
        if mesh.shape["expert"] > 1:  # only the rounds of the exchange hold these, one round at a time
            exchanged = _exchanged(c, learner, mesh, tokens * chosen)
            hidden, copies = 0, 0
    else:
        hidden, copies = c.intermediate_size // tensor, 0
    # Layer input, both norms' outputs and the stream between; queries, keys and values before and after the
    # rotation, and the heads' output; gate, up and their product.
    kept = 4 * stream + 3 * heads + 3 * kv_heads + 3 * hidden + copies
    # The gradients of the MLP's three hidden arrays and of the stream, which norms take in float32.
    work = 3 * hidden + copies + 4 * stream
    if learner.remat:  # only a layer's input is kept; the backward pass computes the rest again
        return size * c.num_hidden_layers * stream, size * (kept + work) + exchanged
    return size * c.num_hidden_layers * kept, size * work + exchanged


def _exchanged(c: ModelConfig, learner: ConfigDict, mesh: Any, pairs: int) -> int:
    """Bytes of one round of an exchange in the backward pass.

    In the compute type: tokens and gradients, sent and received, and an expert's three hidden arrays with
    their gradients. In float32: the sums over tokens and over a device's experts.
    """
    devices, tensor = mesh.shape["expert"], mesh.shape["tensor"]
    hidden = c.moe_intermediate_size // tensor
    one_round = expert_all_to_all.room(pairs, devices) * (2 * 3 * hidden + 4 * c.hidden_size)
    experts = c.num_experts // devices * 3 * c.hidden_size * hidden
    sums = pairs // c.num_experts_per_tok * c.hidden_size + experts
    return one_round * jnp.dtype(learner.dtype).itemsize + 4 * sums


def _logprobs(c: ModelConfig, learner: ConfigDict, mesh: Any, tokens: int) -> int:
    """Bytes of the log-probabilities.

    These are logits, logits below their peak and their exponentials, in float32; the unembedding and its
    gradient.
    """
    tensor, shards = mesh.shape["tensor"], mesh.size // mesh.shape["tensor"]
    chunk = min(-(-learner.logprob_chunk // shards), tokens)
    table = c.vocab_size * c.hidden_size // tensor
    gathered = jnp.dtype(learner.dtype).itemsize + 4
    return 3 * chunk * (c.vocab_size // tensor) * 4 + table * gathered


def table(
    config: ConfigDict, topologies: Sequence[str], lengths: Sequence[int], rows: int, fsdp: int = 0
) -> str:
    """A Markdown table in GB (10**9 bytes) per device, with a line per topology and row length.

    fsdp: as in `make_mesh`. Notes below it name what GPUs need, pages that are too few, and the moments in
    the host's memory.
    """
    model, learner = load_model(config.model), config.learner
    count = sum(math.prod(p.shape) for p in jax.tree.leaves(hf_io.abstract_params(model)))
    names = [field.name for field in dataclasses.fields(Plan) if field.default is dataclasses.MISSING]
    names += ["engine", "cache"] * (config.engine.name == "native")
    names += [need for need in ("branch", "influence") if need in configs.needs(config)]
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
        mesh = make_mesh(topology, config.mesh, fsdp)
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
                f"{name}: the engine wants config.engine.cache_tokens={least} or more, so that each part "
                "holds a conversation."
            )
        if p.host:
            each = min(topology.devices // topology.hosts, mesh.size)
            notes.append(f"{name}: the moments take {each * p.host / GB:.1f} GB of the memory of each host.")
    return "\n".join([*lines, *(line for note in notes for line in ("", note))])
