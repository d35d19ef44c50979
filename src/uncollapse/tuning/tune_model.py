"""Search for a cure in your own training loop: which one, where and how strong, by your own figure."""

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
    """What a search has found.

    best: the trial with the best figure; trial 0, which has no cure, if none is better. trials: all of them, in their
    order. attach_line: the line that puts the best cure into the model. mattered: the share of the differences between
    trials that each parameter explains, as far as they can tell.
    """

    best: TrialResult
    trials: tuple[TrialResult, ...]
    attach_line: str
    better: Better
    mattered: Mapping[str, float] = field(default_factory=dict)
    space: Sequence[Mapping[str, Any]] = ()

    @property
    def baseline(self) -> TrialResult:
        """The trial without a cure."""
        return self.trials[0]

    def report(self, path: str | Path, *, title: str = "Tuning") -> Path:
        """Write a page with what mattered, how it went, and all trials."""
        from uncollapse.tuning.search_page import SearchReport, write_search_page

        return write_search_page(
            SearchReport(
                title, "figure", self.better, self.trials, self.space, self.mattered, self.attach_line, (str(self),)
            ),
            path,
        )

    def __str__(self) -> str:
        without = f"without a cure {_figure(self.baseline)}"
        if self.best.number == 0:
            return f"No cure was better than none, over {len(self.trials)} trials: {without}."
        words = f"trial {self.best.number} of {len(self.trials)}, {self.best.describe()}"
        return f"Best: {words}: {_figure(self.best)}, {without}."


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
    """Search for the cure, its place and its strength that make your own training end best.

    Each trial gets a copy of the model with a cure attached, and `train_fn` trains and judges it; your model is never
    changed. Trial 0 has no cure, and trial 1 what one would take by default; Optuna chooses the others by what came out
    well. Judge on validation data: what was chosen on test data says nothing about new data.

    Args:
        model: the model at its start, or a function that makes one.
        train_fn: `train_fn(model, trial)` trains the model in place and returns its figure on validation. It may call
            `trial.report(step, value)` after each epoch, which ends trials that are far behind. Make the optimizer in
            it: the cure may have parameters. A figure that is NaN or infinite counts as failed.
        cures: names, one or several.
        scale, temperature: a pair of numbers is a range, searched by factors; a list has values to choose from; a
            number is taken as it is; None leaves it to the cure. Cures that take none are not given any.
        at, layers: a list has places, or choices of blocks, to choose from; one of them is taken as it is; None is
            `attach`'s own. See `attach` for what they can be.
        trials: in all, those of an earlier call on the same study included.
        direction: "maximize" or "minimize" the figure.
        study: a folder; a later call with the same arguments goes on there. None keeps the search in memory.
        seed: of the search, and of the random numbers of torch at the start of each trial.
        jobs: trials at a time, in threads. With several, random numbers are shared, and results vary.
        pruner: "median" stops trials that are behind the median of others, "hyperband", or "none".
        options: more arguments of `attach`, the same for all trials, such as modules="blocks.*".

    Returns:
        The best trial, the line to attach its cure, and all trials.

    >>> import torch, uncollapse as uc
    >>> _ = torch.manual_seed(0)
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    >>> x = torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(0))
    >>> def train(model, trial):  # no training here, only a figure: how unlike the tokens are
    ...     with torch.no_grad():
    ...         return 1 - float(uc.mean_cosine(model.eval()(x)).mean())
    >>> found = uc.tune(model, train, scale=[0.1, 1.0], at="attention.residual", trials=3)
    >>> found.attach_line
    'uc.attach(model, "contra_norm", scale=1.0, at="attention.residual")'
    >>> found.best.value > found.baseline.value
    True
    """
    if direction not in ("maximize", "minimize"):
        raise UsageError(f'direction is "maximize" or "minimize", got {direction!r}.')
    if trials < 1 or jobs < 1:
        raise UsageError(f"trials and jobs are 1 or more, got {trials} and {jobs}.")
    better: Better = "higher" if direction == "maximize" else "lower"
    names = (cures,) if isinstance(cures, str) else tuple(cures)
    arguments = AttachSpace(attach_dimensions(names, scale, temperature, at, layers), names, options)
    fresh = _maker(model)
    with fixed_seed(seed):
        first = fresh()
    arguments.check(first)
    facts = {"direction": direction, "pruner": pruner, "seed": seed, **arguments.facts(first)}
    folder = None if study is None else Path(study)
    with open_study(folder, facts, better=better, seed=seed, pruning=Pruning(pruner)) as kept:
        TrialLoop(kept, arguments, fresh, train_fn, trials, seed).run(jobs)
        return _tuned(kept, arguments, better)


def _tuned(study: Study, arguments: AttachSpace, better: Better) -> Tuned:
    tried = study.trials
    won = best_trial(tried, better)
    if won is None:
        raise UsageError(f"None of the {len(tried)} trials gave a number. The first: {tried[0].why or 'not done'}.")
    line = arguments.line(won.settings) if won.number else "# no cure was better than none"
    return Tuned(won, tuple(tried), line, better, study.importances(), spaces.facts(arguments.space))


def _figure(tried: TrialResult) -> str:
    return "not a number" if tried.value is None else f"{tried.value:.4g}"


def _maker(model: Any) -> Callable[[], nn.Module]:
    """A function that gives a model of its own each time."""
    if isinstance(model, nn.Module):
        start = copy.deepcopy(model)  # whatever happens to the user's own from now on
        return lambda: copy.deepcopy(start)
    if not callable(model):
        raise UsageError(f"model is a torch.nn.Module or a function that makes one, got {type(model).__name__}.")

    def make() -> nn.Module:
        made = model()
        if not isinstance(made, nn.Module):
            raise UsageError(f"The function for the model gave a {type(made).__name__}, no torch.nn.Module.")
        return made

    return make
