"""Requests served from pages: what is asked, who computes what in each step, and the draws.

One turn, with a model that gives the logits of each run's last token:

    step = scheduler.schedule()
    logits = model(cache.view(step.sequences))  # (runs, vocab_size)
    samples = [who for _, who in step.draws]
    logits = logits[[run for run, _ in step.draws]]  # forks draw from one row
    drawn = sample(logits, rows_of(samples, device)).drawn(samples)
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
