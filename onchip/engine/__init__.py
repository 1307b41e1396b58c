"""Continuous batching over a paged KV cache: requests, scheduler, model runner, sampler.

`LLM` is the offline interface. `LLM` and the server both drive an `Engine`. One step of an engine:

    step = scheduler.schedule()             # which tokens each request computes; slots are taken
    in_flight = model_runner.launch(step)   # forward pass and sampling, queued on the device
    tokens = model_runner.collect(in_flight)  # wait for the sampled tokens
    finished = scheduler.update(step, tokens)
"""

from .engine import Engine, EngineError, ExecutionConfig
from .llm import LLM
from .preemption_costs import PreemptionCosts
from .request import CompletionOutput, Logprob, Request, RequestOutput, Sample, SampledToken, Status
from .sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from .scheduler import Scheduler
from .stats import EngineStats
from .step import Chunk, Limits, RejectedRequest, ScheduledStep
from .structure.grammar import StructuredOutputsParams
from .tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

__all__ = [
    "LLM",
    "BeamSearchParams",
    "ByteTokenizer",
    "CompletionOutput",
    "PoolingParams",
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
    "StructuredOutputsParams",
    "Tokenizer",
]
