"""Requests served from pages: what is asked, who computes what in each step, and the draws.

`LLM` is the offline interface, `Engine` what it and a server drive. One turn of an engine:

    step = scheduler.schedule()
    flight = runner.launch(step)  # forward and draws are queued on the device
    finished = scheduler.update(step, runner.land(flight))
"""

from .costs import PreemptionCosts
from .engine import Engine, EngineError, ExecutionConfig
from .llm import LLM
from .params import BeamSearchParams, SamplingParams
from .request import CompletionOutput, Logprob, Request, RequestOutput, Sample, SampledToken, Status
from .scheduler import Scheduler
from .stats import EngineStats
from .step import Chunk, Limits, RejectedRequest, ScheduledStep
from .tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

__all__ = [
    "LLM",
    "BeamSearchParams",
    "ByteTokenizer",
    "CompletionOutput",
    "PreemptionCosts",
    "SampledToken",
    "Engine",
    "EngineError",
    "FileTokenizer",
    "Limits",
    "Logprob",
    "ExecutionConfig",
    "RejectedRequest",
    "Request",
    "RequestOutput",
    "Chunk",
    "Sample",
    "SamplingParams",
    "Scheduler",
    "EngineStats",
    "Status",
    "ScheduledStep",
    "Tokenizer",
]
