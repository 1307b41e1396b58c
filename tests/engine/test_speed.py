"""What a step costs beside the model is Python, so its calls are counted: unlike seconds they do
not depend on the load of the machine. Some 80 calls take 10 us.
"""

import sys

import torch

from onchip.engine import Drawn, Limits, Request, SamplingParams, Scheduler
from onchip.kvcache import KVCache, Spec


def calls_of_a_step(num_samples):
    """Calls of schedule and update together, the mean of 32 steps in which all samples decode."""
    cache = KVCache(Spec(1, 1, 1, 1, 16, torch.float32), 4000, max_seqs=num_samples)
    scheduler = Scheduler(cache, Limits(4096, 8192, num_samples))
    for i in range(num_samples):
        params = SamplingParams(max_tokens=99, ignore_eos=True)
        scheduler.add(Request(str(i), [i] * 9, params))
    counts = []
    for _ in range(40):
        calls = [0]
        sys.setprofile(lambda frame, event, arg, calls=calls: _count(event, calls))
        step = scheduler.schedule()
        scheduler.update(step, [Drawn(5, -1.0)] * len(step.draws))
        sys.setprofile(None)
        counts.append(calls[0])
    return sum(counts[8:]) / 32


def _count(event, calls):
    calls[0] += event in ("call", "c_call")


def test_a_decoding_sample_costs_a_bounded_number_of_calls_whatever_the_batch():
    few, many = calls_of_a_step(32) / 32, calls_of_a_step(256) / 256
    assert many < 90, f"{many:.1f} calls for each sample in a step"
    assert many <= few, f"{few:.1f} calls in a batch of 32, {many:.1f} in one of 256"
