"""transformers' Trainer: two steps with onchip log the same numbers as two steps with SDPA."""

import pytest
import torch

from tests.integrations import families
from tests.programs import hf

pytest.importorskip("accelerate")

pytestmark = pytest.mark.programs

ROWS = 8
KINDS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "vit": "ViTForImageClassification",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}


def rows(kind, head):
    """Rows of inputs with padding and labels, as a Dataset of torch."""
    if kind in families.DECODERS:
        words = torch.randint(3, 131, (ROWS, 23), generator=torch.Generator().manual_seed(3))
        batch = {"input_ids": words, "attention_mask": families.padding(ROWS, 23, "right")}
    else:
        batch = families.inputs(kind, batch=ROWS)
        batch.pop("decoder_input_ids", None)
    batch["labels"] = labels(batch, head)
    return [{name: t[i] for name, t in batch.items()} for i in range(ROWS)]


def labels(batch, head):
    if "Classification" in head:
        return torch.arange(ROWS) % 2
    generator = torch.Generator().manual_seed(5)
    if "ConditionalGeneration" in head:
        return torch.randint(3, 131, (ROWS, 11), generator=generator)
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


def train(folder, name, kind, head, **settings):
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments(str(folder), **hf.SETTINGS | settings)
    model = hf.model(name, kind, head)
    return hf.train_and_log(Trainer(model, settings, train_dataset=rows(kind, head)))


@pytest.mark.parametrize(("kind", "head"), KINDS.items(), ids=KINDS)
def test_losses_are_those_of_sdpa(kind, head, tmp_path):
    ours, theirs = (train(tmp_path, name, kind, head) for name in ("onchip", "sdpa"))
    hf.assert_same_numbers(ours, theirs)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_classifier_of_sequences(kind, tmp_path):
    head = {"llama": "LlamaForSequenceClassification", "bert": "BertForSequenceClassification"}
    ours, theirs = (train(tmp_path, name, kind, head[kind]) for name in ("onchip", "sdpa"))
    hf.assert_same_numbers(ours, theirs)


def test_accumulated_and_checkpointed(tmp_path):
    """Trainer passes num_items_in_batch to the model, which divides the loss by it."""
    settings = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    run = lambda name: train(tmp_path, name, "llama", "LlamaForCausalLM", **settings)
    hf.assert_same_numbers(run("onchip"), run("sdpa"))
