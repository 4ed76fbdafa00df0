"""The parts of sglang-jax that the shim touches, around a real small model.

Attribute paths, parameter names, layouts and bad habits follow the source that docs/notes/tpu.md names. It
answers /generate by running the policy on the served leaves: a misplaced leaf gives wrong log-probabilities.
"""

from __future__ import annotations

import asyncio
import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import Decoder

LENGTH = 96  # tokens of the compiled forward pass


class Holder(nnx.Module):
    """Parameters by name, like LinearBase, RMSNorm or Embed."""

    def __init__(self, **params):
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))


class Block(nnx.Module):
    """Modules by name."""

    def __init__(self, **modules):
        for name, module in modules.items():
            setattr(self, name, module)


def make_model(folder, config, repeats=1):
    """The nnx model as models/qwen3.py and weight_utils.py make it. repeats: of key-value heads."""
    file = load_file(folder / "model.safetensors")

    def linear(name):
        weight = file[name + ".weight"].T
        if name.endswith(("k_proj", "v_proj")):
            heads = weight.reshape(weight.shape[0], -1, config.head_dim)
            weight = np.repeat(heads, repeats, axis=1).reshape(weight.shape[0], -1)
        return Holder(weight=jax.device_put(weight))

    norm = lambda name: Holder(scale=jnp.asarray(file[name + ".weight"]))

    def layer(i):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        attention = Block(
            **{n: linear(at + n) for n in ("q_proj", "k_proj", "v_proj", "o_proj")},
            q_norm=norm(at + "q_norm"),
            k_norm=norm(at + "k_norm"),
        )
        attention.rotary_emb = Block()
        attention.rotary_emb.cos_sin = nnx.Variable(jnp.ones((4, config.head_dim)))  # no weight
        return Block(
            self_attn=attention,
            mlp=Block(**{n: linear(mlp + n) for n in ("gate_proj", "up_proj", "down_proj")}),
            input_layernorm=norm(f"model.layers.{i}.input_layernorm"),
            post_attention_layernorm=norm(f"model.layers.{i}.post_attention_layernorm"),
        )

    root = Block(
        model=Block(
            embed_tokens=Holder(embedding=jnp.asarray(file["model.embed_tokens.weight"])),
            norm=norm("model.norm"),
        )
    )
    root.model.layers = nnx.data([layer(i) for i in range(config.num_hidden_layers)])
    if not config.tie_word_embeddings:
        root.lm_head = Holder(embedding=jnp.asarray(file["lm_head.weight"]))
    return root


class ModelRunner:
    def __init__(self, model):
        self.model = model
        self.graph, state = nnx.split(model)
        self.model_state_leaves, self.tree = jax.tree.flatten(state)

    def served(self):
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, self.model_state_leaves))


def params_of(model, config, repeats):
    """Our parameter tree, read from the nnx model."""

    def leaf(path, abstract):
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        get = lambda root, rest: get(getattr(root, rest[0]), rest[1:]) if rest else root
        if names[0] == "lm_head":
            return np.asarray(model.lm_head.embedding[...]).T
        if names[0] != "layers":
            return np.asarray(get(model.model, names)[...])
        kind = {"kernel": "weight"}.get(names[-1], names[-1])
        values = [np.asarray(get(layer, [*names[1:-1], kind])[...]) for layer in model.model.layers]
        if names[-2] in ("k_proj", "v_proj"):
            heads = [v.reshape(v.shape[0], -1, repeats, config.head_dim)[:, :, 0] for v in values]
            values = [h.reshape(h.shape[0], -1) for h in heads]
        return np.stack(values)

    return jax.tree_util.tree_map_with_path(leaf, hf_io.abstract_params(config))


@functools.cache
def forward(config):
    """params, tokens [1, LENGTH] -> log-probabilities [LENGTH, V]. Compiled once for all tests."""
    model = Decoder(config)
    return jax.jit(lambda params, tokens: jax.nn.log_softmax(model.apply({"params": params}, tokens)[0]))


