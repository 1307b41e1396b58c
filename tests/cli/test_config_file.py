"""`onchip serve --config`: the command line wins, and a file says nothing that is ignored."""

import tomllib

import pytest

from onchip.cli import main
from tests.cli.parsing import parse

TEXT = """
model = "some/folder"
port = 9000
swap-gib = 1
no-prefix-caching = true
dtype = "bf16"
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        (tmp_path / "serve.toml").write_text(text)
        return str(tmp_path / "serve.toml")

    return write


def test_options_of_the_file_and_of_the_command_line(file):
    for words in (["--config", file(TEXT), "--port", "1"], ["--port", "1", "--config", file(TEXT)]):
        args = parse(["serve", *words])
        assert (args.model, args.port, args.swap_gib) == ("some/folder", 1, 1.0)
        assert args.no_prefix_caching and args.dtype == "bfloat16" and args.page_size == 16


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("max_num_seqs = 3", "unknown key max_num_seqs; did you mean max-num-seqs?"),
        ("zzz = 3", "unknown key zzz; known are model, name, host"),
        ('config = "other.toml"', "unknown key config"),
        ('port = "8000"', 'port = "8000" must be an integer'),
        ("port = 80.5", "port = 80.5 must be an integer"),
        ("port = true", "port = true must be an integer"),
        ("max-num-seqs = 0", "0 must be at least 1"),
        ('swap-gib = "4"', "must be a number"),
        ("no-prefix-caching = 1", "must be true or false"),
        ("model = 3", "must be a string"),
        ('log-level = "loud"', "'loud' is not one of"),
        ("[serve]\nport = 1", "unknown key serve"),
        ("port =", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text, word, file, capsys):
    assert main(["serve", "--config", file(text)]) == 2
    assert word in capsys.readouterr().err


def test_a_missing_file_is_refused(tmp_path, capsys):
    assert main(["serve", "--config", str(tmp_path / "none.toml")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["serve", "--config", str(tmp_path)]) == 2


def test_the_printed_file_is_read_again(file, capsys):
    words = ["--config", file(TEXT), "--api-key", "a-secret-key", "--name", 'a "name"']
    assert main(["serve", *words, "--print-config"]) == 0
    text = capsys.readouterr().out
    assert "a-secret-key" not in text and "# api-key is set, and not printed" in text
    assert tomllib.loads(text)["name"] == 'a "name"'
    before, after = parse(["serve", *words]), parse(["serve", "--config", file(text)])
    for args in (before, after):
        args.config = args.api_key = None
    assert before == after
