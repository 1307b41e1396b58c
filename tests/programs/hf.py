"""Tiny random models, data and a tokenizer for the programs of Hugging Face, and the comparison of
every number that their training logs.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

import pytest
import torch

from onchip.integrations import transformers as adapter
from tests.integrations import families
from tests.models.foreign_models import quiet

_TIMES = ("runtime", "per_second", "time", "flos")
SMALL = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
SETTINGS = SMALL | {
    "disable_tqdm": True,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
}


def model(name, kind, head, **fields):
    """A model of transformers with the attention implementation `name`. Without dropout, because
    each implementation has its own random generators.
    """
    import transformers

    quiet()
    adapter.register()
    small = families._SMALL | families.DECODERS[kind] if kind in families.DECODERS else {}
    small = small or families.OTHERS[kind]
    config = transformers.CONFIG_MAPPING[kind](**small | fields)
    for field, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in field or "pdrop" in field):
            setattr(config, field, 0.0)
    torch.manual_seed(0)
    made = getattr(transformers, head)._from_config(config, attn_implementation=name)
    assert made.config._attn_implementation == name
    return made


def train_and_log(trainer):
    """All numbers that a training logs, except times."""
    trainer.train()
    rows = [
        {name: value for name, value in row.items() if not any(time in name for time in _TIMES)}
        for row in trainer.state.log_history
    ]
    assert sum("loss" in row for row in rows) == trainer.args.max_steps, rows
    return rows


def assert_same_numbers(ours, theirs):
    """The tolerance is for what two steps in fp32 round differently."""
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        assert row == pytest.approx(expected, rel=2e-4, abs=2e-6)


def tokenizer():
    """Words w0 to w130. The first three are padding, beginning and end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def text(length, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(4, 131, (length,), generator=generator)
    return " ".join(f"w{number}" for number in numbers.tolist())
