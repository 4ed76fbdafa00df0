"""Measures which leaks leak control sees at which threshold, and its cost with many evaluation tasks.

python benchmarks/leak_threshold.py
python benchmarks/leak_threshold.py --embedding=my_models.embed      # with an embedding model's own column

The scripted explorer finds --tasks in BFCL's training scenarios; half of them stand for evaluation tasks.
Their paraphrases (benchmarks/paraphrases.py) are leaks. Paraphrases with other values are not, nor is the
other half. Any threshold refuses a task with all calls of an evaluation task. Here each measure is on its
own. The paraphrases of every other task choose a threshold; those of the rest measure its quality.
"""

import gc
import itertools
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import app, flags
from paraphrases import Tools, other_values, paraphrases, values_of

from coevolve_jax import envs, names
from coevolve_jax.config import load_file
from coevolve_jax.envs.base import canonical, features, wording
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.scripted.abstractor import word
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.pipeline import SynthesisRequest, Synthesizer
from coevolve_jax.synthesis.similarity import CountCosines, EmbeddingCosines, KnownCosines, calls, ngrams
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Call, Task, Turn

CONFIG = Path(__file__).parents[1] / "configs" / "bfcl_tiny.py"
THRESHOLDS = [n / 100 for n in range(50, 100, 5)]  # rows of the table
CHOICE = [n / 100 for n in range(30, 101)]
PRECISION = 0.99  # the required precision of a threshold

_TASKS = flags.DEFINE_integer("tasks", 400, "Tasks to explore; 0: what is said of paraphrases is left out.")
_SIZE = flags.DEFINE_integer(
    "size", 10_000, "Evaluation tasks to measure time and memory with; 0: it is left out."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the explored tasks and of the paraphrases.")
_NGRAMS = flags.DEFINE_float(
    "ngrams", 0.9, "Threshold of n-grams in the table by kind; 0: the least that is precise."
)
_EMBEDDING = flags.DEFINE_string(
    "embedding", "", "Dotted path of embed(texts) -> floats [n, d], a further measure."
)


class Candidate(NamedTuple):
    kind: str
    leak: bool
    task: Task


def explored(wanted: int, seed: int) -> tuple[list[Task], Tools]:
    """Tasks of BFCL's training scenarios from unguided exploration, and the function schemas of a task."""
    c = load_file(CONFIG)
    family = envs.load(c.environment.name, c.environment.python)
    tasks, e = TaskPool(key=family.task_key), c.environment
    # A call may wait long on a busy machine; giving it up would change the tasks.
    with ProcessPool(e.name, workers=1, timeout=60.0, memory_gib=e.worker_memory) as pool:
        Synthesizer(scripted.make(c, family), family.tools, pool, c, None).synthesize_unguided(
            tasks,
            family.scenarios(e.train_split, e.to_dict()),
            SynthesisRequest(wanted=wanted, kind="initial", step=0, rng=rng_for(seed, "leak threshold")),
        )
    return list(tasks), family.tools


def candidates(
    evaluation: Sequence[Task], others: Sequence[Task], tools: Tools, rng: np.random.Generator
) -> list[Candidate]:
    """Labelled candidates; no harmless one holds by chance all calls of an evaluation task, in any order."""
    values = values_of([*evaluation, *others])
    made = [Candidate(*p) for task in evaluation for p in paraphrases(task, tools, values, rng)]
    made += [Candidate("another task", False, task) for task in others]
    calls = lambda task: Counter(canonical(call.to_json()) for call in task.calls)
    theirs = [calls(task) for task in evaluation]
    return [c for c in made if c.leak or not any(own <= calls(c.task) for own in theirs)]


def quality(refused: np.ndarray, leaks: np.ndarray) -> tuple[float, float]:
    """(precision, recall); the precision of refusing nothing is 1."""
    right = np.count_nonzero(refused & leaks)
    return right / max(np.count_nonzero(refused), 1) if refused.any() else 1.0, right / np.count_nonzero(
        leaks
    )


def print_quality(
    found: Sequence[Candidate], nearest: dict[str, np.ndarray], usual: float, same: np.ndarray
) -> None:
    """Prints precision and recall by threshold, and the share refused by kind.

    nearest: by measure, the highest cosine of each candidate. usual: the features' threshold, for the pairs.
    same: whether a candidate has all calls of an evaluation task, in order.
    """
    leaks = np.array([c.leak for c in found])
    refusing = {name: (lambda t, own=own: own >= t) for name, own in nearest.items()}
    for name, own in list(nearest.items())[1:]:
        both = lambda t, own=own: (own >= t) | (nearest["features"] >= usual)
        refusing[f"{name} or features >= {usual}"] = both
    print(f"{leaks.sum()} leaks, {(~leaks).sum()} others; precision and recall of refusing, by threshold")
    print("          " + "".join(f"{name:>26}" for name in refusing))
    for t in THRESHOLDS:
        cells = [quality(refuse(t), leaks) for refuse in refusing.values()]
        print(f"{t:10.2f}" + "".join(f"{f'{p:.3f} {r:.3f}':>26}" for p, r in cells))
    chosen = {"features": usual, **({"ngrams": _NGRAMS.value} if _NGRAMS.value else {})}
    sources = {id: n for n, id in enumerate(dict.fromkeys(c.task.id.split(",")[0] for c in found))}
    first = np.array([sources[c.task.id.split(",")[0]] % 2 == 0 for c in found])
    for name in nearest:
        good = [t for t in CHOICE if quality(refusing[name](t)[first], leaks[first])[0] >= PRECISION]
        least = min(good, default=1.0)
        p, r = quality(refusing[name](least)[~first], leaks[~first])
        print(f"{name}: precision {PRECISION} from {least} on one half; on the other {p:.3f}, recall {r:.3f}")
        chosen[name] = chosen.get(name, least)
    shown = {f"{name} >= {t}": nearest[name] >= t for name, t in chosen.items()}
    shown = {"same calls": same, **shown, "any of them": np.any([same, *shown.values()], axis=0)}
    print(f"{'share refused, by kind':42}" + "".join(f"{name:>20}" for name in shown))
    for kind in dict.fromkeys(c.kind for c in found):
        own = np.array([c.kind == kind for c in found])
        label = "leak" if leaks[own].all() else "no leak"
        print(f"{kind:28}{own.sum():5} {label:8}" + "".join(f"{r[own].mean():20.3f}" for r in shown.values()))
    p, r = quality(shown["any of them"], leaks)
    print(f"any of them: precision {p:.3f}, recall {r:.3f}")


def made_up(tasks: Sequence[Task], tools: Tools, wanted: int, rng: np.random.Generator) -> list[Task]:
    """Makes up `wanted` tasks of 2 to 6 calls from all tasks, in the explorer's words, with other values.

    Texts take a hundred times as many values. Tasks then differ as much as those of so many scenarios would.
    """

    def fresh(call: Call) -> Call:
        other = other_values(call, values, rng).arguments
        numbered = {k: f"{v}_{rng.integers(100)}" if isinstance(v, str) else v for k, v in other.items()}
        return Call(call.name, numbered)

    calls, values, made = [c for t in tasks for c in t.calls], values_of(tasks), []
    for number in range(wanted):
        like = tasks[rng.integers(len(tasks))]
        offered = {tool["function"]["name"] for tool in tools(like)}
        drawn = (calls[rng.integers(len(calls))] for _ in itertools.count())
        some = itertools.islice((c for c in drawn if c.name in offered), int(rng.integers(2, 7)))
        own = tuple(fresh(call) for call in some)
        made.append(
            Task(
                f"made-up-{number}", like.environment, {}, (Turn(word(own, tools(like), rng, wording), own),)
            )
        )
    return made


def print_costs(what: str, make: Callable[[], LeakGuard], new: Sequence[Task]) -> None:
    """Prints a guard's CPU seconds to build, its memory (held and peak), and milliseconds of a check."""
    gc.collect()
    before, start = resident(), time.process_time()
    guard = make()
    built = time.process_time() - start
    gc.collect()
    held, spent = resident() - before, []
    peak = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    )  # the peak of the whole process until now
    for task in new:
        start = time.process_time()
        guard.check(task)
        spent.append(1000 * (time.process_time() - start))
    print(
        f"{what:24} build {built:.1f} s, holds {held:.0f} MB (peak {peak:.0f} MB), a check "
        f"{np.median(spent):.2f} ms "
        f"(95% within {np.percentile(spent, 95):.2f} ms)"
    )


