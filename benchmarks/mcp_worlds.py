"""Worlds of an MCP server per second: fresh servers, servers that wait, and one server for many worlds.

    python benchmarks/mcp_worlds.py
    python benchmarks/mcp_worlds.py --worlds=40 --config=configs/mcp_tiny.py

Each world is reset, gets one call, is fingerprinted and closed, by one process. `make mcp` sets the server of
the config up. The table also says how long a world takes to begin where the process was idle before.
"""

import argparse
import time

from coevolve_jax import build, envs
from coevolve_jax import config as configs
from coevolve_jax.envs.mcp import spares
from coevolve_jax.types import Call, Task

IDLE = 5.0  # seconds, more than a server takes to start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/mcp_tiny.py")
    parser.add_argument("--worlds", type=int, default=20)
    given = parser.parse_args()
    c = configs.load_file(given.config)
    family = build.family(c)
    scenario = build.scenarios(c)[0].scenario
    call = Call(next(t["function"]["name"] for t in family.tools(Task("", "mcp", scenario))), {})
    make = envs.family.module(c.environment.name).make
    print("                     worlds/s   seconds until a world begins after a pause")
    for name, waiting, reuse in (
        ("fresh servers", 0, False),
        ("servers that wait", 2, False),
        ("one server", 0, True),
    ):
        spares.SPARES = waiting
        task = Task("", c.environment.name, {**scenario, "reuse_server": reuse})
        play(make, task, call)
        play(make, task, call)
        start = time.perf_counter()
        for _ in range(given.worlds):
            play(make, task, call)
        rate = given.worlds / (time.perf_counter() - start)
        time.sleep(IDLE)
        print(f"{name:20} {rate:8.2f}   {play(make, task, call):.3f}", flush=True)


def play(make, task: Task, call: Call) -> float:
    """Plays one world. Returns the seconds until it began."""
    start = time.perf_counter()
    world = make()
    world.reset(task)
    begun = time.perf_counter() - start
    world.step(call)
    world.fingerprint()
    world.close()
    return begun


if __name__ == "__main__":
    main()
