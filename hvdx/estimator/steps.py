"""Training in step: before every step the ranks agree that all go on, and stop between steps to evaluate together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx import world
from hvdx.errors import CollectiveError, ConfigurationError
from hvdx.estimator.failures import marked_as, on_all_ranks
from hvdx.estimator.lookahead import Lookahead
from hvdx.logs import log

v1 = tf.compat.v1
_MEANING_SOMETHING_TO_A_SESSION = (
    StopIteration,
    tf.errors.OutOfRangeError,
    tf.errors.AbortedError,
    tf.errors.UnavailableError,
)
_WHAT = "whether all ranks make another training step"
_NO, _YES, _NEVER = 0, 1, 2


class StepAgreement(v1.train.SessionRunHook):  # type: ignore[name-defined]
    """Makes all ranks stop after the same step, whoever has a reason to stop; collective, once a step.

    A rank whose data ends or whose hooks ask for a stop says so in the exchange before its next step, or in the one it
    makes as its session ends; the others then end as at the end of their own data.

    Args:
        lookahead: returns what is known of the next batch, once the graph is built.
        evaluate: called on all ranks together, between two steps, when rank 0 wants an evaluation.
        wants_evaluation: asked on rank 0 before every step.
    """

    def __init__(
        self, lookahead: Callable[[], Lookahead], evaluate: Callable[[], None], wants_evaluation: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._read = lookahead
        self._evaluate = evaluate
        self._wants_evaluation = wants_evaluation
        self._lookahead = Lookahead()
        self._coord: Any = None
        self._is_first = True
        self._ended = False

    def begin(self) -> None:
        self._lookahead = self._read()
        self._coord = None

    def after_create_session(self, session: Any, coord: Any) -> None:
        if self._coord is not None:
            raise CollectiveError(
                "TensorFlow lost the session of this rank and made another; the other ranks cannot go back with it. "
                "Start the job again: it resumes from the last checkpoint."
            )
        self._coord = coord

    def before_run(self, run_context: Any) -> Any:
        # Not in after_create_session: hooks that come later may start the iterator there.
        has_another = self._lookahead.has_another(run_context.session, self._coord)
        goes_on = _YES if has_another else _NEVER if self._is_first else _NO
        flags = self._exchange(goes_on, world.rank() == 0 and self._wants_evaluation())
        self._is_first = False
        _check_first_batches(flags[:, 0])
        if flags[:, 1].any():
            self._evaluate_between_steps()
        if (flags[:, 0] != _YES).any():
            self._ended = True
            ranks = ", ".join(str(rank) for rank in np.flatnonzero(flags[:, 0] != _YES))
            log.info("training ends here on all ranks: no further step on rank(s) %s", ranks)
            raise tf.errors.OutOfRangeError(None, None, f"Training has ended on rank(s) {ranks}.")
        return self._lookahead.arguments()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._lookahead.after(run_values.results)

    def end(self, session: Any) -> None:
        if not self._ended:
            self._ended = True
            flags = self._exchange(_NO, False)
            if flags[:, 1].any():  # rank 0 was about to make another step, and first an evaluation
                self._evaluate_between_steps()

    def _evaluate_between_steps(self) -> None:
        """Evaluate; what fails must not look to the training session like the end of its data, or a lost machine."""
        try:
            self._evaluate()
        except _MEANING_SOMETHING_TO_A_SESSION as error:
            raise marked_as(
                error, CollectiveError(f"The evaluation failed: {type(error).__name__}: {error}")
            ) from error

    def _exchange(self, goes_on: int, evaluates: bool) -> np.ndarray:
        """Return every rank's two flags: makes another step (yes, no, had no data at all), wants an evaluation."""
        payloads = world.communicator().allgather_bytes(bytes([goes_on, evaluates]), _WHAT)
        return np.array([list(payload) for payload in payloads])


def _check_first_batches(flags: np.ndarray) -> None:
    """Refuse training for which some ranks had data and some never had any; every rank raises the same error."""
    without = [str(rank) for rank in np.flatnonzero(flags == _NEVER)]
    if without and (flags == _YES).any():
        raise on_all_ranks(
            ConfigurationError(
                f"The input_fn of training gave no batch on rank(s) {', '.join(without)}, and gave some on the "
                "others. Every rank needs at least one batch: give the ranks equal parts, with an "
                "input_fn(input_context) or hvdx.estimator.shard_input_fn."
            )
        )
