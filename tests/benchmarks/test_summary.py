"""From seconds to statements: pairing, spread, the better way, and when a section says nothing."""

from __future__ import annotations

import pytest

from benchmarks.summary import Quartiles, Section, exchange_share, images_per_second, quartiles
from tests.benchmarks.sections import section


def test_a_round_is_the_median_of_its_calls() -> None:
    made = Section("2 ranks", "x", 2, seconds={"a": [[1.0, 9.0, 2.0], [4.0, 4.0, 4.0]]})
    assert made.rounds("a") == [2.0, 4.0]
    assert made.time("a") == (2.5, 3.0, 3.5)


def test_ratios_are_paired_by_round() -> None:
    # Each round is twice as slow as the one before, for both: the ratio does not see it, the times do.
    made = section({"a": [1, 2, 4, 8], "b": [2, 4, 8, 16]})
    assert made.ratio("b", "a") == (2, 2, 2)
    assert made.unsteady() == ["a", "b"]


def test_what_an_empty_call_costs_is_taken_off_both_sides() -> None:
    made = section({"a": [1.5, 1.5], "b": [3, 5], "empty": [1, 1]})
    assert made.ratio("a", "b", minus="empty") == quartiles([0.25, 0.125])


def test_the_fastest_way_of_several_peers_counts() -> None:
    made = section({"Horovod MPICH (grouped)": [3, 3], "Horovod MPICH (one by one)": [2, 2], "Horovod": [1, 1]})
    assert made.ways("Horovod MPICH") == ["Horovod MPICH (grouped)", "Horovod MPICH (one by one)"]
    assert made.best("Horovod MPICH") == "Horovod MPICH (one by one)"
    assert made.best("Horovod MPICH", "Horovod") == "Horovod"
    assert made.best("Gloo") is None


@pytest.mark.parametrize(("share", "says"), [(0.04, []), (0.2, ["others took 20 % of the machine"])])
def test_what_others_take_of_the_machine_is_noise(share: float, says: list[str]) -> None:
    made = section({"a": [1, 1, 1]})
    made.wall, made.cores, made.own, made.busy = 10, 2, 15, 15 + 20 * share
    assert [reason.split(" while")[0] for reason in made.noise()] == says


def test_too_few_rounds_are_noise() -> None:
    assert section({"a": [1, 1]}).noise() == ["2 round(s) are too few to tell a spread"]
    assert section({}).noise() != []


def test_images_a_second_and_what_the_exchange_takes() -> None:
    times = {
        "fit: hvdx, Keras 3": [0.5, 0.5], "fit: no exchange, Keras 3": [0.4, 0.3], "fit: one process, Keras 3": [0.25],
        "fit: Horovod, tf_keras": [1, 1],
    }  # fmt: skip
    made = section(times, "fit, 2 ranks")
    made.images = 100
    rates = images_per_second(made)
    assert rates["fit: hvdx, Keras 3"] == (400, 400, 400)
    assert rates["fit: one process, Keras 3"].middle == 400
    share = exchange_share(made, "fit: hvdx, Keras 3")
    assert share is not None
    assert share == pytest.approx(Quartiles(0.25, 0.3, 0.35))
    assert exchange_share(made, "fit: one process, Keras 3") is None
    assert exchange_share(made, "fit: Horovod, tf_keras") is None, "tf_keras without an exchange was not measured"
