"""A real decoder that is small enough for hundreds of steps, and its requests."""

from functools import cache

import torch

from onchip.engine import (
    BeamSearchParams,
    ByteTokenizer,
    Engine,
    ExecutionConfig,
    Limits,
    Request,
    SamplingParams,
)
from onchip.models import ModelConfig, random_model

CONFIG = {
    "model_type": "llama",
    "vocab_size": ByteTokenizer.VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": ByteTokenizer.EOS,
}
EOS = (256, 39)  # and a byte that the random model generates
PREFIX = "the prefix that many of the prompts have in common, "
PROMPTS = [
    PREFIX + "a",
    PREFIX + "bc",
    "no prefix",
    PREFIX[:30],
    "x",
    PREFIX + "a",
    PREFIX + "d" * 9,
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=17),
    SamplingParams(temperature=0, max_tokens=9, n=3, repetition_penalty=1.3),
    SamplingParams(seed=5, max_tokens=15, n=2, top_p=0.9, logprobs=2),
    SamplingParams(seed=6, max_tokens=12, top_k=9, min_tokens=6, temperature=1.5),
    SamplingParams(temperature=0, max_tokens=20, stop=["\x16", "{"], ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1),
    SamplingParams(seed=8, max_tokens=8, n=2, best_of=3, presence_penalty=0.5),
    BeamSearchParams(3, 7),
]


EXECUTION = {"overlap", "graphs", "clock", "cascade", "prefill_precision", "fused_decode"}
EXECUTION |= {"fused_experts"}


@cache
def model(device="cpu"):
    """The same weights on every device."""
    torch.set_num_threads(1)
    return random_model(ModelConfig.from_hf(CONFIG)).to(device)


def engine(device="cpu", budget=40, max_num_seqs=12, num_pages=300, **options):
    limits = Limits(256, budget, max_num_seqs)
    fixed = {"page_size": 4, "eos_token_ids": EOS, "seed": 1} | options
    fixed["execution"] = ExecutionConfig(
        **{name: fixed.pop(name) for name in EXECUTION & fixed.keys()}
    )
    return Engine(model(device), ByteTokenizer(), limits=limits, num_pages=num_pages, **fixed)


def ask(one, prompts=PROMPTS, params=PARAMS, **options):
    """Add requests with all prompts and all parameters, in turns."""
    count = max(len(prompts), len(params))
    pairs = [(prompts[i % len(prompts)], params[i % len(params)]) for i in range(count)]
    requests = [one.add(prompt, how, **options) for prompt, how in pairs]
    assert all(isinstance(request, Request) for request in requests)
    return requests


def drain(one, limit=2000):
    """The last output of each request, and all outputs."""
    last, outputs = {}, []
    while one.has_work:
        outputs += one.step()
        check(one)
        limit -= 1
        assert limit, "requests do not finish"
    last = {output.request_id: output for output in outputs}
    assert all(output.finished for output in last.values())
    check_empty(one)
    return last, outputs


def check(one):
    one.scheduler.check()
    one.cache.check()


def check_empty(one):
    """No page is in use, on the device or on the host, and no request is tracked."""
    assert not one.cache.offloaded or not one.cache.offloaded.num_reserved
    pool = one.cache.pool
    assert not pool.tables and pool.num_free == pool.capacity
    assert len(one.cache.host_table.free_rows) == one.cache.max_seqs
    if one.tier:
        one.tier.synchronize()
        assert not one.tier.groups and one.tier.num_free == one.tier.capacity
    assert not len(one._output_processor) and one._in_flight is None


def visible(outputs):
    """The visible outputs of each request, in the order of the requests."""
    outputs = dict(sorted(outputs.items(), key=lambda item: int(item[0].split("-")[1])))
    return [
        [
            (c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason, tokens_of(c.logprobs))
            for c in output.outputs
        ]
        for output in outputs.values()
    ]


def tokens_of(logprobs):
    """The most probable tokens, in order. Log probabilities of other batches differ in their last
    bits.
    """
    return logprobs and [[(t, p.rank, p.decoded_token) for t, p in one.items()] for one in logprobs]


def assert_same_distribution(one, other):
    """Chi-square of two counters of tokens. Equal distributions fail about once in 1,000."""
    common = [t for t in one | other if one[t] + other[t] >= 10]
    chi2 = sum((one[t] - other[t]) ** 2 / (one[t] + other[t]) for t in common)
    freedom = len(common)
    assert chi2 < freedom + 3.1 * (2 * freedom) ** 0.5 + 3
