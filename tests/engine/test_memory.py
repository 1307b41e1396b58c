"""How many pages fit."""

import pytest
import torch

from onchip import LLM
from onchip.engine import ByteTokenizer, Limits, SamplingParams, memory


def test_no_more_than_all_sequences_can_fill(tiny):
    limits = Limits(100, 64, 3)
    assert memory.device_pages(tiny.model(), limits, 16, 0.9) == 1 + 3 * 7


def test_a_quarter_of_what_the_host_has_free(tiny, monkeypatch):
    page = tiny.model().cache_spec(16).page_bytes
    free = {"SC_AVPHYS_PAGES": 400, "SC_PAGE_SIZE": page}
    monkeypatch.setattr(memory.os, "sysconf", free.__getitem__)
    assert memory.device_pages(tiny.model(), Limits(256, 256, 256), 16, 0.9) == 100
    free["SC_AVPHYS_PAGES"] = 7
    with pytest.raises(ValueError, match="there is no room for pages of 4,096 bytes on cpu"):
        memory.device_pages(tiny.model(), Limits(256, 256, 256), 16, 0.9)


def test_the_host_holds_what_it_is_given_and_no_more_than_the_device(tiny):
    spec = tiny.model().cache_spec(16)
    assert memory.host_pages(spec, 0, 50) == 0
    assert memory.host_pages(spec, 1e-4, 50) == int(1e-4 * 2**30) // spec.page_bytes < 50
    assert memory.host_pages(spec, 4, 50) == 50


@pytest.mark.gpu
def test_a_gpu_is_used_as_far_as_it_was_said(tiny):
    """The cache and its steps stay within the share, and fill most of it."""
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.05
    decoder = tiny.model("cuda")
    options = {"max_model_len": 256, "max_num_seqs": 4096, "max_num_batched_tokens": 8192}
    options |= {"gpu_memory_utilization": share, "swap_space": 0}
    before = torch.cuda.memory_allocated()
    with LLM(decoder, tokenizer=ByteTokenizer(), enforce_eager=True, **options) as llm:
        pool = torch.cuda.memory_allocated() - before
        outputs = llm.generate(["x"] * 50, SamplingParams(max_tokens=5))
        assert len(outputs) == 50 and pool < 0.06 * total
        free, total = torch.cuda.mem_get_info()
        assert (total - free) / total < share + 0.01
    with pytest.raises(ValueError, match="gpu_memory_utilization=1.5 must lie above 0"):
        LLM(decoder, tokenizer=ByteTokenizer(), gpu_memory_utilization=1.5)
