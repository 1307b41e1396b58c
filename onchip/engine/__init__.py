"""Requests served from pages: what is asked, who computes what in each step, and the draws.

scheduler.add(request)
while scheduler.has_work:
    step = scheduler.schedule()
    batch = cache.view(step.sequences)                  # the tokens of step.runs, packed
    ...                                                 # the model: logits of each run's last row
    rows, samples = zip(*step.draws)
    drawn = sample(logits[list(rows)], rows_of(samples, device)).drawn(samples)
    finished = scheduler.update(step, drawn)
"""

from .costs import Costs
from .params import BeamSearchParams, SamplingParams
from .request import CompletionOutput, Drawn, Logprob, Request, RequestOutput, Sample, Status
from .scheduler import Scheduler
from .step import Limits, Refused, Run, Step

__all__ = [
    "BeamSearchParams",
    "CompletionOutput",
    "Costs",
    "Drawn",
    "Limits",
    "Logprob",
    "Refused",
    "Request",
    "RequestOutput",
    "Run",
    "Sample",
    "SamplingParams",
    "Scheduler",
    "Status",
    "Step",
]
