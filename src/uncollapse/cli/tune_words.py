"""What a search would do and what it found, in words."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from uncollapse.cli.outcomes import duration, shown

if TYPE_CHECKING:
    from uncollapse.lab.search.tune_recipe import Outcome
    from uncollapse.lab.search.variables import Searched
    from uncollapse.tuning.trial_result import TrialResult

STATES = {"done": "done", "pruned": "stopped early", "failed": "failed", "open": "not done"}


def plan(searched: "Searched", trials: int, there: int, seconds: float, jobs: int) -> list[str]:
    """What varies, and how long it takes. there: trials that are done already."""
    lines = ["These settings vary:", *(f"  {dimension.describe()}" for dimension in searched.space)]
    left = max(0, trials - there)
    many = f" in {jobs} processes" if jobs > 1 else ""
    takes = (
        f"They take about {duration(seconds * left / max(1, trials) / jobs)}{many}, less where some are stopped early."
    )
    return [*lines, f"{trials} trials: {there} there, {left} missing. {takes} Nothing was run."]


def summary(made: "Outcome", trials: int) -> str:
    """How many trials there are, how they ended, and what they cost."""
    ran = [tried for tried in made.tried if not tried.idle]
    counts = [f"{count} {word}" for state, word in STATES.items() if (count := _count(ran, state))]
    cost = f"They cost {made.trainings:.1f} whole trainings, {duration(made.seconds)}."
    why = {"interrupted": "Interrupted. ", "time": "The time is over. "}.get(made.ended, "")
    on = " The same command goes on from there." if why else ""
    over = " There is nothing else to try." if made.used_up else ""
    settled = sum(tried.state != "open" for tried in ran)
    return f"{why}{settled} of {trials} trials: {', '.join(counts) or 'none done'}. {cost}{on}{over}"


def findings(made: "Outcome") -> list[str]:
    """The best trial beside the one without a cure, and what mattered; nothing before one is done."""
    won, base, by = made.best, made.baseline, made.searched.search.by
    if won is None:
        return []
    without = "" if base is None else f" Without a cure: {shown(by, [base.value])}."
    if won.number == 0:
        lines = [f"No cure was better than none: {by} {shown(by, [won.value])}."]
    else:
        lines = [f"Best: trial {won.number}, {won.describe()}: {by} {shown(by, [won.value])}.{without}"]
    figures = made.judged(won) if made.ended == "done" else {}  # who goes on with a search has not seen them
    judged = [f"{name} {shown(name, [value])}{_beside(made, name)}" for name, value in figures.items()]
    lines += [f"The search did not look at: {', '.join(judged)}."] if judged else []
    shares = [f"{name} {100 * share:.0f} %" for name, share in made.shares.items()]
    return lines + ([f"What mattered: {', '.join(shares)} of the differences."] if shares else [])


def copied(made: "Outcome") -> list[str]:
    """What to copy."""
    lines = [] if made.line is None else [f"In your own code:  {made.line}"]
    return lines if made.command is None else [*lines, f"The same run:      {made.command}"]


def failures(made: "Outcome", folder: Path) -> str:
    """How many failed, and why the first did."""
    label, why = next(iter(made.failed.items()))
    one = len(made.failed) == 1
    count = "1 trial" if one else f"{len(made.failed)} trials"
    return (
        f"{count} failed; {'it' if one else 'the first'} was {label}: {why} See {folder}. The same command tries again."
    )


def _beside(made: "Outcome", name: str) -> str:
    """The same figure of the run without a cure, where that is another one."""
    base = made.baseline
    value = None if base is None or base is made.best else made.judged(base).get(name)
    return "" if value is None else f" (without a cure {shown(name, [value])})"


def _count(tried: Sequence["TrialResult"], state: str) -> int:
    return sum(each.state == state for each in tried)
