"""LoRA adapters as folders of Hugging Face's package peft, both ways.

    adapter_config.json          rank, lora_alpha, the adapted modules, the base model
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight [rank, in], lora_B.weight [out, rank]

Here adapters are a tree as in grpo/lora.py: beside each adapted kernel lie `lora_a` [layers, in, rank] and
`lora_b` [layers, rank, out]. The policy is base + alpha / rank * (A B) in both forms. The base is the one
that they were trained on: the header of our file names the dtype in which it was read (BASE_DTYPE).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import safe_open

from coevolve_jax.models import hf_io
from coevolve_jax.models.config import ModelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_DTYPE = "base_dtype"
# Values of adapter_config.json without which A and B would mean something else.
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "alora_invocation_tokens": None,
    "layer_replication": None,
}
# Ways of peft to begin adapters that change the base's own weights too.
MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Adapters(NamedTuple):
    """Adapters as a folder holds them.

    base: the name or folder of the model that they adapt. base_dtype: the one in which it is to be read.
    """

    params: Any
    rank: int
    alpha: float
    base: str
    base_dtype: str = "float32"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def save(folder: str | os.PathLike, config: ModelConfig, adapters: Adapters) -> None:
    """Writes a folder that peft.PeftModel.from_pretrained loads. Files of that name are replaced.

    config: of the base. The parameters must lie whole on this process, as the learner's do.
    """
    folder, flat = Path(folder), flatten_dict(adapters.params, sep=".")
    tensors, modules = {}, {entry.path.removesuffix(".kernel"): _modules(entry) for entry in _kernels(config)}
    for path, stack in flat.items():  # "layers.mlp.up_proj.lora_a", [layers, in, rank]
        layer, _, leaf = path.rpartition(".")
        for name, matrix in zip(modules[layer], np.asarray(stack, np.float32), strict=True):
            tensors[f"{name}.lora_{leaf[-1].upper()}.weight"] = np.ascontiguousarray(matrix.T)
    told = {
        **PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "inference_mode": True,
        "target_modules": sorted({path.split(".")[-2] for path in flat}),
    }
    with hf_io.folder_beside(folder) as temporary:
        hf_io.save_tensors(tensors, temporary / WEIGHTS, **{BASE_DTYPE: adapters.base_dtype})
        hf_io.write_json(temporary / CONFIG, told)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (WEIGHTS, CONFIG):
            os.replace(temporary / name, folder / name)


def load(folder: str | os.PathLike, config: ModelConfig) -> Adapters:
    """Reads a folder that peft wrote, or `save`. Layers without adapters get zeros.

    Where the file names no dtype of the base, it is float32, which rounds no base.

    config: of the base. Raises ValueError, in one sentence, if the folder holds no LoRA adapters, if they do
    what grpo/lora.py does not, or if they do not fit the base.
    """
    folder = Path(folder)
    told = _read_config(folder)
    rank = told["r"]
    with contextlib.ExitStack() as stack:
        found = hf_io.open_file(folder / WEIGHTS, stack)
        tensors = {name: np.asarray(found[name][:], np.float32) for name in found}
        header = stack.enter_context(safe_open(folder / WEIGHTS, framework="np")).metadata() or {}
    if broken := sorted(name for name, t in tensors.items() if not np.isfinite(t).all()):
        raise ValueError(
            f"{folder / WEIGHTS} holds numbers in {broken[0]} that are not finite: take the adapters as they "
            "were before training diverged."
        )
    other = [name for name in tensors if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    if other:
        raise ValueError(_foreign(folder, min(other)))
    halves = Counter(name.rpartition(".lora_")[0] for name in tensors)
    if odd := [name for name, count in halves.items() if count != 2]:
        raise ValueError(f"{folder / WEIGHTS} has A or B of {odd[0]} alone: restore the file.")
    flat = {}
    for entry in _kernels(config):
        (width, out), path = entry.leaf.shape[1:], entry.path.split(".")[:-1]
        for letter, shape in (("A", (rank, width)), ("B", (out, rank))):
            names = [f"{name}.lora_{letter}.weight" for name in _modules(entry)]
            own = [tensors.pop(name, np.zeros(shape, np.float32)) for name in names]
            if wrong := [(name, t.shape) for name, t in zip(names, own) if t.shape != shape]:
                raise ValueError(
                    f"{wrong[0][0]} in {folder} has shape {wrong[0][1]} instead of {shape}: "
                    "take the adapters of this base, all of one rank."
                )
            flat[*path, f"lora_{letter.lower()}"] = jnp.asarray(np.stack(own).swapaxes(1, 2))
    if tensors:
        raise ValueError(_foreign(folder, min(tensors)))
    used = {path[:-1] for path, leaf in flat.items() if leaf.any()}
    if not used:
        raise ValueError(f"{folder / WEIGHTS} holds zeros alone: there is nothing to add to the base.")
    params = unflatten_dict({path: leaf for path, leaf in flat.items() if path[:-1] in used})
    alpha = told["lora_alpha"] * (math.sqrt(rank) if told.get("use_rslora") else 1)
    base_dtype = header.get(BASE_DTYPE)
    base_dtype = base_dtype if base_dtype in hf_io.STORED else "float32"
    return Adapters(params, rank, alpha, told["base_model_name_or_path"], base_dtype)


def _foreign(folder: Path, name: str) -> str:
    return (
        f"{folder} holds {name}, and the base has no such linear layer: take the adapters of this base, of "
        "layers between the embedding and the head."
    )


def base_of(folder: str | os.PathLike) -> str:
    """The name or folder of the base of an adapter folder. Raises ValueError where it names none."""
    if base := _read_config(Path(folder))["base_model_name_or_path"]:
        return base
    raise ValueError(f"{Path(folder) / CONFIG} names no base model: name it.")


def _kernels(config: ModelConfig) -> list[hf_io.Entry]:
    """The kernels that can have adapters: [layers, in, out]."""
    entries = hf_io.entries_of(config, hf_io.abstract_params(config))
    return [entry for entry in entries if entry.transposed and entry.leaf.ndim == 3]


def _modules(entry: hf_io.Entry) -> list[str]:
    """The names in peft of a kernel's modules, by layer."""
    return [PREFIX + name.removesuffix(".weight") for name in entry.names]


def _read_config(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG
    try:
        told = json.loads(file.read_text())
        rank, alpha, base = (told[key] for key in ("r", "lora_alpha", "base_model_name_or_path"))
    except OSError:
        raise ValueError(f"{folder} holds no adapters of peft, for it has no {CONFIG}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no config of LoRA adapters ({error!r}): save them again.") from None
    if not (type(rank) is int and rank > 0 and type(alpha) in (int, float) and 0 < alpha < math.inf):
        raise ValueError(
            f"{file} has r={rank!r} and lora_alpha={alpha!r}: both must be finite numbers above 0; save the "
            "adapters again."
        )
    for key, plain in PLAIN.items():
        if (value := told.get(key, plain)) != plain and (value or plain):
            raise ValueError(f"{file} has {key}={value!r}, which is not supported: only {plain!r} is.")
    begun = str(told.get("init_lora_weights", "")).lower()
    if begun.startswith(MOVES_BASE):
        raise ValueError(
            f"{file} has init_lora_weights={begun!r}, by which peft changes the base too: save them again in "
            "peft by save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    return {**told, "base_model_name_or_path": base or ""}
