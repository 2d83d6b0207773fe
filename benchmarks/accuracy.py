"""How right `pmd.fit` is, on ten posteriors with new data for every seed, beside what is promised.

One JSON line a finished run; runs that are in the file already are not made again, so that a long
series can be stopped and taken up at any time.

    python benchmarks/accuracy.py --targets mixture means --seeds 100
    python benchmarks/accuracy.py --targets linear --evaluations 700 --seeds 10
    python benchmarks/accuracy.py --targets means --exact never --seeds 20
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, too

import pmd
from benchmarks.references import Reference
from benchmarks.targets import MAKERS, Target, target
from pmd.experiments.grid import Grid, known, score

RESULTS = Path(__file__).parent / "results" / "accuracy.jsonl"
MEAN_OFF, SD_OFF, LOST = 0.1, 0.1, 0.5  # what makes a result wrong: in sds, as a ratio, of a mode
DENSITIES: dict[str, Callable[[], Any]] = {
    "gaussian": lambda: pmd.densities.gaussian(),
    "local": lambda: pmd.densities.kernel(local_rule()),
}


def local_rule() -> Any:
    """The kernel rule with a covariance for every cluster."""
    from pmd.densities.kernel import local

    return local()


# ---------------------------------------------------------------- what is promised
class Goal(NamedTuple):
    """A figure, how it is put together over runs, and the most it may be."""

    figure: str
    over: str  # "mean" or "worst"
    most: float


GOOD = [Goal("mean_error", "mean", 0.03), Goal("sd_error", "mean", 0.04), Goal("k", "worst", 0.5),
        Goal("evidence_error", "mean", 0.02), Goal("evaluations", "mean", 15_000)]  # fmt: skip
TWO_MODES = [Goal("tv", "mean", 0.001), Goal("kl", "mean", 0.001),
             Goal("mass_error", "mean", 0.005), Goal("mass_error", "worst", 0.02),
             Goal("evidence_error", "mean", 0.01)]  # fmt: skip
GOALS: dict[str, list[Goal]] = {
    "mixture": TWO_MODES,
    "asymmetric": TWO_MODES,
    "banana": [Goal("mean_error", "mean", 0.05), *GOOD[1:]],
    "linear": GOOD,
    "student": GOOD,
    "poisson": GOOD,
    "means": [Goal("mass_error", "worst", 0.01), Goal("evaluations", "mean", 12_000)],
    "components": [Goal("mass_error", "worst", 0.02), Goal("sorted_error", "mean", 0.05),
                   Goal("mean_error", "mean", 0.05), Goal("k", "worst", 0.7),
                   Goal("evaluations", "mean", 250_000)],
    "funnel": [Goal("mean_error", "mean", 0.04), Goal("sd_error", "mean", 0.08),
               Goal("k", "worst", 0.7), Goal("evaluations", "mean", 200_000)],
    "mnist": [Goal("mean_error", "mean", 0.03), Goal("sd_bias", "mean", 0.03),
              Goal("test_error", "mean", 0.013), Goal("k", "worst", 0.5),
              Goal("evidence_error", "mean", 0.1)],
}  # fmt: skip
BUDGETS = {"mixture": 0.01, "linear": 0.02, "student": 0.02}  # mean error under --evaluations


def goals(name: str, settings: dict[str, Any]) -> list[Goal]:
    """What is promised of a target under the settings."""
    if "evaluations" in settings:
        found = [Goal("evaluations", "worst", settings["evaluations"])]
        if name in BUDGETS:
            found.append(Goal("mean_error", "mean", BUDGETS[name]))
        return [*found, Goal("tv", "mean", 0.01)] if name == "mixture" else found
    if "density" in settings and GOALS[name] is TWO_MODES:
        ten = settings.get("passes", 5) >= 10
        most = Goal("tv", "mean", 0.065 if ten else 0.09)
        return [
            most,
            *([Goal("kl", "mean", 0.03)] if ten else []),
            Goal("mass_error", "worst", 0.03),
        ]
    return GOALS[name] if settings.get("exact", "auto") == "auto" else []


# ---------------------------------------------------------------- one run
def figures(task: Target, posterior: pmd.Posterior, truth: Reference) -> dict[str, Any]:
    """Everything that is compared, errors without sign."""
    mean, sd = np.asarray(posterior.mean(), float), np.asarray(posterior.std(), float)
    off, ratio = mean - truth.mean, sd / truth.sd
    whitened = np.linalg.solve(np.linalg.cholesky(truth.cov), off)
    found: dict[str, Any] = {
        "mean_error": float(np.sqrt(np.mean(whitened**2))),
        "worst_mean": float(np.abs(off / truth.sd).max()),
        "sd_low": float(ratio.min()),
        "sd_high": float(ratio.max()),
        "sd_error": float(np.abs(ratio - 1).max()),
        "sd_bias": float(abs(ratio.mean() - 1)),
        "evidence_error": float(abs(posterior.log_evidence - truth.log_evidence)),
    }
    if task.modes is not None:
        masses = np.asarray(posterior.expect(task.modes), float)
        found["mass_error"] = float(np.abs(masses - truth.masses).max())
        found["modes_lost"] = int((masses < LOST * truth.masses).sum())
    if task.sort is not None:
        value = np.asarray(posterior.expect(task.sort), float)
        within = (value - truth.sorted_mean) / truth.sorted_sd
        found["sorted_error"] = float(np.sqrt(np.mean(within**2)))
    if task.axis is not None:
        square = Grid.square(*task.axis)
        estimate = np.asarray(posterior.log_prob(jnp.asarray(square.points)), float)
        scored = score(square, known(square, truth.log_density), estimate)
        found |= {"tv": scored.total_variation, "kl": scored.kl, "integral": scored.integral}
    return found | (task.more(posterior) if task.more is not None else {})


def account(posterior: pmd.Posterior) -> dict[str, Any]:
    """What the run says of itself."""
    told = posterior.certificate
    return {
        "verdict": told.verdict,
        "reasons": told.reasons,
        "k": told.pareto_k,
        "ess": told.ess,
        "particles": posterior.num_particles,
        "using": posterior.using,
        "fit_error": told.fit_error,
        "moves": [told.kept, told.reweighed, told.walked, told.refused],
        "guarded": told.guarded,
        "evaluations": posterior.evaluations,
        "log_evidence_error": posterior.log_evidence_error,
        "shares": posterior.settings.get("seconds", {}),
    }


def wrong(run: dict[str, Any]) -> bool:
    """Whether a mode is lost, a mean off by .1 sd, or an sd by 10 %."""
    lost = run.get("modes_lost", 0) > 0
    return lost or not run["worst_mean"] < MEAN_OFF or not run["sd_error"] < SD_OFF


def one_run(task: Target, data_seed: int, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Fit once, and compare."""
    drawn = task.data(data_seed)
    truth = task.reference(task, drawn)
    options = task.options | settings
    if "density" in options:
        options = options | {"density": DENSITIES[options["density"]]()}
    if "evaluations" in options:  # the number of particles and passes follow from it
        options = {name: options[name] for name in settings}
    begin = time.perf_counter()
    posterior = pmd.fit(task.problem, drawn.rows, seed=seed, progress=False, **options)
    seconds = time.perf_counter() - begin
    found = figures(task, posterior, truth) | account(posterior)
    return found | {"wrong": wrong(found), "seconds": seconds}


