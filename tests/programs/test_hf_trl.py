"""TRL's trainers: two steps with onchip log the same numbers as two steps with SDPA."""

import pytest
import torch

from tests.programs import hf

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.programs

LENGTHS = (9, 30, 17, 5, 40, 12, 23, 8)


@pytest.fixture
def train(tmp_path):
    """train(trainer, config, data, name, **settings) trains a tiny Llama, which TRL loads from a
    folder with the attention implementation `name`, and returns the logged numbers.
    """
    folder = tmp_path / "model"
    hf.model("eager", "llama", "LlamaForCausalLM").save_pretrained(folder)
    hf.tokenizer().save_pretrained(folder)

    def run(trainer, config, data, name, **settings):
        chosen = {"attn_implementation": name, "dtype": torch.float32}
        settings |= {"model_init_kwargs": chosen, "bf16": False}
        settings = config(str(tmp_path / "out"), **hf.SETTINGS | settings)
        rewards = {"reward_funcs": reward} if trainer is trl.GRPOTrainer else {}
        data = datasets.Dataset.from_list(data)
        made = trainer(str(folder), args=settings, train_dataset=data, **rewards)
        assert made.model.config._attn_implementation == name
        torch.manual_seed(7)
        return hf.train_and_log(made)

    return run


def reward(completions, **_):
    return [float(len(set(text.split()))) for text in completions]


SFT = {
    "padded": {},
    "packed": {"packing": True, "max_length": 48},
    "packed, cut": {"packing": True, "max_length": 48, "packing_strategy": "wrapped"},
    "padding-free": {"padding_free": True, "max_length": None},
}


@pytest.mark.parametrize("settings", SFT.values(), ids=SFT)
def test_supervised(settings, train):
    data = [{"text": hf.text(length, seed)} for seed, length in enumerate(LENGTHS)]
    run = lambda name: train(trl.SFTTrainer, trl.SFTConfig, data, name, **settings)
    hf.assert_same_numbers(run("onchip"), run("sdpa"))


def test_preferences(train):
    names = ("prompt", "chosen", "rejected")
    data = [
        {name: hf.text(length + i, 10 * length + i) for i, name in enumerate(names)}
        for length in LENGTHS
    ]
    run = lambda name: train(trl.DPOTrainer, trl.DPOConfig, data, name)
    hf.assert_same_numbers(run("onchip"), run("sdpa"))


def test_rewards_of_samples(train):
    data = [{"prompt": hf.text(length, length)} for length in LENGTHS]
    settings = {"num_generations": 2, "max_completion_length": 8, "beta": 0.1}
    run = lambda name: train(trl.GRPOTrainer, trl.GRPOConfig, data, name, **settings)
    hf.assert_same_numbers(run("onchip"), run("sdpa"))
