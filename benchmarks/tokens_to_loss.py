"""Measure how many training tokens GPT-2 and the modern recipe need for the same validation loss, on a CPU.

python -m benchmarks.tokens_to_loss                    # writes docs/tokens_to_loss.md
python -m benchmarks.tokens_to_loss --seed 7           # other initial weights and data order
python -m benchmarks.tokens_to_loss --data my.txt      # another text
python -m benchmarks.tokens_to_loss --budget_hours 0   # only write the page from the result files
python -m benchmarks.tokens_to_loss --data my.txt --tokens 9437184 --settings_of python-standard-library   # longer runs

Each run is `train_accelerate.py` itself, on one thread. Finished runs are kept: the same command resumes an
interrupted plan. Their results are in benchmarks/results/tokens-to-loss-*.jsonl.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from benchmarks import results
from benchmarks.performance import DOCS, measured_on, table, with_results, write_page
from benchmarks.results import device_kind, key, read_runs, require_same_conditions
from benchmarks.runs import measure_missing, token_store, train
from common import command_line
from common.errors import UserError, counted
from common.limits import setting
from tokenizer.store.store import read_metadata
from training.checkpoints.metrics import comparable_loss, seconds_until
from training.data.run_data import is_store, name_of
from training.report.plots import BLUE, GRAY, ORANGE, STYLE

FILES = "tokens-to-loss-*.jsonl"
TOKENS = 2_359_296  # of the longest runs: 0.9 epochs of the quickstart's text, so that no run repeats text
UNIT = 12 * 4096  # every share of the tokens is a number of whole steps of every batch in the plan
FRACTIONS = ("1/2", "1/3", "1/4")
SHARES = {"all tokens": Fraction(1)} | {f"{each} of the tokens": Fraction(each) for each in FRACTIONS}
RESULT, SWITCHES = "Loss by tokens", "One switch at a time, with half of the tokens"
CIRCUIT, FAMILIES = "Modern: induction circuit", ("GPT-2, tuned", "modern")


@dataclass
class ProofArguments:
    data: str = setting("python-standard-library", "Text or token store.")
    seed: int = setting(1337, "First seed; the deciding runs also use the next one.")
    tokens: int | None = setting(None, f"Tokens of the longest runs. Default: {TOKENS:,}, at most one epoch.")
    settings_of: str | None = setting(
        None, "Text with a finished plan, from whose best settings a shorter plan starts, for longer runs."
    )
    budget_hours: float = setting(6.0, "Maximum CPU-hours of all finished runs.")
    workers: int = setting(2, "Runs at once, on one thread each.", minimum=1)


# The plan. The settings of a run are flags of train_accelerate.py, and two shares: of the steps that warm up, and of
# the peak learning rate that is left at the end.
Run = dict[str, Any]

COSINE = {"lr_scheduler_type": "cosine", "warmup_share": 0.05, "final_share": 0.0}
LINEAR = COSINE | {"lr_scheduler_type": "linear"}
STABLE = COSINE | {"lr_scheduler_type": "warmup_stable_decay", "cooldown_fraction": 0.6}
GPT2 = {"tie_word_embeddings": True, "initializer_range": 0.02, "optimizer": "adamw", "weight_decay": 0.1}
GPT2 |= {"adam_beta1": 0.9, "adam_beta2": 0.95, "second_target_weight": 0.0}

# modded-nanogpt's records/track_1_short/2024-11-03_UntieEmbed with rates of track_3_optimization, for width 768 and
# head size 128. The initial weights follow 1 / sqrt(size). Only the rate of the matrices is tuned here.
MODERN = {"rope_theta": 10000.0, "normalization": "rms_norm", "use_bias": False, "activation_function": "relu2"}
MODERN |= {"layer_norm_epsilon": 1e-6, "initializer_range": 0.051}
UNTIED = {"tie_word_embeddings": False}
MUON = {"optimizer": "muon", "weight_decay": 0.05}
RATES = {"learning_rate": 0.02, "embedding_learning_rate": 0.3, "head_learning_rate": 0.004 * math.sqrt(768 / 128)}
MUON_SCHEDULE = STABLE | {"warmup_share": 0.0}


class Stage(NamedTuple):
    """Runs of the plan that depend only on earlier stages. A row has one run per seed."""

    title: str
    rows: dict[str, list[Run]]


Search = Generator[Stage, None, Run]
Loss = Callable[[Run], float]


def plan(head: dict[str, Any], loss: Loss) -> Generator[Stage]:
    """Yield the stages in order. `loss` is called only for runs of stages that were yielded before."""
    tokens, seed = head["tokens"], head["seed"]
    if tuned := head.get("tuned"):
        changed = {"tokens": tokens, "seed": seed}
        return plan_from(tuned["GPT-2, tuned"] | changed, tuned["modern"] | changed, loss)
    return full_plan(tokens, seed, loss)


def plan_from(baseline: Run, modern: Run, loss: Loss) -> Generator[Stage]:
    """Tune the batch and the learning rate of GPT-2 again, and the circuit of the modern recipe."""
    batches = {f"{size:,} tokens per step": with_batch(baseline, size) for size in (1024, 2048)}
    baseline = yield from choose("GPT-2: batch", batches, loss)
    baseline = yield from climb("GPT-2: learning rate", baseline, "learning_rate", loss)
    half = modern | {"tokens": modern["tokens"] // 2}
    plain = half | {"induction_init": False}
    best = yield from choose(CIRCUIT, {"without": plain, "with": half | {"induction_init": True}}, loss)
    modern |= {"induction_init": best["induction_init"]}
    shorter = {share: fraction for share, fraction in SHARES.items() if fraction < 1}
    rows = deciding("GPT-2, tuned", baseline, {"all tokens": 1}) | deciding("modern", modern, shorter)
    yield Stage(RESULT, rows | {"modern without the circuit, 1/2 of the tokens": [plain]})


def deciding(family: str, run: Run, shares: dict[str, Fraction | int]) -> dict[str, list[Run]]:
    """Return a row for each share of the tokens, with the seed of `run`, which has all tokens, and the next seed."""
    seeds = (run["seed"], run["seed"] + 1)
    return {
        f"{family}, {share}": [run | {"tokens": int(fraction * run["tokens"]), "seed": seed} for seed in seeds]
        for share, fraction in shares.items()
    }


def full_plan(tokens: int, seed: int, loss: Loss) -> Generator[Stage]:
    # 1. Tune GPT-2, one setting after the other.
    baseline = GPT2 | COSINE | {"learning_rate": 3e-3, "tokens_per_step": 2048, "tokens": tokens, "seed": seed}
    baseline = published = yield from climb("GPT-2: learning rate", baseline, "learning_rate", loss)
    baseline = yield from climb("GPT-2: initial weights", baseline, "initializer_range", loss)
    schedules = {"cosine to 0": COSINE, "cosine to a tenth": COSINE | {"final_share": 0.1}, "linear to 0": LINEAR}
    schedules["stable, then linear to 0 over 60%"] = STABLE
    baseline = yield from choose("GPT-2: schedule", {name: baseline | each for name, each in schedules.items()}, loss)
    batches = {  # small batches want a slower second moment (Marek et al. 2025)
        f"{size:,} tokens per step, adam_beta2 {beta:g}": with_batch(baseline, size) | {"adam_beta2": beta}
        for size, beta in itertools.product((1024, 2048, 4096), (0.95, 0.99))
    }
    baseline = yield from choose("GPT-2: batch and Adam's second beta", batches, loss)
    baseline = yield from climb("GPT-2: learning rate again", baseline, "learning_rate", loss)
    firsts = variants(baseline, "adam_beta1", (0.9, 0.8, 0.7, 0.5))
    baseline = yield from choose("GPT-2: Adam's first beta", firsts, loss)
    weights = variants(baseline, "second_target_weight", (0.0, 0.3))
    baseline = yield from choose("GPT-2: second targets", weights, loss)

    # 2. The modern recipe at half of the tokens, with the batch and the betas that suit GPT-2 best.
    half = baseline | {"tokens": tokens // 2}
    recipe = half | MODERN | UNTIED | MUON | MUON_SCHEDULE | RATES
    modern = yield from choose("Modern: Muon's rate", variants(recipe, "learning_rate", (0.01, 0.014, 0.02)), loss)
    circuit = {"without": modern, "with": modern | {"induction_init": True}}
    modern = yield from choose(CIRCUIT, circuit, loss)
    weights = variants(modern, "second_target_weight", (0.0, 0.3, 0.5))
    modern = yield from choose("Modern: second targets", weights, loss)

    # 3. Every share of the tokens is its own finished run, with two seeds.
    rows = {"GPT-2 with initializer_range 0.02, all tokens": [published]} | deciding("GPT-2, tuned", baseline, SHARES)
    yield Stage(RESULT, rows | deciding("modern", modern | {"tokens": tokens}, SHARES))

    # 4. One switch at a time, at half of the tokens. Without the normalized, untied embedding, all tables have the
    # rate of GPT-2.
    rate = half["learning_rate"]
    adamw = variants(half | MODERN, "learning_rate", (0.5 * rate, rate, 2 * rate))
    tied = yield from choose("Modern architecture, tied, AdamW: learning rate", adamw, loss)
    own = {name: modern[name] for name in RATES}
    plain = {name: value for name, value in modern.items() if name != "induction_init"}
    gpt2_tables = own | {"embedding_learning_rate": rate, "head_learning_rate": rate}
    switches = {
        "GPT-2, tuned": half,
        "GPT-2, tuned, with Muon and its schedule": half | MUON | gpt2_tables | MUON_SCHEDULE,
        "modern architecture, tied, AdamW, GPT-2's schedule": tied,
        "+ untied head": tied | UNTIED,
        "+ own rates of embedding and head": tied | UNTIED | own | {"learning_rate": tied["learning_rate"]},
        "+ Muon": tied | UNTIED | own | MUON,
        "+ no warm-up, stable, then linear": plain | {"second_target_weight": half["second_target_weight"]},
        "+ its weight of second targets": plain,
        "+ its induction circuit: modern": modern,
        "modern, but tied and without the circuit": plain | {"tie_word_embeddings": True} | gpt2_tables,
    }
    yield Stage(SWITCHES, {name: [each] for name, each in switches.items()})


def climb(title: str, start: Run, name: str, loss: Loss) -> Search:
    """Double or halve a setting for as long as the loss falls, and return the best run, with worse neighbors."""
    tried, best, last = {start[name]}, start, None
    while best != last:
        last, tried = best, tried | {2 * best[name], best[name] / 2}
        best = yield from choose(title, variants(start, name, sorted(tried)), loss)
    return best


def choose(title: str, runs: dict[str, Run], loss: Loss) -> Search:
    yield Stage(title, {name: [each] for name, each in runs.items()})
    return min(runs.values(), key=loss)


def variants(run: Run, name: str, values: Iterable[float]) -> dict[str, Run]:
    return {f"{name} {value:g}": run | {name: value} for value in values}


def with_batch(run: Run, tokens_per_step: int) -> Run:
    """Return the run with another batch. The learning rate follows its square root."""
    rate = run["learning_rate"] * math.sqrt(tokens_per_step / run["tokens_per_step"])
    return run | {"tokens_per_step": tokens_per_step, "learning_rate": rate}


def progress(head: dict[str, Any], found: dict[str, dict]) -> tuple[dict[str, Stage], Stage | None]:
    """Return the finished stages by title, and the next stage, or None at the end of the plan."""
    finished = {}
    for stage in plan(head, lambda run: found[key(run)]["eval_loss"]):
        if any(key(each) not in found for runs in stage.rows.values() for each in runs):
            return finished, stage
        finished[stage.title] = stage
    return finished, None


def train_settings(run: Run) -> dict[str, Any]:
    """Return the flags of train_accelerate.py for a run."""
    steps = run["tokens"] // run["tokens_per_step"]
    settings = {name: value for name, value in run.items() if name not in ("tokens", "warmup_share", "final_share")}
    settings |= {"max_steps": steps, "eval_steps": max(1, steps // 8)}
    settings |= {"warmup_steps": round(run["warmup_share"] * steps)}
    return settings | {"min_learning_rate": run["final_share"] * run["learning_rate"]}


def measure(store: Path, run: Run, folder: Path) -> dict[str, Any]:
    """Train the model of a run. Return its losses, times and sizes."""
    trained = train(folder, {"config": "benchmarks/tokens_to_loss.yaml", "data": store} | train_settings(run))
    until, evaluations, tokens = seconds_until(trained.entries, 0), trained.validations, run["tokens_per_step"]
    return {
        "settings": run,
        "eval_loss": round(evaluations[-1]["eval_loss"], 5),
        "eval_bits_per_byte": round(evaluations[-1]["eval_bits_per_byte"], 5),
        "training_seconds": round(until[evaluations[-1]["step"]], 1),
        "wall_seconds": round(trained.seconds, 1),
        "cpu_seconds": round(trained.cpu_seconds, 1),
        "curve": [[e["step"] * tokens, round(until[e["step"]], 1), round(comparable_loss(e), 4)] for e in evaluations],
    }


def store_of(data: str) -> Path:
    """Return the token store of `data`. Text becomes a store in the same way as in presets/quickstart.yaml."""
    if is_store(data):
        return Path(data)
    return token_store(f"tokens-to-loss-{name_of(data)}", data, vocab_size=2048, validation_fraction=0.05)


def begin(options: ProofArguments, arguments: list[str]) -> dict[str, Any]:
    """Return the head of a new result file."""
    metadata = read_metadata(store_of(options.data))
    longest = min(options.tokens or TOKENS, metadata.train.tokens)
    tokens = longest // UNIT * UNIT
    if tokens == 0:
        raise UserError(f"The longest run has {longest:,} tokens, but the plan needs {UNIT:,}; use more of them.")
    text = {"data": name_of(options.data), "vocab_size": metadata.vocab_size, "sha256": metadata.train.sha256}
    head = results.about("tokens_to_loss", arguments) | text | {"tokens": tokens, "seed": options.seed}
    if options.settings_of is None:
        return head
    tuned = read_runs(results.RESULTS / f"tokens-to-loss-{name_of(options.settings_of)}-cpu.jsonl", "settings")
    stages = progress(*tuned)[0] if tuned[0] else {}
    if RESULT not in stages:
        raise UserError(f"No finished plan for {options.settings_of} is in benchmarks/results; run it first.")
    return head | {"tuned": {name: stages[RESULT].rows[f"{name}, 1/2 of the tokens"][0] for name in FAMILIES}}


def main(arguments: list[str]) -> None:
    (options,) = command_line.FlagParser((ProofArguments,), __doc__).parse(arguments)
    chosen = {name: getattr(options, name) for name in ("seed", "tokens")}
    suffix = "".join(f"-{name}{value}" for name, value in chosen.items() if value != getattr(ProofArguments, name))
    path = results.RESULTS / f"tokens-to-loss-{name_of(options.data)}{suffix}-{device_kind()}.jsonl"
    head, found = read_runs(path, "settings")
    head = head or begin(options, arguments)
    while (stage := progress(head, found)[1]) is not None:
        missing = {key(each): each for runs in stage.rows.values() for each in runs if key(each) not in found}
        batch = list(missing.values())[: options.workers]
        spent = [each["cpu_seconds"] for each in found.values()]
        if sum(spent) + len(batch) * max(spent, default=0) >= 3600 * options.budget_hours:
            print(f"The budget ends before the stage {stage.title!r}: {sum(spent) / 3600:.2f} CPU-hours are spent.")
            break
        store = store_of(options.data)
        require_same_conditions(path, head, sha256=read_metadata(store).train.sha256)
        print(f"{stage.title}: {counted(len(missing), 'run')} left")
        measure_missing(path, head, found, batch, partial(measure, store), options.workers)
    for path in sorted(results.RESULTS.glob(FILES)):
        head, found = read_runs(path, "settings")
        if RESULT in (stages := progress(head, found)[0]):
            draw(stages[RESULT], found, DOCS / f"{path.stem}.png")
    write_page("tokens_to_loss.md", page())


def page() -> str:
    """Return docs/tokens_to_loss.md with the tables of the result files between its markers."""
    paths = sorted(results.RESULTS.glob(FILES), key=lambda path: (read_runs(path, "settings")[0]["tokens"], path))
    sections = map(section, paths)
    return with_results("tokens_to_loss.md", "\n\n".join(sections) or "The plan has not been run yet.")


def section(path: Path) -> str:
    head, found = read_runs(path, "settings")
    stages, following = progress(head, found)
    rows = {title: [row(name, runs, found) for name, runs in stage.rows.items()] for title, stage in stages.items()}
    columns = ["tokens", "validation loss", "bits per byte", "training seconds"]
    parts = [f"### {head['data']}, seed {head['seed']}"]
    if RESULT in stages:
        plot = f"![Validation loss by training tokens and by training seconds]({path.stem}.png)"
        parts += [claim(stages[RESULT], found), plot, f"#### {RESULT}", table(["", *columns], rows[RESULT])]
    if SWITCHES in stages:
        parts += [f"#### {SWITCHES}", table(["", *columns[1:]], [[name, *rest] for name, _, *rest in rows[SWITCHES]])]
    hours = sum(each["cpu_seconds"] for each in found.values()) / 3600
    state = "" if following is None else f" The plan is not finished: the next stage is {following.title!r}."
    parts += [f"{len(found)} runs, {hours:.2f} CPU-hours.{state} {measured_on(head, path)}"]
    return "\n\n".join(parts)


def row(name: str, runs: list[Run], found: dict[str, dict]) -> list[str]:
    """Return a row of a table: losses per seed, and the training time of the first seed."""
    first, *_ = each = [found[key(run)] for run in runs]
    losses = [" / ".join(f"{one[metric]:.4f}" for one in each) for metric in ("eval_loss", "eval_bits_per_byte")]
    return [name, f"{runs[0]['tokens']:,}", *losses, f"{first['training_seconds']:,.0f}"]


def claim(stage: Stage, found: dict[str, dict]) -> str:
    """State the smallest share of the tokens with which all seeds of the modern model are below all seeds of GPT-2."""
    losses = {name: [found[key(run)]["eval_loss"] for run in runs] for name, runs in stage.rows.items()}
    seconds = {name: sum(found[key(run)]["training_seconds"] for run in runs) for name, runs in stage.rows.items()}
    tuned = "GPT-2, tuned, all tokens"
    names = [name for share in SHARES if (name := f"modern, {share}") in losses]
    reached = [name for name in names if max(losses[name]) < min(losses[tuned])]
    if not reached:
        return f"The modern model reaches the final loss of the tuned GPT-2 with none of: {', '.join(SHARES)}."
    new, old = (" and ".join(f"{loss:.4f}" for loss in losses[name]) for name in (reached[-1], tuned))
    time = f"{seconds[reached[-1]] / seconds[tuned]:.2f} of the training time"
    return f"**{reached[-1].capitalize()}**, {time}: {new}. GPT-2, tuned, all tokens: {old}."


def draw(stage: Stage, found: dict[str, dict], path: Path) -> None:
    """Plot final losses by tokens and by seconds, and the validation losses during the runs."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.8))
        panels = figure.subplots(1, 2, sharey=True)
        for place, (axes, unit) in enumerate(zip(panels, ("tokens", "training seconds"), strict=True)):
            for family, color in zip(FAMILIES, (ORANGE, BLUE), strict=True):
                runs = [found[key(run)] for share in SHARES for run in stage.rows.get(f"{family}, {share}", [])]
                for one in runs:
                    *places, losses = zip(*one["curve"][2:], strict=True)
                    axes.plot(places[place], losses, color=color, alpha=0.25)
                ends = [(one["curve"][-1][place], one["eval_loss"]) for one in runs]
                axes.plot(*zip(*ends, strict=True), "o", color=color, label=f"{family}: end of a run")
            goal = min(found[key(run)]["eval_loss"] for run in stage.rows["GPT-2, tuned, all tokens"])
            axes.axhline(goal, color=GRAY, linestyle="--")
            axes.set_xlabel(unit)
        panels[0].set_ylabel("validation loss (nats per token)")
        panels[1].legend()
        figure.savefig(path)


if __name__ == "__main__":
    command_line.run(main)
