"""An engine: a model, its paged cache, and the requests it serves.

    add ------> scheduler.schedule() --> ScheduledStep
                     ^                        |
                     |                model_runner.launch()     forward, sample (on the device)
      apply_tokens   |                        |
                     +--- collect() <-- InFlightStep
                     |
                     +--> output processor --> RequestOutput

With overlap, step n + 1 is scheduled and launched before step n is collected, so the device never
waits for the host. One thread drives an engine with `add`, `cancel` and `step`. Nothing is global:
a process may have several engines. `stats` may be called from any thread.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch

from onchip.core.problem import UnsupportedError
from onchip.cost.decoding import DecodeRoofline
from onchip.cost.hardware import planned_for
from onchip.engine.model_runner import InFlightStep, ModelRunner
from onchip.engine.output_processor import OutputProcessor
from onchip.engine.preemption_costs import PreemptionCosts
from onchip.engine.request import Request, RequestOutput, Status
from onchip.engine.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from onchip.engine.scheduler import Scheduler
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.speculation.draft import DraftModelProposer
from onchip.engine.speculation.ngram import NgramProposer
from onchip.engine.speculation.speculator import Speculator
from onchip.engine.speculation.tree import TreeShape
from onchip.engine.speculation.verify import count_accepted
from onchip.engine.stats import EngineStats, StatsRecorder
from onchip.engine.step import Limits, RejectedRequest
from onchip.engine.structure.compiler import GrammarCompiler, PendingGrammar, wait_for_any
from onchip.engine.tokenizer import Tokenizer
from onchip.engine.weights_version import WeightsVersion
from onchip.kvcache import HostTier, KVCache, Spec
from onchip.models import Decoder, Model

_GRAMMAR_WAIT_S = 0.01  # while no request is ready: commands of a server are not delayed longer
_MOSTLY_PREFILL = 8  # tokens per chunk from which on a step's time is that of prefill


class EngineError(RuntimeError):
    """A step failed, and all requests with it. outputs: their outputs so far."""

    outputs: list[RequestOutput]

    def __init__(self, message: str, outputs: Sequence[RequestOutput] = ()):
        super().__init__(message)
        self.outputs = list(outputs)


@dataclass(frozen=True)
class ExecutionConfig:
    """overlap: schedule a step while the one before runs; None: only on a GPU. graphs: replay steps
    from CUDA graphs. clock: time of arrivals and deadlines. lockstep: other ranks make the same
    calls, and no decision may depend on time: `add` waits for a request's grammar, swaps wait for
    their copies, and the costs of preemption are estimated, not measured. cascade: "auto" reads the
    pages that requests share once where the cost model predicts that this saves time, "off" never,
    "always" wherever two requests share a page. prefill_precision: "fp8" computes the attention of
    long chunks of prompts in 8 bits, "auto" where this saves time, None never. fused_decode:
    products of few rows compute the norm before them and the gate after them, too
    (models/products.py). fused_experts: layers of experts are fused kernels (models/experts.py).
    reproducible: the bits of a log probability depend on the weights and the tokens before alone,
    as in the model's `full`; the model stays in this mode (`Decoder.set_reproducible`).
    """

    overlap: bool | None = None
    graphs: bool = True
    clock: Callable[[], float] = time.monotonic
    lockstep: bool = False
    cascade: str = "off"
    prefill_precision: str | None = None
    fused_decode: bool = True
    fused_experts: bool = True
    reproducible: bool = False


class Engine:
    """tokenizer: None if prompts are token ids and no texts are needed.

    num_pages: pages on the device; page 0 is the null page and never used. kv_dtype: "fp8" or
    "int8" for 8-bit pages, None for the model's dtype. host_pages: pages of host memory for
    preempted requests; 0: they are always recomputed. offload_pages: pages of host memory for
    requests that are longer than num_pages; 0: these are rejected. eos_token_ids: None for those of
    the tokenizer and the model. seed: for requests without one; None: a new one each time.
    speculative_config: options of speculative decoding. draft_model: its model, if it has one; the
    draft's cache has as many pages as this one's, in its own dtype.
    """

    model: Model
    tokenizer: Tokenizer | None
    limits: Limits
    eos_token_ids: tuple[int, ...]
    cache: KVCache
    tier: HostTier | None
    costs: PreemptionCosts | None
    scheduler: Scheduler

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        *,
        limits: Limits,
        num_pages: int,
        page_size: int = 16,
        kv_dtype: str | None = None,
        host_pages: int = 0,
        offload_pages: int = 0,
        prefix_caching: bool = True,
        eos_token_ids: Sequence[int] | None = None,
        seed: int | None = None,
        speculative_config: SpeculativeConfig | None = None,
        draft_model: Model | None = None,
        execution: ExecutionConfig = ExecutionConfig(),  # noqa: B008 (immutable)
    ):
        if execution.reproducible:
            options = {"kv_dtype": kv_dtype, "offload_pages": offload_pages}
            _set_reproducible(model, execution, speculative_config, options)
        self.model, self.tokenizer, self.limits = model, tokenizer, limits
        self.eos_token_ids = _find_eos(model, tokenizer, eos_token_ids)
        spec = model.cache_spec(page_size, kv_dtype)
        self.cache = KVCache(
            spec,
            num_pages,
            max_seqs=limits.max_num_seqs,
            max_seqlen=limits.max_model_len,
            prefix_reuse=prefix_caching,
            offload_pages=offload_pages,
        )
        self.tier = (
            HostTier(self.cache, host_pages, waits=execution.lockstep) if host_pages else None
        )
        self.costs = PreemptionCosts(spec.page_bytes) if host_pages else None
        self._measured_costs = None if execution.lockstep else self.costs
        config, graphs = speculative_config, execution.graphs
        replays = graphs and config is not None and not config.enforce_eager
        _check_speculation(config, model, draft_model)
        self._draft = None
        if config is not None and draft_model is not None:
            self._draft = self._make_draft(draft_model, config.shape, replays)
        self._speculator = _make_speculator(model, spec, config, self._draft)
        self._clock = execution.clock
        self._lockstep = execution.lockstep
        self._grammars = GrammarCompiler(tokenizer, model.config.vocab_size, self.eos_token_ids)
        shape = config.shape if config is not None and replays else None
        ways = execution.cascade, execution.prefill_precision, execution.fused_decode
        self._runner = ModelRunner(
            model,
            self.cache,
            graphs,
            *ways,
            shape,
            fused_experts=execution.fused_experts,
            is_reproducible=execution.reproducible,
        )
        self._weights, self._is_training = WeightsVersion(model), False
        self._overlap = (
            self.cache.device.type == "cuda" if execution.overlap is None else execution.overlap
        )
        self._collected_at = 0.0
        self._seed, self._num_accepted = random.Random(seed).getrandbits(62), 0
        self._names = count()
        self._recorder = StatsRecorder(self.cache, spec.page_bytes)
        self._failed: str | None = None
        self._inconsistent = False
        self._aborted: dict[str, RequestOutput] = {}  # ended by an interrupt, not reported yet
        self._reset_scheduler()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def has_work(self) -> bool:
        if self._runner is None or self._failed:
            return False
        unfinished = self.scheduler.has_work or self._in_flight is not None
        return unfinished or self._inconsistent or bool(self._aborted)

    @property
    def embedding_size(self) -> int | None:
        """The length of an embedding; None if the model has none."""
        return self.model.width if isinstance(self.model, Decoder) else None

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: bytes = b"",
        stream: bool = True,
    ) -> Request | RejectedRequest:
        """Queue a request, or reject it. ValueError: the prompt or a parameter is invalid. With
        PoolingParams, its last output has the embedding of the prompt.

        deadline_s: seconds from now after which the request is cut off. salt: prefixes are shared
        only between requests with the same salt. stream: False reports only the last output.
        """
        self._check_open()
        self._recover()
        self._check_weights()
        request = Request(
            f"request-{next(self._names)}" if request_id is None else request_id,
            self.encode(prompt) if isinstance(prompt, str) else prompt,
            params,
            priority=priority,
            deadline_s=self._deadline(deadline_s),
            salt=_salt(salt),
            eos_token_ids=self.eos_token_ids,
            vocab_size=self.model.config.vocab_size,
            rng_seed=self._seed + self._num_accepted,
        )
        self._prepare(request, prompt if isinstance(prompt, str) else None)
        request.grammar = self.compile_grammar(request.params)
        if request.grammar is not None and self._lockstep and request.grammar.error:
            raise ValueError(request.grammar.error)
        with self._changing_state():
            refused = self.scheduler.add(request)
            if refused is None:
                self._num_accepted += 1  # rejected requests do not count: seeds stay reproducible
                self._output_processor.add_request(request, stream)
        return refused or request

    def compile_grammar(self, params: SamplingParams) -> PendingGrammar | None:
        """Start to compile the grammar of these parameters in another thread; None if they have
        none. Any thread may call this. ValueError: the engine serves no grammars.
        """
        return None if params.grammar is None else self._grammars.compile(params.grammar)

    def encode(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("the engine has no tokenizer: give the prompt as token ids")
        return self.tokenizer.encode(prompt)

    def warm_up(self) -> None:
        """Record graphs and compile kernels, so that the first requests do not wait for them."""
        self._check_open()
        self._runner.warm_up(self.limits.max_num_batched_tokens)
        if self._draft is not None:
            self._draft.warm_up()

    def warm_up_grammars(self) -> None:
        """Prepare for structured output in another thread, if its package is installed."""
        self._grammars.warm_up()

    def trust_grammars(self) -> None:
        """Compile grammars without limits: another rank has compiled them within its own."""
        self._grammars.trust()

    def graph_bytes(self) -> int:
        """Estimate the GPU memory that `warm_up` would take from a few recordings; 0 on the CPU."""
        self._check_open()
        return self._runner.graph_bytes(self.limits.max_num_batched_tokens)

    def cancel(self, request_id: str) -> bool:
        """End a request now. Its pages are free when this returns, and no later step reports it.
        Return False if no unfinished request has this id.
        """
        if self._runner is None:
            return False
        self._recover()
        self._aborted.pop(request_id, None)
        request = self.scheduler.find(request_id)
        if request is None:
            return False
        with self._changing_state():
            self._output_processor.drop_request(request)
            return self.scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step if there is work. Return cumulative outputs of the requests that gained
        tokens or ended. EngineError: all requests have failed, and the engine cannot continue. A
        KeyboardInterrupt inside a step ends all requests; the next step reports them, and the
        engine continues.
        """
        self._check_open()
        self._recover()
        self._check_weights()
        started = time.monotonic()
        try:
            with self._changing_state():
                outputs = [*self._aborted.values(), *self._run_step()]
                self._aborted.clear()
                self._recorder.record_turn(self.scheduler, self.cache, started)
        except Exception as error:
            raise self._fail(error) from error
        return outputs

    def stats(self) -> EngineStats:
        """The state of the engine at the end of its last step."""
        return self._recorder.latest

    def train(self) -> Decoder:
        """Give the memory of the cache back, and return the model: its parameters may change in
        place. Until `serve` the engine takes no request. ValueError: requests are unfinished.
        """
        self._check_open()
        self._recover()
        if not isinstance(self.model, Decoder):
            raise UnsupportedError("train() needs a native decoder: this model is not trained here")
        if self._runner.has_graphs or (self._draft is not None and self._draft.has_graphs):
            raise UnsupportedError(
                "train() gives the pages back, and CUDA graphs hold their addresses: create the"
                " engine without graphs (enforce_eager=True)"
            )
        if self.has_work:
            raise ValueError("train() while requests are unfinished: finish or cancel them first")
        self._reset_pages()
        for held in self._holders():
            held.release_memory()
        self._is_training = True
        return self.model

    def serve(self) -> None:
        """Take the memory of the cache again, after `train`. No page and no cached prefix of the
        weights before is left.
        """
        if self._runner is None:
            raise ValueError("the engine was closed")
        if not self._is_training:
            raise ValueError("serve() follows train(), and the engine serves already")
        for held in self._holders():
            held.take_memory()
        self._weights.accept()
        self._is_training = False

    def close(self) -> None:
        """Cancel all requests and free all memory. The engine cannot be used afterwards."""
        if self._runner is None:
            return
        self._recover()
        self._grammars.close()
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.abort(request.request_id)
        on_gpu = self.cache.device.type == "cuda"
        self._in_flight = self._runner = self._draft = self._speculator = None
        del self.model, self.cache, self.tier, self.scheduler, self._output_processor
        if on_gpu:
            torch.cuda.empty_cache()  # return torch's cached memory to the device

    def _check_open(self) -> None:
        if self._runner is None:
            raise ValueError("the engine was closed")
        if self._failed:
            raise EngineError(f"the engine has failed: {self._failed}")
        if self._is_training:
            raise ValueError("the engine is in training, without pages: call serve() first")

    def _check_weights(self) -> None:
        """If the weights changed, drop all pages, which are of the weights before. ValueError:
        unfinished requests have such pages.
        """
        if not self._weights.has_changed:
            return
        if self.scheduler.has_work:  # a step in flight alone has cancelled requests: it is dropped
            raise ValueError(
                "the weights changed while requests are unfinished: cancel them, because their"
                " pages are of the weights before, and call train() before weights change"
            )
        self._reset_pages()
        self._weights.accept()

    def _holders(self) -> list[KVCache | HostTier]:
        """All that holds memory for pages."""
        draft = None if self._draft is None else self._draft.cache
        return [held for held in (self.cache, self.tier, draft) if held is not None]

    @contextmanager
    def _changing_state(self) -> Iterator[None]:
        """Inside this block queues and pages change. After an exception the code that raised it
        leaves them consistent. After an interrupt they may be half changed: they stay marked as
        inconsistent.
        """
        self._inconsistent = True
        try:
            yield
        except Exception:
            self._inconsistent = False
            raise
        self._inconsistent = False

    def _recover(self) -> None:
        """If an interrupt left queues and pages inconsistent, end all requests and reset both. If
        this is interrupted too, the next call repeats it.
        """
        if not self._inconsistent:
            return
        over = self.scheduler.abandon_all(Status.FINISHED_ABORTED, "a step was interrupted")
        self._aborted |= {request.request_id: request.output() for request in over}
        self._reset_pages()
        self._inconsistent = False

    def _reset_pages(self) -> None:
        """No page is in use, no prefix is cached, and all queues are empty; totals stay."""
        self.cache.reset()
        if self.tier is not None:
            self.tier.reset()
        if self._draft is not None:
            self._draft.reset()
        before = self.scheduler
        self._reset_scheduler()
        self.scheduler.totals = before.totals
        self.scheduler.num_cached_tokens = before.num_cached_tokens

    def _make_draft(self, draft: Model, shape: TreeShape, graphs: bool) -> DraftModelProposer:
        limits, size = self.limits, self.cache.spec.page_size
        refusal = "the draft model has {}={}, this one needs {}"
        own, needed = draft.config.vocab_size, self.model.config.vocab_size
        if own != needed:
            raise ValueError(refusal.format("vocab_size", own, needed))
        if own < (most := max(shape.num_children)):
            raise ValueError(f"{most} drafts after one token exceed vocab_size={own}")
        own, needed = draft.config.max_seqlen, limits.max_model_len
        if own < needed:
            raise ValueError(refusal.format("max_seqlen", own, needed))
        cache = KVCache(
            draft.cache_spec(size),
            self.cache.pool.num_pages,
            max_seqs=limits.max_num_seqs,
            max_seqlen=limits.max_model_len,
            prefix_reuse=self.cache.prefix_reuse,
        )
        return DraftModelProposer(draft, cache, limits.max_num_batched_tokens, shape, graphs)

    def _reset_scheduler(self) -> None:
        """Start with empty queues and no step in flight."""
        self._in_flight: InFlightStep | None = None
        self.scheduler = Scheduler(
            self.cache,
            self.limits,
            tier=self.tier,
            costs=self.costs,
            speculator=self._speculator,
            clock=self._clock,
        )
        self._output_processor = OutputProcessor(self.tokenizer, self.scheduler.stop)

    def _deadline(self, seconds: float | None) -> float | None:
        """Convert to a time of the scheduler's clock."""
        if seconds is None:
            return None
        if not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ValueError(f"deadline_s={seconds!r:.60} must be a number of seconds above 0")
        return self._clock() + seconds

    def _prepare(self, request: Request, prompt: str | None) -> None:
        request.prompt = prompt
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]  # no logits precede the first token
        if request.pooling is not None and self.embedding_size is None:
            raise ValueError(
                "this model has no embeddings: it runs through transformers, which returns its"
                " logits and no hidden states"
            )
        if request.params.stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer; stop_token_ids does not")

    def _run_step(self) -> list[RequestOutput]:
        """Launch the next step before collecting the last one, unless the next needs its tokens."""
        step = self.scheduler.schedule()
        in_flight = self._runner.launch(step) if step.chunks else None
        self.scheduler.mark_launched(step)
        outputs = self._output_processor.make_outputs(step.ended)
        if self._in_flight is not None:
            outputs += self._collect(self._in_flight)
        self._in_flight = in_flight
        if in_flight is None:
            self.scheduler.apply_tokens(step, ())
            self._wait_for_grammar()
        elif not self._overlap or self.scheduler.must_collect:
            self._in_flight = None
            outputs += self._collect(in_flight)
        return outputs

    def _wait_for_grammar(self) -> None:
        """If all requests wait for grammars, wait a moment for one instead of running empty
        steps.
        """
        waiting = [r.grammar for r in self.scheduler.waiting if r.grammar is not None]
        compiling = [grammar for grammar in waiting if not grammar.is_ready]
        if compiling and len(compiling) == len(self.scheduler.waiting):
            wait_for_any(compiling, _GRAMMAR_WAIT_S)

    def _collect(self, in_flight: InFlightStep) -> list[RequestOutput]:
        started = time.monotonic()
        in_flight.wait()
        waited_s = time.monotonic() - started
        tokens = self._runner.collect(in_flight)
        self._observe(in_flight, count_accepted(in_flight.step, tokens), waited_s)
        finished = self.scheduler.apply_tokens(in_flight.step, tokens)
        return self._output_processor.process_sampled(
            [sample for _, sample in in_flight.step.rows_to_sample], finished
        )

    def _observe(self, in_flight: InFlightStep, num_generated: int, waited_s: float) -> None:
        """Record a collected step, and the prefill rate if it mostly prefilled and streamed no
        pages, which take time of their own.
        """
        now, tokens = time.monotonic(), in_flight.step.num_tokens - in_flight.step.num_drafts
        seconds, self._collected_at = now - max(self._collected_at, in_flight.launched_at), now
        counts = in_flight.unread_tokens, in_flight.tokens_8bit
        self._recorder.count_step(in_flight.step, num_generated, waited_s, *counts)
        if in_flight.step.streamed_pages:
            self.scheduler.pacer.observe(seconds)
        elif self._measured_costs and tokens >= _MOSTLY_PREFILL * len(in_flight.step.chunks):
            self._measured_costs.observe(tokens, seconds)

    def _fail(self, error: Exception) -> EngineError:
        self._failed = f"{type(error).__name__}: {error}".removesuffix(": ")
        failed = self.scheduler.abandon_all(Status.FINISHED_ERROR, self._failed)
        outputs = [request.output() for request in failed]
        self._output_processor.clear()
        self._in_flight = None
        return EngineError(f"a step failed, and all requests with it: {self._failed}", outputs)


