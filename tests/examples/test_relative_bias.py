"""examples/relative_bias.py: T5's buckets, and a bias that learns which distance matters."""

import pytest
import relative_bias
import torch
from relative_bias import BUCKETS, MAX_DISTANCE, Model, buckets_of, loss_and_share, train
from transformers.models.t5.modeling_t5 import T5Attention

import onchip.testing as ot


def test_buckets_are_those_of_t5():
    distance = torch.arange(-5, 300)
    theirs = T5Attention._relative_position_bucket(
        -distance, bidirectional=False, num_buckets=BUCKETS, max_distance=MAX_DISTANCE
    )
    assert torch.equal(buckets_of(distance), theirs)


def test_the_gradient_of_the_table_is_that_of_the_oracle():
    """Summed over the batch and over the cells of a bucket."""
    torch.manual_seed(1)
    model, tokens = Model(), torch.randint(16, (3, 20))
    with torch.no_grad():
        model.bias.table.normal_()
    table = model.bias.table

    def attend(attention):
        x = model.embed(tokens)
        q, k, v = model.qkv(x).unflatten(-1, (6, 16)).chunk(3, dim=-2)
        return attention(q, k, v, causal=True, bias=model.bias(20))

    weights = torch.randn(3, 20, 2, 16)
    (got,) = torch.autograd.grad((attend(relative_bias.onchip.attention) * weights).sum(), table)
    (want,) = torch.autograd.grad((attend(ot.unfused) * weights).sum(), table)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("distance", [3, 11])
def test_it_learns_the_distance(distance):
    model, share = train(distance, 150, say=lambda _: None)
    assert share > 0.95 and model.bias.table.argmax(-1).tolist() == [distance, distance]


def test_without_the_bias_it_cannot_be_learnt():
    model = Model()
    model.bias.table.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    optimizer, share = torch.optim.Adam(model.parameters(), lr=1e-2), 1.0
    for _ in range(60):
        loss, share = loss_and_share(model, 5, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert share < 0.3


def test_the_program(capsys, tmp_path):
    relative_bias.main(["--distance", "2", "--steps", "60", "--plot", str(tmp_path / "bias.svg")])
    printed = capsys.readouterr().out
    assert "held out: right" in printed and "head 1:" in printed
    assert (tmp_path / "bias.svg").read_text().count("<svg") == 1
    with pytest.raises(SystemExit):
        relative_bias.main(["--distance", "0"])
    assert "--distance must be 1 to 60" in capsys.readouterr().err
