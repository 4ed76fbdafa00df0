"""Sends weights to a server without a disk, over a torch.distributed group of this process and the server.

The backend is NCCL where the server's weights are on a GPU, and gloo otherwise. dlpack turns JAX arrays into
torch tensors without a copy. Source: SGLang 0.5.23, model_executor/model_runner_components/weight_updater.py.
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

BUCKET = 2**30  # bytes sent at once: they are held once in the server's memory, and twice in ours

Call = Callable[[str, dict], Awaitable[dict]]  # (path, body) -> answer of one server


class Group:
    """A group with one server. Each server has its own, so that a dead one holds up no other."""

    def __init__(self, group: Any, name: str):
        self._group: Any = group
        self._name = name

    @classmethod
    async def join(cls, call: Call, url: str, ranks: int, device: str, timeout: float) -> Group:
        """Makes a group with the server at `url`.

        ranks: the server's processes, each with a part of the weights. EngineError where it does not join.
        """
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
        """Sends all tensors. The server drops its caches with the last one. Raises EngineError."""
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
            self._group.abort()  # otherwise a thread waits for ever for a server that will not receive
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
        """Broadcasts all tensors as one array of bytes: a small tensor would cost as much as a large one."""
        read = [torch.from_dlpack(block.block_until_ready()) for block in blocks]
        flat = torch.cat([block.flatten().view(torch.uint8) for block in read])
        del read
        on_gpu = dist.get_backend(self._group) == "nccl"
        dist.broadcast(flat.cuda() if on_gpu else flat, group_src=0, group=self._group)
        if on_gpu:  # NCCL's broadcast only orders the streams, and `flat` may be freed on return
            torch.cuda.synchronize()


def _join(store: Any, name: str, size: int, backend: str, timeout: datetime.timedelta) -> Any:
    """Makes a group that is no part of torch's default one. Only these private functions of torch can.

    The server makes its side in the same way.
    """
    c10d: Any = dist.distributed_c10d
    prefixed = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
    group, _ = c10d._new_process_group_helper(
        size, 0, [], backend, prefixed, group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _own_address(url: str) -> str:
    """Returns the address of this machine that the server at `url` can reach."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=10) as connection:
        return connection.getsockname()[0]
