"""examples/meanflow.py: the loss is that of plain operations, and one step draws circles."""

import meanflow
import pytest
import torch
from meanflow import POINTS, MeanVelocity, circles, energy_distance, errors_of, sample, train

import onchip
import onchip.testing as ot


def test_circles_are_round():
    sets = circles(50, torch.Generator().manual_seed(0))
    centres = sets.mean(1, keepdim=True)
    distances = (sets - centres).norm(dim=-1)
    assert sets.shape == (50, POINTS, 2)
    torch.testing.assert_close(distances, distances[:, :1].expand_as(distances))
    assert 0.4 <= distances.min() < 0.6 and 1.0 < distances.max() <= 1.2


def test_the_energy_distance_is_zero_between_equal_distributions():
    generator = torch.Generator().manual_seed(0)
    one, other = circles(400, generator), circles(400, generator)
    assert abs(energy_distance(one, other)) < 0.02
    assert energy_distance(one + 1, other) > 0.3
    assert energy_distance(one[:1].expand(400, -1, -1), other) > 0.3  # no variety


@pytest.mark.parametrize("mean_share", [0.0, 0.5])
def test_errors_and_gradients_are_those_of_plain_operations(mean_share):
    """The tangent goes through attention, and the gradient through the result of the jvp."""
    found = []
    for attention in (onchip.attention, ot.unfused):
        torch.manual_seed(1)
        model, generator = MeanVelocity(attention), torch.Generator().manual_seed(2)
        errors = errors_of(model, circles(8, generator), generator, mean_share)
        gradients = torch.autograd.grad(errors.mean(), list(model.parameters()))
        found.append((errors.detach(), torch.cat([g.flatten() for g in gradients])))
    (errors, gradients), (want, want_gradients) = found
    torch.testing.assert_close(errors, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, want_gradients, rtol=1e-3, atol=1e-4)


def test_sampling_follows_the_velocity():
    """A model whose mean velocity is right for one circle ends at it, in any number of steps."""
    generator = torch.Generator().manual_seed(0)
    target = circles(1, generator)
    noise = torch.randn(6, POINTS, 2, generator=generator)
    model = lambda z, r, t: (z - target) / t[:, None, None]  # of the straight lines to it
    for steps in (1, 2, 7):
        torch.testing.assert_close(sample(model, noise, steps), target.expand_as(noise))


@pytest.mark.slow
def test_one_step_of_meanflow_is_nearer_than_one_of_flow_matching():
    generator = torch.Generator().manual_seed(1)
    noise, real = torch.randn(512, POINTS, 2, generator=generator), circles(512, generator)
    distances = [
        energy_distance(sample(train(share, 300, say=lambda _: None), noise), real)
        for share in (0.0, meanflow.MEAN_SHARE)
    ]
    assert energy_distance(noise, real) > 0.4
    assert distances[1] < 0.7 * distances[0] < 0.15


def test_the_program(capsys, tmp_path):
    file = tmp_path / "circles.svg"
    meanflow.main(["--steps", "3", "--plot", str(file)])
    printed = capsys.readouterr().out
    assert printed.count("samples in") == 6 and "energy distance of noise" in printed
    assert "<svg" in file.read_text()