# ---------------------------------------------------------------- the file and the table
@lru_cache
def code() -> str:
    """A short hash of the library's source, so that figures of several versions can be told."""
    digest = hashlib.sha256()
    for path in sorted(Path(str(pmd.__file__)).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


Key = tuple[str, int, int, str]


def key_of(run: dict[str, Any]) -> Key:
    """What a run is recognised by."""
    settings = json.dumps(run["settings"], sort_keys=True)
    return run["target"], run["data_seed"], run["seed"], settings


def read(path: Path) -> dict[Key, dict[str, Any]]:
    """The runs in a file."""
    if not path.exists():
        return {}
    runs = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {key_of(run): run for run in runs}


def line_of(run: dict[str, Any]) -> str:
    """One run in a line for the screen."""
    shown = ("mean_error", "worst_mean", "sd_error", "sorted_error", "mass_error", "tv", "kl",
             "evidence_error", "k")  # fmt: skip
    parts = [f"{name} {run[name]:.4f}" for name in shown if name in run]
    moves = "kept {} reweighed {} walked {} refused {}".format(*run["moves"])
    ending = f"{run['evaluations']:.0f} evaluations, {run['seconds']:.1f} s"
    right = f"{'wrong' if run['wrong'] else 'right'}, {run['verdict']}"
    return f"{run['target']} {run['seed']}: {', '.join(parts)}, {moves}, {ending}; {right}"


def attained(runs: list[dict[str, Any]], goal: Goal) -> float:
    """A figure over runs: its mean or its largest value."""
    values = np.array([run[goal.figure] for run in runs], float)
    return float(values.mean() if goal.over == "mean" else values.max())


def missed(runs: list[dict[str, Any]]) -> list[str]:
    """What is promised of these runs, all of one target and settings, and was not kept."""
    return [
        f"{goal.over} {goal.figure} {attained(runs, goal):.4g}, promised {goal.most:g}"
        for goal in goals(runs[0]["target"], runs[0]["settings"])
        if not attained(runs, goal) <= goal.most
    ]


def summary(runs: list[dict[str, Any]]) -> str:
    """For each target and settings: figures with what is promised beside them."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["target"], json.dumps(run["settings"])), []).append(run)
    lines = []
    for (name, settings), group in groups.items():
        chosen = json.loads(settings)
        lines.append(f"\n{name}, {len(group)} runs, settings {settings}")
        lines.append(f"  {'figure':16} {'mean':>10} {'worst':>10}   promised")
        promised = goals(name, chosen)
        kinds = dict.fromkeys([goal.figure for goal in promised])
        kinds |= dict.fromkeys(["mean_error", "worst_mean", "sd_error", "modes_lost", "seconds"])
        kinds |= dict.fromkeys(["k", "evaluations", "mass_error", "tv", "kl", "evidence_error"])
        for figure in kinds:
            values = np.array([run[figure] for run in group if figure in run], float)
            if not len(values):
                continue
            beside = [
                f"{goal.over} <= {goal.most:g}"
                + " MISSED" * (not attained(group, goal) <= goal.most)
                for goal in promised
                if goal.figure == figure
            ]
            text = "; ".join(beside)
            lines.append(
                f"  {figure:16} {values.mean():10.4g} {values.max():10.4g}   {text}".rstrip()
            )
        lines.append("  " + counts(group))
    versions = len({run["code"] for run in runs})
    note = f" (by {versions} versions of the code)" if versions > 1 else ""
    lines.append(f"\nall runs{note}: {counts(runs)}")
    return "\n".join(lines)


def beside_of(runs: list[dict[str, Any]], goal: Goal) -> str:
    """A promise, and whether it was kept."""
    kept = attained(runs, goal) <= goal.most
    return f"{goal.over} <= {goal.most:g}{'' if kept else ' MISSED'}"


def counts(runs: list[dict[str, Any]]) -> str:
    """Trust in wrong answers, and right answers refused it."""
    bad = [run for run in runs if run["wrong"]]
    good = [run for run in runs if not run["wrong"]]
    trusted = sum(run["verdict"] == "trust" for run in bad)
    refused = sum(run["verdict"] != "trust" for run in good)
    return (
        f"wrong: {len(bad)} of {len(runs)}, {trusted} of them trusted (promised: 0); "
        f"right: {len(good)}, {refused} of them refused trust (promised: at most a tenth)"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(MAKERS)
    parser.add_argument("--targets", nargs="+", choices=names, default=names[:-1])
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first", type=int, default=1000, help="the first seed, of data and run")
    parser.add_argument("--data-seed", type=int, help="the same data for all, not new ones")
    parser.add_argument("--passes", type=float, help="default: 3; 5 for mnist and for budgets' own")
    parser.add_argument("--exact", choices=["auto", "never", "always"])
    parser.add_argument("--evaluations", type=float, help="a budget of likelihood evaluations")
    parser.add_argument("--density", choices=list(DENSITIES), help="instead of regression")
    parser.add_argument("--particles", type=int)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only-table", action="store_true", help="no runs, what is there")
    return parser.parse_args()


def settings_of(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """What `pmd.fit` is told beyond the target's own options."""
    given = {
        "passes": args.passes, "exact": args.exact, "evaluations": args.evaluations,
        "density": args.density, "num_particles": args.particles,
    }  # fmt: skip
    chosen = {key: value for key, value in given.items() if value is not None}
    if "passes" not in chosen and "evaluations" not in chosen:
        chosen["passes"] = target(name).options.get("passes", 3)
    return chosen


def series(
    name: str,
    seeds: range,
    settings: dict[str, Any],
    out: Path,
    data_seed: int | None = None,
    make: bool = True,
) -> list[dict[str, Any]]:
    """Runs with these seeds: those in the file, and the missing ones, made and added to it."""
    for seed in seeds if make else ():
        data = seed if data_seed is None else data_seed
        run = {"target": name, "data_seed": data, "seed": seed, "settings": settings}
        if key_of(run) not in read(out):
            run |= one_run(target(name), data, seed, settings) | {"code": code()}
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a") as file:
                file.write(json.dumps(run) + "\n")
            print(line_of(run), flush=True)
    there = read(out)
    names = [(name, seed if data_seed is None else data_seed, seed) for seed in seeds]
    keys = [(*found, json.dumps(settings, sort_keys=True)) for found in names]
    return [there[key] for key in keys if key in there]


def main() -> None:
    """Make what is missing, and print the table."""
    args, runs = arguments(), []
    for name in args.targets:
        seeds = range(args.first, args.first + args.seeds)
        settings = settings_of(args, name)
        runs += series(name, seeds, settings, args.out, args.data_seed, not args.only_table)
        jax.clear_caches()
    print(summary(runs))


if __name__ == "__main__":
    main()
