"""The one place that knows Keras 3 from tf_keras from Keras 2: which optimizer is whose, and where each keeps what.

Everything here looks at the classes of objects it is given, so no Keras is imported that the program has not imported.
"""

from __future__ import annotations

from hvdx.keras_api.changing import change_method, hooked_class
from hvdx.keras_api.families import (
    Family,
    base_names,
    classes_with_apply_gradients_of_keras_2,
    classes_with_apply_of_keras_3,
    family,
    inner_optimizer,
    is_loss_scale_optimizer,
    is_optimizer,
    loss_scale_class_of_keras_3,
    loss_scale_classes_of_keras_2,
    model_family,
    tensorflow_trainer_class_of_keras_3,
    trainer_class_of_keras_3,
)
from hvdx.keras_api.models import (
    arrays_of_running_fit,
    check_optimizer_of_model,
    inputs_of,
    is_built,
    layers,
    loss_weight,
    model_classes,
    overrides_train_step,
    rate_name,
    result_hook,
    seed_states,
    set_initial_epoch,
    set_seeds_in_code,
    steps_per_execution,
    without_optionals,
)
from hvdx.keras_api.optimizers import (
    build_optimizer,
    learning_rate,
    learning_rate_is_number,
    optimizer_is_built,
    optimizer_variables,
    optimizers,
    set_learning_rate,
    velocities,
)
from hvdx.keras_api.seeds import index_of_seed, seed_of_rank

__all__ = [
    "Family",
    "arrays_of_running_fit",
    "base_names",
    "build_optimizer",
    "change_method",
    "check_optimizer_of_model",
    "classes_with_apply_gradients_of_keras_2",
    "classes_with_apply_of_keras_3",
    "family",
    "hooked_class",
    "index_of_seed",
    "inner_optimizer",
    "inputs_of",
    "is_built",
    "is_loss_scale_optimizer",
    "is_optimizer",
    "layers",
    "learning_rate",
    "learning_rate_is_number",
    "loss_scale_class_of_keras_3",
    "loss_scale_classes_of_keras_2",
    "loss_weight",
    "model_classes",
    "model_family",
    "optimizer_is_built",
    "optimizer_variables",
    "optimizers",
    "overrides_train_step",
    "rate_name",
    "result_hook",
    "seed_of_rank",
    "seed_states",
    "set_initial_epoch",
    "set_learning_rate",
    "set_seeds_in_code",
    "steps_per_execution",
    "tensorflow_trainer_class_of_keras_3",
    "trainer_class_of_keras_3",
    "velocities",
    "without_optionals",
]
