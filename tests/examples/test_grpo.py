"""examples/grpo.py: ratios are exactly 1 at the first update of a batch, in the reproducible mode
alone, and the reward rises.
"""

import grpo
import pytest
import torch
from grpo import Settings, advantages_of, draw, reward_of, run

SMALL = Settings(samples=4, new_tokens=16, batches=3)


def test_the_reward_is_the_share_of_words_that_begin_with_s():
    assert reward_of("And she saw Simon") == 0.75
    assert reward_of("") == reward_of("no") == 0.0


def test_advantages_are_relative_to_the_same_prompt():
    got = advantages_of(torch.tensor([[0.0, 1.0], [5.0, 5.0]]))
    assert got[0, 0] == -got[0, 1] < 0 and not got[1].any()


def test_first_ratios_are_exactly_one_in_the_mode_alone(tmp_path):
    histories = {mode: run(SMALL, mode, say=lambda line: None) for mode in (True, False)}
    first = {mode: [b.deviations[0] for b in batches] for mode, batches in histories.items()}
    assert first[True] == [0.0, 0.0, 0.0]
    assert all(0 < deviation < 1e-3 for deviation in first[False])
    for batches in histories.values():
        assert all(b.deviations[1] > 1e-3 for b in batches)
    draw(histories, tmp_path / "ratios.svg")
    assert "<svg" in (tmp_path / "ratios.svg").read_text()


@pytest.mark.slow
def test_the_reward_rises():
    rewards = [batch.reward for batch in run(Settings(batches=7), True, say=lambda line: None)]
    assert rewards[-1] > 4 * rewards[0] > 0


def test_the_command_writes_a_plot(tmp_path, monkeypatch, capsys):
    file = tmp_path / "ratios.svg"
    arguments = ["grpo.py", "--lr", "1e-3", "--batches", "1", "--plot", str(file)]
    monkeypatch.setattr("sys.argv", arguments)
    grpo.main()
    assert file.is_file() and capsys.readouterr().out.count("batch 1") == 2
