"""Worker processes on the nodes of a running Ray cluster. One actor per node holds that node's processes.

The pool keeps the logs of the worlds (worker_pool.py). When a node is lost, each of its workers restarts on
another node, and the pool replays the worlds there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coevolve_jax.envs.worker_process import Gone, Lost, WorkerProcess

PARALLEL = 64  # concurrent requests to one node


class _Node:
    """An actor that holds the processes of one node, by number.

    `request` returns a failure beside the answers instead of raising it, so that the answers survive.
    """

    def __init__(self, *settings: Any):
        self._settings = settings
        self._processes: list[WorkerProcess] = []
        self._lock = threading.Lock()

    def start(self) -> tuple[int, int]:
        """Starts a process. Returns its number on this node and its process id.

        RuntimeError where it does not become ready. ValueError where interpreter or family is missing.
        """
        process = WorkerProcess(*self._settings)
        process.wait_until_ready()
        with self._lock:
            self._processes.append(process)
            return len(self._processes) - 1, process.pid

    def kill(self, number: int) -> None:
        self._processes[number].kill()

    def request(
        self, number: int, env_id: int, ops: Sequence[str], scale: float
    ) -> tuple[list, Gone | Lost | None]:
        """Returns the answers and the failure that cut them short (None where all are there)."""
        replies = []
        try:
            for reply in self._processes[number].request(env_id, ops, scale):
                replies.append(reply)
        except (Gone, Lost) as lost:
            return replies, lost
        return replies, None


class Cluster:
    """The Ray cluster that this process is connected to, or that `ray start` started on this machine."""

    def __init__(self, *settings: Any):
        """settings: the arguments of every WorkerProcess. ValueError where no cluster runs."""
        self._settings = settings
        self._actor: Any = ray.remote(_Node)
        self._lock = threading.Lock()
        self._nodes: dict[str, Any] = {}  # node -> actor
        self._started: dict[str, int] = {}  # node -> number of processes
        if not ray.is_initialized():
            try:
                ray.init(address="auto", logging_level=logging.ERROR)
            except ConnectionError:
                raise ValueError(
                    "config.environment.backend is 'ray', but no Ray cluster runs here: start one "
                    "(`ray start --head` here, `ray start --address=HOST:6379` on the other machines), "
                    "or set it to 'local'."
                ) from None

    def start(self) -> tuple[str, Any, tuple[int, int]]:
        """Starts a process on the living node that was given the fewest.

        Returns the node, its actor, and the result of `_Node.start`. RuntimeError where no node is left.
        """
        while alive := self.alive():
            with self._lock:
                node = min(alive, key=lambda node: self._started.get(node, 0))
                self._started[node] = self._started.get(node, 0) + 1
                if node not in self._nodes:
                    there = NodeAffinitySchedulingStrategy(node, soft=False)
                    actor = self._actor.options(
                        num_cpus=0, max_concurrency=PARALLEL, scheduling_strategy=there
                    )
                    self._nodes[node] = actor.remote(*self._settings)
                actor = self._nodes[node]
            try:
                return node, actor, ray.get(actor.start.remote())
            except exceptions.RayTaskError as error:
                raise error.cause from None
            except (exceptions.RayActorError, exceptions.ActorUnschedulableError):
                self.lose(node, actor)
        raise RuntimeError("The Ray cluster has no living node left: nothing can hold the worlds.")

    def alive(self) -> list[str]:
        return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])

    def lose(self, node: str, actor: Any) -> None:
        """Forgets the actor of a node, so that the next process there gets a new one."""
        with self._lock:
            if self._nodes.get(node) is actor:
                del self._nodes[node], self._started[node]


class RayWorker:
    """A worker process on some node of the cluster, with the interface of `WorkerProcess`."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self.lock = threading.Lock()
        self.busy, self.restarts = 0.0, 0
        self.live: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        self.node, self._actor, (self._number, self.pid) = self._cluster.start()

    def wait_until_ready(self) -> None:
        """Returns at once: `_Node.start` has waited."""

    def request(self, env_id: int, ops: Sequence[str], scale: float = 1.0) -> Iterator[list]:
        """Like `WorkerProcess.request`, but all answers come at once.

        A lost node raises Gone: no call is to blame.
        """
        try:
            replies, lost = ray.get(self._actor.request.remote(self._number, env_id, list(ops), scale))
        except exceptions.RayActorError:
            self._cluster.lose(self.node, self._actor)
            raise Gone(f"the node {self.node} is lost") from None
        yield from replies
        if lost is not None:
            raise lost

    def restart(self) -> None:
        self.kill()
        self.restarts += 1
        self.live = set()
        self._begin()

    def kill(self) -> None:
        try:
            ray.get(self._actor.kill.remote(self._number))
        except exceptions.RayError:
            pass  # it went with its node


def start(workers: int, *settings: Any) -> list[RayWorker]:
    """Starts `workers` processes for each node of the cluster. settings: arguments of every WorkerProcess."""
    cluster = Cluster(*settings)
    return [RayWorker(cluster) for _ in range(workers * len(cluster.alive()))]
