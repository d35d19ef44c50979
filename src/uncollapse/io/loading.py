"""Context managers for loading models: silence other libraries, and draw weights from a fixed seed."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch

LOGGERS = ("huggingface_hub", "timm", "torch_geometric")


@contextmanager
def silence_libraries(transformers: Any = None) -> Iterator[None]:
    """Hide progress bars, log lines below errors and warnings; restore everything afterwards."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    log = None if transformers is None else transformers.utils.logging
    verbosity, bars = (log.get_verbosity(), log.is_progress_bar_enabled()) if log else (0, False)
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        if log:
            log.set_verbosity_error()
            log.disable_progress_bar()
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # some libraries write there directly
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if log:
            log.set_verbosity(verbosity)
            if bars:
                log.enable_progress_bar()


@contextmanager
def fixed_seed(seed: int = 0) -> Iterator[None]:
    """Draw random numbers from a seed inside the context; the random state outside does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        yield
