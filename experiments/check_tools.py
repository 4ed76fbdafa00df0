"""Tells whether tools are fit to train on, by exploring them, without a model.

    python experiments/check_tools.py my_env:Shop
    python experiments/check_tools.py examples/shop.py:Shop --out=runs/shop.html
    python experiments/check_tools.py --config=configs/mcp_shop.py
    python experiments/check_tools.py --config=configs/mcp_smollm2.py \\
        --config.environment.command="SERVER {world}" --config.environment.template=FOLDER

It prints findings with the line of your file and the remedy, what each tool did, and how many different tasks
come out. The page also shows ten of them, the values that were tried, and what an agent reads. The exit code
is 1 where a finding says STOP: tools that depend on a clock or on other worlds, or that give no task. This
takes seconds for a quick class, and minutes for a slow one or a server.
"""

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import app, flags, logging
from ml_collections import config_flags

from coevolve_jax import shipped
from coevolve_jax.config import parse_flags
from coevolve_jax.llm.prompting import line

_CONFIG = config_flags.DEFINE_config_file(
    "config",
    str(shipped.config_file("configs/tools.py")),
    "Config file, with its argument if any.",
    lock_config=True,
)
_OUT = flags.DEFINE_string("out", None, "The page, an HTML file; none: runs/tools_NAME.html.")
_WORLDS = flags.DEFINE_integer(
    "worlds", None, "Worlds to explore; none: 32, or 4 where a server is started for each.", lower_bound=1
)


def main(argv) -> None:
    if len(argv) > 2:
        sys.exit(f"Error: unexpected argument {argv[2]!r}: give one class or file, see --help.")
    logging.set_verbosity(logging.WARNING)
    try:
        sys.exit(check(argv[1] if len(argv) > 1 else None))
    except ValueError as error:
        sys.exit(f"Error: {line(str(error))}")  # a server's words may be in it
    except KeyboardInterrupt:
        sys.exit(130)


def check(source: str | None) -> int:
    """Prints the check and writes its page. Returns the exit code."""
    from coevolve_jax import config as configs
    from coevolve_jax.envs.tools.source import find
    from coevolve_jax.toolcheck import facts, page
    from coevolve_jax.toolcheck.findings import findings
    from coevolve_jax.toolcheck.lines import Lines

    c = _CONFIG.value
    if source is not None:
        if c.environment.name != "tools":
            raise ValueError(
                f"{source!r} is a class or file of yours, and config.environment.name is "
                f"{c.environment.name!r}: give one or the other."
            )
        c.environment.source = source
    name = c.environment.get("source") or c.environment.name
    lines = Lines("")
    if c.environment.name == "tools":
        path, _, kind = c.environment.source.partition(":")
        if not path:
            raise ValueError("Give the tools: a class, such as my_env:Shop or my_env.py:Shop, or a file.")
        lines = Lines(find(path), kind)
    stem = "".join(letter if letter.isalnum() else "_" for letter in Path(name).name)
    out = Path(_OUT.value or f"runs/tools_{stem}.html")
    configs.check_output("out", out)
    e = c.environment
    splits = list(dict.fromkeys([e.train_split, e.eval_split, *c.data.leak_splits]))
    gathered = facts.gather(c, splits, _WORLDS.value)
    found = findings(c, gathered, lines)
    print(page.text(name, gathered, found))
    when = time.strftime("%Y-%m-%d")
    told = f"Seed {c.seed}, {gathered.steps:,} calls, {gathered.seconds:.0f} s, {when}. "
    asked = source or f"--config={config_flags.get_config_filename(flags.FLAGS['config'])}"
    page.write(out, name, gathered, found, told + f"{shipped.command('check-tools')} {asked}")
    print(f"The page: {out}")
    return int(any(finding.stops for finding in found))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