def resident() -> float:
    """Memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main(_) -> None:
    usual = load_file(CONFIG).data.leak_threshold
    tasks, tools = explored(max(_TASKS.value, 100), _SEED.value)
    rng = rng_for(_SEED.value, "paraphrases")
    if _TASKS.value:
        evaluation, others = tasks[::2], tasks[1::2]
        found = candidates(evaluation, others, tools, rng)
        cosines = {
            "features": CountCosines(evaluation, features),
            "arguments": KnownCosines(evaluation, calls),
            "ngrams": KnownCosines(evaluation, ngrams),
        }
        if _EMBEDDING.value:
            embed = names.function(_EMBEDDING.value, "data.leak_embedding")
            cosines["embedding"] = EmbeddingCosines(evaluation, embed)
        nearest = {n: np.array([of(c.task).max() for c in found]) for n, of in cosines.items()}
        text = lambda task: canonical([call.to_json() for call in task.calls])
        theirs = {text(task) for task in evaluation}
        print_quality(found, nearest, usual, np.array([text(c.task) in theirs for c in found]))
    if _SIZE.value:
        many = made_up(tasks, tools, _SIZE.value + 100, rng)
        many, new = many[:-100], many[-100:]
        print(f"{_SIZE.value} evaluation tasks")
        print_costs("features", lambda: LeakGuard(many), new)
        print_costs("features and arguments", lambda: LeakGuard(many, call_threshold=0.88), new)
        print_costs("features and ngrams", lambda: LeakGuard(many, query_threshold=0.9), new)


if __name__ == "__main__":
    app.run(main)
