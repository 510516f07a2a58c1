"""Exporters: what train_and_evaluate does with a model after each evaluation."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigurationError

from .checks import check_positive, parameters_of


class Exporter(abc.ABC):
    """Something that writes an Estimator to a directory."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the directory below which it writes."""

    @abc.abstractmethod
    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Any, is_the_final_export: bool
    ) -> Any:
        """Export, or decide not to.

        Args:
            estimator: the Estimator.
            export_path: directory to write below.
            checkpoint_path: the checkpoint that was evaluated.
            eval_result: what `evaluate` returned for it.
            is_the_final_export: whether the training has ended.

        Returns:
            The path of what was written; None if nothing was.
        """


class _SavedModelExporter(Exporter):
    """Writes a SavedModel each time it is asked, and keeps a number of them."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any] | None,
        assets_extra: dict[str, str] | None,
        as_text: bool,
        exports_to_keep: int | None,
    ) -> None:
        check_positive(exports_to_keep, "exports_to_keep")
        self._name = name
        self._serving_input_receiver_fn = serving_input_receiver_fn
        self._assets_extra = assets_extra
        self._as_text = as_text
        self._exports_to_keep = exports_to_keep

    @property
    def name(self) -> str:
        return self._name

    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Any, is_the_final_export: bool
    ) -> Any:
        exported = estimator.export_saved_model(
            export_path,
            self._serving_input_receiver_fn,
            assets_extra=self._assets_extra,
            as_text=self._as_text,
            checkpoint_path=checkpoint_path,
        )
        if self._exports_to_keep is not None:
            _remove_old_exports(export_path, self._exports_to_keep)
        return exported


class FinalExporter(_SavedModelExporter):
    """Writes one SavedModel, when the training has ended.

    Args:
        name: the directory below `model_dir/export`.
        serving_input_receiver_fn: function that returns a `ServingInputReceiver`.
        assets_extra: dict of paths below `assets.extra` to the files to copy there.
        as_text: write the graph as text.
    """

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: dict[str, str] | None = None,
        as_text: bool = False,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep=None)

    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Any, is_the_final_export: bool
    ) -> Any:
        if not is_the_final_export:
            return None
        return super().export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)


class LatestExporter(_SavedModelExporter):
    """Writes a SavedModel after each evaluation and removes old ones.

    Args:
        name: the directory below `model_dir/export`.
        serving_input_receiver_fn: function that returns a `ServingInputReceiver`.
        assets_extra: dict of paths below `assets.extra` to the files to copy there.
        as_text: write the graph as text.
        exports_to_keep: how many stay; None for all.
    """

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: dict[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)


def loss_is_smaller(best_eval_result: Any, current_eval_result: Any) -> bool:
    """Return whether the loss has become smaller.

    Raises:
        ConfigurationError: one of the results has no loss.
    """
    for name, result in (("best", best_eval_result), ("current", current_eval_result)):
        if not result or "loss" not in result:
            raise ConfigurationError(
                f"The {name} evaluation has no 'loss' to compare by; received {result!r}. "
                "Give BestExporter a compare_fn that reads another metric."
            )
    return bool(best_eval_result["loss"] > current_eval_result["loss"])


class BestExporter(_SavedModelExporter):
    """Writes a SavedModel after each evaluation that is better than all before.

    As with tf.estimator, the first evaluation that an exporter sees is exported in any case and is what the next ones
    are compared with. An exporter that goes on to another model_dir compares with the best evaluation in the event
    files there.

    Args:
        name: the directory below `model_dir/export`.
        serving_input_receiver_fn: function that returns a `ServingInputReceiver`.
        event_file_pattern: the event files of evaluations, relative to model_dir; None reads none.
        compare_fn: function of `best_eval_result` and `current_eval_result`: whether the current one is better.
        assets_extra: dict of paths below `assets.extra` to the files to copy there.
        as_text: write the graph as text.
        exports_to_keep: how many stay; None for all.

    Raises:
        ConfigurationError: a compare_fn with other arguments, or an exports_to_keep that is not above zero.
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: Callable[[], Any] | None = None,
        event_file_pattern: str | None = "eval/*.tfevents.*",
        compare_fn: Callable[..., bool] = loss_is_smaller,
        assets_extra: dict[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)
        if not callable(compare_fn) or set(parameters_of(compare_fn)) != {"best_eval_result", "current_eval_result"}:
            raise ConfigurationError(
                "compare_fn must be a function of best_eval_result and current_eval_result, called by these names; "
                f"received {compare_fn!r}."
            )
        self._compare_fn = compare_fn
        self._event_file_pattern = event_file_pattern
        self._model_dir: str | None = None
        self._best: Any = None
        self._has_exported = False

    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Any, is_the_final_export: bool
    ) -> Any:
        if self._event_file_pattern and self._model_dir != estimator.model_dir:
            self._model_dir = estimator.model_dir
            self._best = self._best_of_files(os.path.join(estimator.model_dir, self._event_file_pattern))
        if (
            self._has_exported
            and self._best is not None
            and not self._compare_fn(best_eval_result=self._best, current_eval_result=eval_result)
        ):
            return None
        self._best = eval_result
        exported = super().export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)
        self._has_exported = True
        return exported

    def _best_of_files(self, pattern: str) -> Any:
        """Return the best evaluation of those in the event files, None if there are none."""
        best = None
        for path in tf.io.gfile.glob(pattern):
            for event in tf.compat.v1.train.summary_iterator(path):
                values = event.summary.value if event.HasField("summary") else ()
                result = {value.tag: value.simple_value for value in values if value.HasField("simple_value")}
                if result and (best is None or self._compare_fn(best_eval_result=best, current_eval_result=result)):
                    best = result
        return best


def _remove_old_exports(base: str, keep: int) -> None:
    """Remove all exports but the newest; they are named by the second in which they were made."""
    names = [name.rstrip("/") for name in tf.io.gfile.listdir(base)]
    stamps = sorted(name for name in names if len(name) == 10 and name.isdigit())
    for name in stamps[:-keep]:
        try:
            tf.io.gfile.rmtree(os.path.join(base, name))
        except tf.errors.NotFoundError:
            tf.compat.v1.logging.warn("%s was gone before it could be removed.", os.path.join(base, name))
