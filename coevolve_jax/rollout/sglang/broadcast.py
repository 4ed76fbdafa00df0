"""Weights from this process to a server without a disk: a torch.distributed group of the two.

NCCL where the server's weights are on a GPU, gloo otherwise. JAX arrays become torch tensors by dlpack,
without a copy. Source: SGLang 0.5.23, model_executor/model_runner_components/weight_updater.py.
"""

from __future__ import annotations

import asyncio
import datetime
import socket
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import jax

from coevolve_jax.rollout.engine import EngineError
from coevolve_jax.rollout.sglang.weights import ArrayWeights

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise ImportError(
        "The transport 'distributed' of weights needs torch in the trainer's environment: "
        "install it, or set the transport to 'disk'."
    ) from error

BUCKET = 2**30  # bytes that are sent at once, and wait in the server's memory, and twice in ours

Call = Callable[[str, dict], Awaitable[dict]]  # (path, body) -> answer, of one server


class Group:
    """One per server, so that a server that dies holds up no other."""

    def __init__(self, group: Any, name: str):
        self._group: Any = group
        self._name = name

    @classmethod
    async def join(cls, call: Call, url: str, ranks: int, device: str, timeout: float) -> Group:
        """ranks: processes of the server, each with a part of the weights. Raises EngineError."""
        backend = "nccl" if device == "cuda" else "gloo"
        if not dist.is_backend_available(backend):
            raise EngineError(
                f"{url} holds its weights on a {device} device, but torch {torch.__version__} of the trainer "
                f"has no {backend}: install another build of torch, or set the transport to 'disk'."
            )
        name, size = f"coevolve-{uuid.uuid4().hex}", 1 + ranks
        delta = datetime.timedelta(seconds=timeout)
        store_type = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
        store = store_type("localhost", 0, size, is_master=True, wait_for_workers=False, timeout=delta)
        body = {
            "master_address": _own_address(url),
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": backend,
        }
        joining = asyncio.to_thread(_join, store, name, size, backend, delta)
        try:
            _, group = await asyncio.gather(call("/init_weights_update_group", body), joining)
        except EngineError:
            raise
        except (RuntimeError, OSError) as error:
            raise EngineError(f"{url} did not join a {backend} group with the trainer: {error}") from error
        return cls(group, name)

    async def send(self, call: Call, weights: ArrayWeights, version: str) -> None:
        """All tensors; the server's caches are dropped with the last. Raises EngineError."""
        tensors = weights.tensors()
        await call("/begin_weight_update", {})
        try:
            sent = 0
            for names, blocks in weights.buckets(BUCKET):
                sent += len(names)
                last = sent == len(tensors)
                body = {
                    "names": names,
                    "dtypes": [tensors[name].dtype for name in names],
                    "shapes": [tensors[name].shape for name in names],
                    "group_name": self._name,
                    "load_format": "flattened_bucket",
                    "flush_cache": last,
                }
                body |= {"weight_version": version} if last else {}
                sending = asyncio.to_thread(self._broadcast, blocks)
                await asyncio.gather(call("/update_weights_from_distributed", body), sending)
        except RuntimeError as error:
            self._group.abort()  # else a thread waits for a server that will not receive
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"The broadcast of version {version} broke off: {error}") from error
        finally:
            await call("/end_weight_update", {})

    async def close(self, call: Call) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
            await call("/destroy_weights_update_group", {"group_name": self._name})

    def _broadcast(self, blocks: Iterable[jax.Array]) -> None:
        """One array of bytes, whatever the tensors: small ones cost as much as large ones."""
        read = [torch.from_dlpack(block.block_until_ready()) for block in blocks]
        flat = torch.cat([block.flatten().view(torch.uint8) for block in read])
        del read
        on_gpu = dist.get_backend(self._group) == "nccl"
        dist.broadcast(flat.cuda() if on_gpu else flat, group_src=0, group=self._group)
        if on_gpu:  # it only orders the streams, and the array may be freed now
            torch.cuda.synchronize()


def _join(store: Any, name: str, size: int, backend: str, timeout: datetime.timedelta) -> Any:
    """A group that is not a part of torch's default one, which only these private parts of torch can make;
    the server makes its side in the same way."""
    c10d: Any = dist.distributed_c10d
    prefixed = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
    group, _ = c10d._new_process_group_helper(
        size, 0, [], backend, prefixed, group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _own_address(url: str) -> str:
    """The address of this machine as the server at `url` sees it."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=10) as connection:
        return connection.getsockname()[0]
