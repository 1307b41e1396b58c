"""A tokenizer that fails ends only its request, and special tokens can be shown."""

import json

import pytest

from onchip import LLM, SamplingParams
from onchip.engine.tokenizer import ByteTokenizer, FileTokenizer

LONG = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PANICS = {"type": "Strip", "content": "a", "start": 0, "stop": 5}  # on a token shorter than this


@pytest.fixture
def llm(tiny, tmp_path):
    """llm(decoder=None): a model with the tokenizer of a folder that has this decoder."""
    opened = []

    def start(decoder=None):
        ByteTokenizer().save(tmp_path)
        file = tmp_path / "tokenizer.json"
        if decoder is not None:
            file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": decoder}))
        tokenizer = FileTokenizer(tmp_path)
        opened.append(LLM(tiny.model(), tokenizer=tokenizer, num_pages=60, max_num_seqs=4))
        return opened[-1]

    yield start
    for one in opened:
        assert not one.engine.cache.pool.tables  # every page is free again
        one.close()


@pytest.mark.parametrize("how", [{}, {"stop": ["zz"]}, {"n": 2}, {"logprobs": 1}], ids=str)
def test_a_decoder_that_panics_fails_the_request_and_not_the_engine(llm, how, capfd):
    one = llm(PANICS)
    for _ in range(2):
        (output,) = one.generate([list(b"abc")], SamplingParams(**LONG, **how), use_tqdm=False)
        for choice in output.outputs:
            assert choice.finish_reason == "error"
            assert "the tokenizer cannot decode" in choice.stop_reason
    capfd.readouterr()  # a panic prints pages


def test_special_tokens_can_be_shown(llm):
    one = llm()
    params = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logit_bias": {256: 100}}
    for stop in ((), ("never",)):  # read at the end, and read as it grows
        shown, hidden = one.generate(
            [list(b"abc")] * 2,
            [SamplingParams(**params, stop=stop, skip_special_tokens=s) for s in (False, True)],
            use_tqdm=False,
        )
        assert shown.outputs[0].token_ids == hidden.outputs[0].token_ids == (256,) * 3
        assert shown.outputs[0].text == "<|endoftext|>" * 3 and hidden.outputs[0].text == ""
    with pytest.raises(ValueError, match="skip_special_tokens"):
        SamplingParams(skip_special_tokens="no")


def test_a_template_that_loops_is_killed_offline(llm, monkeypatch):
    monkeypatch.setattr("onchip.engine.text_worker_pool.JOB_S", 1.0)
    one = llm()
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="not done within"):
        one.chat([{"role": "user", "content": "hi"}], chat_template=loop)
    prompt = one.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt["prompt"] == "user: hi\nassistant:"
