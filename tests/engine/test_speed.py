"""The cost of a step apart from the model is Python, so its function calls are counted: unlike
seconds they do not depend on the load of the machine. Some 80 calls take 10 us.
"""

import sys

import torch

from onchip.engine import Limits, Request, SampledToken, SamplingParams, Scheduler
from onchip.engine.model_runner import _int32_tensor, _token_ids
from onchip.engine.sampler import SamplingMetadataCache
from onchip.kvcache import KVCache, Spec


class Stepper:
    """A scheduler and the staging of a model runner, without computation; each step is scheduled
    before the tokens of the last one are known.
    """

    def __init__(self, num_samples):
        spec = Spec(1, 1, 1, 1, 16, torch.float32)
        self.cache = KVCache(spec, 40 * num_samples, max_seqs=num_samples)
        self.scheduler = Scheduler(self.cache, Limits(4096, 8192, num_samples))
        self.metadata_cache, self.in_flight = SamplingMetadataCache("cpu"), None
        params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.6)
        for i in range(num_samples):
            self.scheduler.add(Request(str(i), [i] * 9, params))

    def step(self):
        step = self.scheduler.schedule()
        self.cache.view(step.sequences, extra=_int32_tensor(_token_ids(step.chunks)))
        self.metadata_cache.make([sample for _, sample in step.rows_to_sample])
        self.scheduler.mark_launched(step)
        if self.in_flight:
            tokens = [SampledToken(5, -1.0)] * len(self.in_flight.rows_to_sample)
            self.scheduler.apply_tokens(self.in_flight, tokens)
        self.in_flight = step


def calls_of_a_step(num_samples):
    """The mean of 32 steps in which all samples decode."""
    stepper, counts = Stepper(num_samples), []
    for _ in range(40):
        calls = [0]
        sys.setprofile(lambda frame, event, arg, calls=calls: _count(event, calls))
        stepper.step()
        sys.setprofile(None)
        counts.append(calls[0])
    return sum(counts[8:]) / 32


def _count(event, calls):
    calls[0] += event in ("call", "c_call")


def test_a_decoding_sample_costs_a_bounded_number_of_calls_whatever_the_batch():
    few, many = calls_of_a_step(32) / 32, calls_of_a_step(256) / 256
    assert many < 45, f"{many:.1f} calls for each sample in a step"
    assert many <= few, f"{few:.1f} calls in a batch of 32, {many:.1f} in one of 256"