def _set_reproducible(
    model: Model,
    execution: ExecutionConfig,
    speculation: SpeculativeConfig | None,
    options: dict[str, object],
) -> None:
    """Put the model into its reproducible mode. UnsupportedError: an option of the engine computes
    attention in another order. fused_decode needs no refusal: in the mode no product is fused.
    """
    if not isinstance(model, Decoder):
        raise UnsupportedError(
            "reproducible=True needs a native decoder: this model runs through transformers"
        )
    trees = speculation is not None and not speculation.shape.is_chain
    options |= {"cascade": None if execution.cascade == "off" else execution.cascade}
    options |= {"prefill_precision": execution.prefill_precision, "lockstep": execution.lockstep}
    options |= {"speculative_token_tree": trees and speculation.speculative_token_tree}
    for name, value in options.items():
        if value:
            raise UnsupportedError(f"{name}={value!r} is not served with reproducible=True")
    model.set_reproducible()


def _make_speculator(
    model: Model, spec: Spec, config: SpeculativeConfig | None, draft: DraftModelProposer | None
) -> Speculator | None:
    if config is None:
        return None
    sizes = model.config
    weights = sizes.num_layers * model.layer_weights + sizes.vocab_size * sizes.hidden_size
    hardware, token_bytes = planned_for(model.device), spec.page_bytes / spec.page_size
    roofline = DecodeRoofline(hardware, model.dtype, weights, token_bytes)
    return Speculator(config, draft or NgramProposer(config), roofline.free_tokens)


