"""`uc.tune`: search for the best cure, its place and its strength in your own training loop."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from uncollapse.errors import UsageError
from uncollapse.io.loading import fixed_seed
from uncollapse.tuning import space as spaces
from uncollapse.tuning.study import PrunerName, Pruning, Study, open_study
from uncollapse.tuning.trial_loop import AttachSpace, Trial, TrialLoop, attach_dimensions
from uncollapse.tuning.trial_result import Better, TrialResult, best_trial


@dataclass(frozen=True)
class Tuned:
    """The result of a search.

    best: the trial with the best metric; trial 0, which has no cure, if none is better. trials: all trials, in order.
    attach_line: the line of code that attaches the best cure to the model. mattered: the share of the variance between
    trials that each parameter explains; empty if there are too few trials.
    """

    best: TrialResult
    trials: tuple[TrialResult, ...]
    attach_line: str
    better: Better
    mattered: Mapping[str, float] = field(default_factory=dict)
    space: Sequence[Mapping[str, Any]] = ()

    @property
    def baseline(self) -> TrialResult:
        """Return the trial without a cure."""
        return self.trials[0]

    def report(self, path: str | Path, *, title: str = "Tuning") -> Path:
        """Write an HTML page with parameter importances, the history of the search, and all trials."""
        from uncollapse.tuning.search_page import SearchReport, write_search_page

        found = (self.trials, self.space, self.mattered, self.attach_line, (str(self),))
        return write_search_page(SearchReport(title, "metric", self.better, *found), path)

    def __str__(self) -> str:
        baseline = f"without a cure {_format_metric(self.baseline)}"
        if self.best.number == 0:
            ran = sum(not trial.idle for trial in self.trials)  # the others repeat earlier ones
            return f"No cure was better than none, over {ran} trials: {baseline}."
        trial = f"trial {self.best.number} of {len(self.trials)}, {self.best.describe()}"
        return f"Best: {trial}: {_format_metric(self.best)}, {baseline}."


def tune(
    model: nn.Module | Callable[[], nn.Module],
    train_fn: Callable[[nn.Module, Trial], float],
    *,
    cures: str | Sequence[str] = ("contra_norm",),
    scale: Any = (0.01, 1.0),
    temperature: Any = None,
    at: Any = None,
    layers: Any = None,
    trials: int = 20,
    direction: Literal["maximize", "minimize"] = "maximize",
    study: str | Path | None = None,
    seed: int = 0,
    jobs: int = 1,
    pruner: PrunerName = "median",
    **options: Any,
) -> Tuned:
    """Search for the cure, its place and its strength that give the best metric after your own training.

    Each trial gets a copy of the model with a cure attached, and `train_fn` trains and evaluates it. Your model is not
    changed. Trial 0 has no cure, and trial 1 has default settings. Optuna chooses the others by earlier results.
    Evaluate on validation data: a metric on test data by which settings were chosen says nothing about new data.

    Args:
        model: The model before training, or a function that returns one.
        train_fn: `train_fn(model, trial)` trains the model in place and returns its metric on validation data. It may
            call `trial.report(step, value)` after each epoch, which stops trials that are far worse than others. Create
            the optimizer in it, because a cure may have parameters. A metric that is NaN or infinite counts as failed.
        cures: One name or several.
        scale, temperature: A pair of numbers is a range, searched on a logarithmic scale. A list has values to choose
            from. A number is fixed. None leaves it to the cure. Cures without such an argument do not get it.
        at, layers: A list has places, or choices of blocks, to choose from. A single one is fixed. None is the default
            of `attach`. See `attach` for what they can be.
        trials: Total number of trials, including those of earlier calls with the same study.
        direction: "maximize" or "minimize" the metric.
        study: Folder of the study. A later call with the same arguments resumes it. None: in memory.
        seed: Seed of the search, and of torch's random numbers at the start of each trial.
        jobs: Number of trials that run at the same time, in threads. With several, they share random numbers, and
            results vary.
        pruner: "median" stops trials that are worse than the median of the others, or "hyperband", or "none".
        options: More arguments of `attach`, the same for all trials, such as modules="blocks.*".

    Returns:
        The best trial, the line of code that attaches its cure, and all trials.

    >>> import torch, uncollapse as uc
    >>> _ = torch.manual_seed(0)
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    >>> x = torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(0))
    >>> def train(model, trial):  # no training here, only a metric: how different the tokens are
    ...     with torch.no_grad():
    ...         return 1 - float(uc.mean_cosine(model.eval()(x)).mean())
    >>> found = uc.tune(model, train, scale=[0.1, 1.0], at="attention.residual", trials=3)
    >>> found.attach_line
    'uc.attach(model, "contra_norm", scale=1.0, at="attention.residual")'
    >>> found.best.value > found.baseline.value
    True
    """
    if direction not in ("maximize", "minimize"):
        raise UsageError(f'direction must be "maximize" or "minimize", got {direction!r}.')
    if trials < 1 or jobs < 1:
        raise UsageError(f"trials and jobs must be at least 1, got {trials} and {jobs}.")
    better: Better = "higher" if direction == "maximize" else "lower"
    names = (cures,) if isinstance(cures, str) else tuple(cures)
    space = AttachSpace(attach_dimensions(names, scale, temperature, at, layers), names, options)
    fresh = _model_factory(model)
    with fixed_seed(seed):
        first = fresh()
    space.check(first)
    facts = {"direction": direction, "pruner": pruner, "seed": seed, **space.facts(first)}
    folder = None if study is None else Path(study)
    with open_study(folder, facts, better=better, seed=seed, pruning=Pruning(pruner)) as opened:
        TrialLoop(opened, space, fresh, train_fn, trials, seed).run(jobs)
        return _result(opened, space, better)


def _result(study: Study, space: AttachSpace, better: Better) -> Tuned:
    trials = study.trials
    best = best_trial(trials, better)
    if best is None:
        raise UsageError(f"None of the {len(trials)} trials gave a number. The first: {trials[0].why or 'not done'}.")
    line = space.line(best.settings) if best.number else "# no cure was better than none"
    return Tuned(best, tuple(trials), line, better, study.importances(), spaces.facts(space.space))


def _format_metric(trial: TrialResult) -> str:
    return "not a number" if trial.value is None else f"{trial.value:.4g}"


def _model_factory(model: Any) -> Callable[[], nn.Module]:
    """Return a function that returns a new model each time."""
    if isinstance(model, nn.Module):
        start = copy.deepcopy(model)  # independent of what happens to the user's model from now on
        return lambda: copy.deepcopy(start)
    if not callable(model):
        raise UsageError(f"model must be a torch.nn.Module or a function that returns one, got {type(model).__name__}.")

    def create() -> nn.Module:
        created = model()
        if not isinstance(created, nn.Module):
            raise UsageError(f"The model function must return a torch.nn.Module, got {type(created).__name__}.")
        return created

    return create
