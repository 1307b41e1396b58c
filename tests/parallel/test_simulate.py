"""The rounds of a simulated step are those of its layout."""

from itertools import product

import pytest

from onchip.parallel.simulate import LAYOUTS, RingStep, rounds


def positions(layout, num_devices, chunk):
    """The tokens of each rank, by the definition of the layout."""
    tokens = list(range(num_devices * chunk))
    if layout == "contiguous":
        return [tokens[r * chunk : (r + 1) * chunk] for r in range(num_devices)]
    if layout == "striped":
        return [tokens[r::num_devices] for r in range(num_devices)]
    half = chunk // 2
    piece = lambda i: tokens[i * half : (i + 1) * half]
    return [piece(r) + piece(2 * num_devices - 1 - r) for r in range(num_devices)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
def test_the_pairs_of_a_round_are_the_visible_ones(layout, num_devices):
    chunk = 6
    step = RingStep(num_devices * chunk, num_devices, layout)
    held, kinds = positions(layout, num_devices, chunk), rounds(step)
    for r, source in product(range(num_devices), repeat=2):
        kind = kinds[0 if source == r else 1 if source < r else 2]
        assert kind.pairs == sum(k <= q for q in held[r] for k in held[source])


def balance(step):
    """Pairs of the busiest device over the mean."""
    own, lower, upper = (r.pairs for r in rounds(step))
    last = step.num_devices - 1
    return (own + last * max(lower, upper)) / (own + last * (lower + upper) / 2)


@pytest.mark.parametrize("num_devices", [2, 4, 8, 64])
def test_contiguous_has_two_minus_one_over_p_of_the_mean_work(num_devices):
    step = RingStep(num_devices * 10**6, num_devices, "contiguous")
    assert balance(step) == pytest.approx(2 - 1 / num_devices, rel=1e-5)
    assert balance(step._replace(layout="zigzag")) == 1
    assert balance(step._replace(layout="striped")) == pytest.approx(1, rel=2e-6)