def _check_speculation(config: SpeculativeConfig | None, model: Model, draft: Model | None) -> None:
    """Check that there is a draft model if there must be one, and that models compute trees if they
    are asked for.
    """
    if (config is not None and config.method == "draft") != (draft is not None):
        raise ValueError('method="draft" of speculative_config needs draft_model, and only it does')
    if config is None:
        return
    if not config.shape.is_chain:
        _check_tree_model("the model", model)
    if config.shape.branches_late and draft is not None:
        _check_tree_model("a draft model of which several drafts of a depth have children", draft)


def _check_tree_model(name: str, model: Model) -> None:
    tree = "speculative_token_tree is not served:"
    if not isinstance(model, Decoder):
        raise ValueError(f"{tree} {name} runs through transformers")
    if any(model.windows):
        raise ValueError(f"{tree} {name} has layers with a window")


def _salt(salt: bytes) -> str:
    """The cache takes text; latin-1 maps different bytes to different texts."""
    if not isinstance(salt, bytes):
        raise ValueError(f"salt={salt!r:.60} must be bytes")
    return salt.decode("latin-1")


def _find_eos(
    model: Model, tokenizer: Tokenizer | None, named: Sequence[int] | None
) -> tuple[int, ...]:
    """End tokens; each must be in the model's vocabulary."""
    if named is None:
        named = (*model.config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ()))
    vocab_size = model.config.vocab_size
    for token in named:
        if not 0 <= token < vocab_size:
            raise ValueError(f"the end token {token} is not in the vocabulary: {vocab_size=}")
    return tuple(dict.fromkeys(named))
