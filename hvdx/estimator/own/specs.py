"""What train_and_evaluate is told: TrainSpec for the training, EvalSpec for evaluation and export."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hvdx.errors import ConfigurationError

from .checks import check_hooks, check_listeners, check_positive
from .exporters import Exporter


class _TrainFields(NamedTuple):
    input_fn: Callable[..., Any]
    max_steps: int | None
    hooks: tuple[Any, ...]
    saving_listeners: tuple[Any, ...]


class TrainSpec(_TrainFields):
    """The training part.

    Args:
        input_fn: gives the training data.
        max_steps: the global step at which training ends; None trains to the end of the input.
        hooks: session hooks.
        saving_listeners: told about each checkpoint.

    Raises:
        ConfigurationError: one of them is not usable.
    """

    __slots__ = ()

    def __new__(
        cls,
        input_fn: Callable[..., Any],
        max_steps: int | None = None,
        hooks: Iterable[Any] | None = None,
        saving_listeners: Iterable[Any] | None = None,
    ) -> TrainSpec:
        _check_input_fn(input_fn, "TrainSpec")
        check_positive(max_steps, "max_steps of a TrainSpec")
        listeners = check_listeners(saving_listeners, "a TrainSpec")
        return super().__new__(cls, input_fn, max_steps, check_hooks(hooks, "a TrainSpec"), listeners)


class _EvalFields(NamedTuple):
    input_fn: Callable[..., Any]
    steps: int | None
    name: str | None
    hooks: tuple[Any, ...]
    exporters: tuple[Exporter, ...]
    start_delay_secs: float
    throttle_secs: float


class EvalSpec(_EvalFields):
    """The evaluation part.

    Args:
        input_fn: gives the evaluation data.
        steps: batches of one evaluation; None for all of the input.
        name: of the evaluation, when there are several; part of the directory of its summaries.
        hooks: session hooks.
        exporters: one exporter or several with different names, run after each evaluation.
        start_delay_secs: seconds before the first evaluation.
        throttle_secs: least seconds between the starts of two evaluations.

    Raises:
        ConfigurationError: one of them is not usable.
    """

    __slots__ = ()

    def __new__(
        cls,
        input_fn: Callable[..., Any],
        steps: int | None = 100,
        name: str | None = None,
        hooks: Iterable[Any] | None = None,
        exporters: Any = None,
        start_delay_secs: float = 120,
        throttle_secs: float = 600,
    ) -> EvalSpec:
        _check_input_fn(input_fn, "EvalSpec")
        check_positive(steps, "steps of an EvalSpec")
        if name is not None and not isinstance(name, str):
            raise ConfigurationError(f"name of an EvalSpec must be a string; received {name!r}.")
        for seconds, what in ((start_delay_secs, "start_delay_secs"), (throttle_secs, "throttle_secs")):
            if seconds < 0:
                raise ConfigurationError(f"{what} of an EvalSpec must be at least 0; received {seconds!r}.")
        checked = check_hooks(hooks, "an EvalSpec")
        return super().__new__(
            cls, input_fn, steps, name, checked, _checked_exporters(exporters), start_delay_secs, throttle_secs
        )


def _check_input_fn(input_fn: Any, owner: str) -> None:
    if not callable(input_fn):
        raise ConfigurationError(f"input_fn of a {owner} must be a function; received {input_fn!r}.")


def _checked_exporters(exporters: Any) -> tuple[Exporter, ...]:
    if not exporters:
        return ()
    if isinstance(exporters, Exporter):
        exporters = (exporters,)
    try:
        found = tuple(exporters)
    except TypeError:
        raise ConfigurationError(f"exporters must be an Exporter or a list of them; received {exporters!r}.") from None
    names = []
    for exporter in found:
        if not isinstance(exporter, Exporter):
            raise ConfigurationError(f"exporters must be an Exporter or a list of them; received {exporter!r} in it.")
        if not isinstance(exporter.name, str) or not exporter.name:
            raise ConfigurationError(f"An exporter needs a name, which is its directory; received {exporter.name!r}.")
        names.append(exporter.name)
    if len(set(names)) != len(names):
        raise ConfigurationError(f"The exporters need different names, which are their directories; received {names}.")
    return found
