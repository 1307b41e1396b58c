"""Requests served from pages: what is asked, who computes what in each step, and the draws."""

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