class App:
    """The FastAPI app: /generate (greedy), /flush_cache, /abort_request, /health.

    stall: an event; requests hang until it is set.
    """

    def __init__(self, runner, config, repeats=1):
        self.runner, self.config, self.repeats = runner, config, repeats
        self.stack, self.calls, self.running, self.can_flush = self._answer, [], 0, True
        self.cache, self.by_rid, self.stall, self.aborted = {}, {}, None, []
        self._read = None  # leaves, and our parameters read from them

    def add_middleware(self, kind, **options):
        self.stack = kind(self.stack, **options)

    async def __call__(self, scope, receive, send):
        await self.stack(scope, receive, send)

    async def _answer(self, scope, receive, send):
        body, path = (await receive()).get("body") or b"{}", scope["path"]
        self.calls.append(path)
        status, answer = 200, {}
        if path == "/generate":
            answer = await self._generate(json.loads(body))
        elif path == "/flush_cache":
            status = 200 if self.can_flush and not self.running else 400
            if status == 200:
                self.cache.clear()
        elif path == "/abort_request":
            self.aborted.append(json.loads(body))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _generate(self, body):
        if isinstance(body["input_ids"][0], list):
            return [await self._one(ids, rid, body) for ids, rid in zip(body["input_ids"], body["rid"])]
        return await self._one(body["input_ids"], body["rid"], body)

    async def _one(self, prompt, rid, body):
        assert all(0 <= i < self.config.vocab_size for i in prompt), "the server dies"
        self.running += 1
        if self.stall:
            await self.stall.wait()
        count = body["sampling_params"]["max_new_tokens"]
        ids, logprobs = [], []
        for _ in range(count):
            row = self._logprobs(tuple(prompt + ids))
            ids.append(int(row.argmax()))
            logprobs.append([float(row[ids[-1]]), ids[-1], None])
            await asyncio.sleep(0)
        self.running -= 1
        old = self.by_rid.setdefault(rid, [])  # a reused rid mixes in old output
        old += ids
        many = logprobs[:10] + logprobs if count > 50 else logprobs  # duplicates
        return {
            "output_ids": list(old),
            "meta_info": {
                "id": rid,
                "prompt_tokens": len(prompt),
                "completion_tokens": count,
                "finish_reason": {"type": "length"},
                "output_token_logprobs": many,
            },
        }

    def _logprobs(self, ids):
        """Log-probabilities of the token after `ids`; cached until a flush, even across new weights."""
        if ids not in self.cache:
            leaves = self.runner.model_state_leaves
            if self._read is None or self._read[0] is not leaves:
                self._read = leaves, params_of(self.runner.served(), self.config, self.repeats)
            tokens = np.zeros((1, LENGTH), np.int32)
            tokens[0, : len(ids)] = ids
            self.cache[ids] = np.asarray(forward(self.config)(self._read[1], tokens))[len(ids) - 1]
        return self.cache[ids]


def http_server(folder, config, repeats=1):
    """The module sgl_jax.srt.entrypoints.http_server. `launch` returns instead of serving."""
    runner = ModelRunner(make_model(folder, config, repeats))
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner)))
    module = SimpleNamespace(app=App(runner, config, repeats), runner=runner, scheduler=scheduler)
    info = {"scheduler": scheduler}
    module._launch_subprocesses_or_threads = lambda server_args, port_args: (None, None, info)

    def launch(server_args):
        info = module._launch_subprocesses_or_threads(server_args=server_args, port_args=None)[2]
        info.pop("scheduler", None)  # as in sglang-jax

    module.launch = launch
    return module


async def request(app, path, body=None, method="POST"):
    """(status, JSON answer) of one HTTP request to an ASGI app."""
    sent = [{"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}]
    status, parts = None, []

    async def receive():
        return sent.pop() if sent else await asyncio.Event().wait()

    async def send(message):
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app({"type": "http", "method": method, "path": path, "headers": []}, receive, send)
    return status, json.loads(b"".join(parts) or b"null")
