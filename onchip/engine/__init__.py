"""Requests served from pages: what is asked, who computes what in each step, and the draws.

`LLM` is the offline interface, `Engine` what it and a server drive. One turn of an engine:

    step = scheduler.schedule()
    flight = runner.launch(step)  # forward and draws are queued on the device
    finished = scheduler.update(step, runner.land(flight))
"""

from .costs import Costs
from .engine import Engine, EngineError, Pace
from .llm import LLM
from .params import BeamSearchParams, SamplingParams
from .request import CompletionOutput, Drawn, Logprob, Request, RequestOutput, Sample, Status
from .scheduler import Scheduler
from .stats import Stats
from .step import Limits, Refused, Run, Step
from .tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

__all__ = [
    "LLM",
    "BeamSearchParams",
    "ByteTokenizer",
    "CompletionOutput",
    "Costs",
    "Drawn",
    "Engine",
    "EngineError",
    "FileTokenizer",
    "Limits",
    "Logprob",
    "Pace",
    "Refused",
    "Request",
    "RequestOutput",
    "Run",
    "Sample",
    "SamplingParams",
    "Scheduler",
    "Stats",
    "Status",
    "Step",
    "Tokenizer",
]
