"""Tokenizers of folders, and of bytes."""

import json
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from onchip.engine.tokenizer import ByteTokenizer, FileTokenizer, generation_eos


@pytest.fixture
def folder(tmp_path):
    words = ["<s>", "</s>", "hello", "world", "[UNK]"]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder, **fields):
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return FileTokenizer(folder)


def test_a_folder(folder):
    one = configure(folder, bos_token={"content": "<s>"}, eos_token="</s>", chat_template="x")
    assert one.encode("hello world") == [2, 3] and one.decode([0, 2, 3, 1]) == "hello world"
    assert one.eos_token_ids == (1,) and one.vocab_size == 5
    assert one.special == {"bos_token": "<s>", "eos_token": "</s>"} and one.chat_template == "x"


def test_a_folder_without_tokenizer_config(folder):
    one = FileTokenizer(folder)
    assert one.eos_token_ids == () and one.chat_template is None


@pytest.mark.parametrize(
    "name, content, match",
    [
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer_config.json", "[1]", "holds no object"),
        ("tokenizer_config.json", "{", "is not JSON"),
    ],
)
def test_invalid_files_are_rejected(folder, name, content, match):
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=match):
        FileTokenizer(folder)


def test_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        FileTokenizer(tmp_path)


@pytest.mark.parametrize(
    "content, expected", [({}, ()), ({"eos_token_id": 3}, (3,)), ({"eos_token_id": [3, 1]}, (3, 1))]
)
def test_eos_of_generation_config(tmp_path, content, expected):
    assert generation_eos(tmp_path) == ()
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert generation_eos(tmp_path) == expected


def test_an_eos_that_is_not_a_token_id(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(ValueError, match="eos_token_id=\\['x'\\]"):
        generation_eos(tmp_path)


def test_templates_by_name_and_from_a_file(folder):
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    assert configure(folder, chat_template=named).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert FileTokenizer(folder).chat_template == "file"


def test_bytes():
    one = ByteTokenizer()
    assert one.decode(one.encode("naïve €") + [one.EOS]) == "naïve €"
    assert one.decode([0xE2, 0x82]) == "\ufffd"
    assert max(one.eos_token_ids) < one.VOCAB_SIZE


def test_without_tokenizers_the_error_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[serve\]' in a clone"):
        FileTokenizer(folder)
