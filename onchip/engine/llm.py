"""The offline interface: a model by name, prompts in, texts out."""

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from onchip.core.problem import UnsupportedError
from onchip.engine import memory
from onchip.engine.chat_template import Message, get_template
from onchip.engine.engine import Engine, EngineError, ExecutionConfig
from onchip.engine.progress import ProgressBar
from onchip.engine.ranks import Ranks
from onchip.engine.request import RequestOutput
from onchip.engine.sampling_params import BeamSearchParams, SamplingParams
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.stats import EngineStats
from onchip.engine.step import Limits, RejectedRequest
from onchip.engine.structure.compiler import PendingGrammar
from onchip.engine.text_worker_pool import TextWorker, TextWorkerPool
from onchip.engine.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, generation_eos
from onchip.models import Decoder, Model, builtin, resolve

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | BeamSearchParams


class LLM:
    """A model that generates text from a paged KV cache. Arguments as in vLLM where they exist.

    model: a folder with config.json, safetensors and tokenizer.json, the Hub id of a model that was
    downloaded ("org/name", read from the local cache), "tiny" (built in, see `models.builtin`), or
    a model of `onchip.models`; other families run through transformers, slower. tokenizer: another
    folder or Hub id, or a Tokenizer. max_model_len: tokens of prompt and continuation together;
    None for the model's own. block_size: slots of a page. swap_space: GiB of host memory for
    preempted requests. kv_offloading_size: GiB of host memory for requests that are longer than the
    cache, whose first pages stream from there in each of their steps; 0: these are rejected. dtype:
    "auto" for the checkpoint's own. kv_dtype: "fp8" (e4m3) or "int8" for 8-bit pages, of which
    twice as many fit; None for dtype. seed: for requests without one. enforce_eager: use no CUDA
    graphs. disable_cascade_attn: False reads the pages that requests share once for all of them,
    where the cost model predicts that it saves time. prefill_precision: "fp8" computes the
    attention of long prompts in 8 bits, which changes outputs, "auto" where this is faster, None
    never. fused_decode: steps of up to 8 tokens have matrix products that include the norm before
    them and the gate after them, on a GPU with native decoders; see docs/engine.md. fused_experts:
    layers of experts are fused kernels there, which CUDA graphs can hold; see docs/models.md.
    num_pages: pages of the cache; None for as many as fit. speculative_config: a dict with the
    names of `SpeculativeConfig`; outputs do not change, see docs/engine.md. reproducible: log
    probabilities have the bits of a forward of the trainable model; see docs/reproducible.md.

    tensor_parallel_size: torchrun starts this many processes, which all make the same calls. All
    ranks must decide alike, so nothing may depend on time: no graphs, swaps wait for their copies,
    and metrics count calls instead of seconds. Each process has a swap_space.
    """

    engine: Engine

    def __init__(
        self,
        model: str | Path | Model = builtin.NAME,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        block_size: int = 16,
        swap_space: float = 4,
        kv_offloading_size: float = 0,
        dtype: str | torch.dtype = "auto",
        kv_dtype: str | None = None,
        seed: int | None = 0,
        enable_prefix_caching: bool = True,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        enforce_eager: bool = False,
        disable_cascade_attn: bool = True,
        prefill_precision: str | None = None,
        fused_decode: bool = True,
        fused_experts: bool = True,
        device: str | torch.device | None = None,
        num_pages: int | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        reproducible: bool = False,
    ):
        if reproducible and tensor_parallel_size > 1:
            raise UnsupportedError(f"{tensor_parallel_size=} is not served with reproducible=True")
        speculation = SpeculativeConfig.parse(speculative_config)
        ranks = Ranks(tensor_parallel_size, seed)
        model = resolve(model) if isinstance(model, (str, Path)) else model
        loaded = ranks.load(model, device, dtype)
        draft = _load_draft(ranks, speculation, device, dtype)
        longest = loaded.config.max_seqlen
        if max_model_len is not None and not 1 < max_model_len <= longest:
            raise ValueError(f"{max_model_len=} must be in [2, {longest}], the model's own")
        limits = Limits(max_model_len or longest, max_num_batched_tokens, max_num_seqs)
        graphs = ranks.is_single and not enforce_eager
        cascade = "off" if disable_cascade_attn else "auto"
        spec = loaded.cache_spec(block_size, kv_dtype)
        if kv_offloading_size and not ranks.is_single:
            raise ValueError(f"{kv_offloading_size=} is not served with {tensor_parallel_size=}")
        if num_pages is None:
            share, paging = gpu_memory_utilization, memory.Paging(block_size, kv_dtype)
            num_pages = ranks.take_minimum(
                memory.device_pages(
                    loaded,
                    limits,
                    paging,
                    share,
                    graphs=graphs,
                    speculation=speculation,
                    draft=draft,
                    offloads=kv_offloading_size > 0,
                    cascade=cascade,
                    prefill_precision=prefill_precision,
                    fused_decode=fused_decode,
                    fused_experts=fused_experts,
                )
            )
        self.engine = Engine(
            loaded,
            _tokenizer(model, tokenizer),
            limits=limits,
            num_pages=num_pages,
            page_size=block_size,
            kv_dtype=kv_dtype,
            host_pages=memory.host_pages(spec, swap_space, num_pages),
            offload_pages=memory.offload_pages(spec, kv_offloading_size, num_pages),
            prefix_caching=enable_prefix_caching,
            eos_token_ids=_eos(model),
            seed=seed,
            speculative_config=speculation,
            draft_model=draft,
            execution=ExecutionConfig(
                graphs=graphs,
                clock=ranks.clock,
                lockstep=not ranks.is_single,
                cascade=cascade,
                prefill_precision=prefill_precision,
                fused_decode=fused_decode,
                fused_experts=fused_experts,
                reproducible=reproducible,
            ),
        )
        self._ranks = ranks
        self._templates = TextWorkerPool(1)
        self._batches: dict[str, _PromptBatch] = {}
        self._numbers = count()
        self.engine.warm_up()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory."""
        self._templates.close()
        self.engine.close()
        self._ranks.shut_down()

    def train(self) -> Decoder:
        """Return the model that generates, to change its weights in place: there is one copy of
        them. The memory of the cache is given back until `serve`; calls that generate raise.
        """
        if not self._ranks.is_single:
            raise UnsupportedError("train() is not served with tensor_parallel_size above 1")
        return self.engine.train()

    def serve(self) -> None:
        """Generate again, after `train`, with the weights as they are now."""
        self.engine.serve()

    def get_tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The continuations of each prompt, in the order of the prompts. A prompt is a text, a list
        of token ids, {"prompt": ...} or {"prompt_token_ids": ...}. sampling_params: one for all
        prompts, or one for each. use_tqdm: show progress on a terminal. Ctrl-C cancels the prompts;
        later calls are not affected.
        """
        prompts = _as_list(prompts)
        done: dict[int, RequestOutput] = {}
        outputs = self._generate(prompts, sampling_params, stream=False)
        # Closed explicitly: an interactive session keeps the traceback, which would keep it open.
        with closing(outputs), ProgressBar(len(prompts), use_tqdm) as bar:
            for index, output in outputs:
                done[index] = output
                bar.advance(sum(len(choice.token_ids) for choice in output.outputs))
        return [done[index] for index in range(len(prompts))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
    ) -> Iterator[RequestOutput]:
        """Cumulative outputs of all prompts as they grow; `request_id` is the index of the prompt.
        Leaving the loop cancels the rest.
        """
        with closing(self._generate(_as_list(prompts), sampling_params, stream=True)) as outputs:
            for index, output in outputs:
                yield replace(output, request_id=str(index))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or a list of them."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        prompts = [
            self.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
            )
            for conversation in ([messages] if single else messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(self, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
        """The prompt of a conversation: text and token ids. options: as for chat.render_template,
        and chat_template. The template runs in its own process, for 10 s at most.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ValueError("the model has no tokenizer, so no chat template: give token ids")
        template = get_template(tokenizer, options.pop("chat_template", None))
        text = self._templates.render(template, list(messages), tokenizer.special, options)
        ids = tokenizer.encode(text, add_special_tokens=False)  # the template writes them
        return {"prompt": text, "prompt_token_ids": ids}

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[RequestOutput]:
        """The most probable continuations of each prompt, best first."""
        return self.generate(prompts, params, use_tqdm=False)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] | None,
        stream: bool,
    ) -> Generator[tuple[int, RequestOutput]]:
        """(index of the prompt, output) until all prompts are done. As many requests are queued as
        the engine accepts; closing the generator cancels them. Other calls may run between two
        outputs: if one of them is interrupted inside a step, the prompts of this call end, too
        (finish_reason "abort").
        """
        pairs = zip(prompts, _params_per_prompt(params, len(prompts)), strict=True)
        batch = _PromptBatch([(self._parse_prompt(prompt), params) for prompt, params in pairs])
        try:
            while batch.num_left:
                self._add_requests(batch, stream)
                if not batch.outputs:
                    self._step_engine()
                while batch.outputs:
                    output = batch.outputs.popleft()
                    batch.num_left -= output.finished
                    yield batch.check(output), output
        finally:
            for name in batch.indices:
                self.engine.cancel(name)
                self._batches.pop(name, None)

    def _step_engine(self) -> None:
        outputs = self.engine.step()
        if not outputs and not self.engine.has_work:
            raise EngineError("outputs of this call were lost: another call was interrupted")
        for output in outputs:
            if output.request_id in self._batches:
                self._batches[output.request_id].outputs.append(output)

    def _add_requests(self, batch: "_PromptBatch", stream: bool) -> None:
        while len(batch.indices) < len(batch.prompts):
            index = len(batch.indices)
            (text, ids), params = batch.prompts[index]
            name = f"prompt-{next(self._numbers)}"
            batch.indices[name], self._batches[name] = index, batch
            added = self.engine.add(ids, params, request_id=name, stream=stream)
            if isinstance(added, RejectedRequest):
                del batch.indices[name], self._batches[name]
                if added.is_retryable and self.engine.has_work:
                    return
                raise ValueError(f"prompt {index} cannot be served: {added.reason}")
            added.prompt = text
            batch.grammars[name] = added.grammar

    def _parse_prompt(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """The text of a prompt, if it has one, and its token ids."""
        prompt = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if not isinstance(prompt, Mapping):
            return None, prompt
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is not None:
            return text, ids
        if not isinstance(text, str):
            raise ValueError(f"a prompt needs 'prompt' or 'prompt_token_ids', got {prompt!r:.80}")
        return text, self.engine.encode(text)


class _PromptBatch:
    """The prompts of one call: indices of the queued ones by request id, and outputs not yielded
    yet.
    """

    def __init__(self, prompts: list[tuple[tuple[str | None, Sequence[int]], Params | None]]):
        self.prompts = prompts
        self.num_left = len(prompts)
        self.indices: dict[str, int] = {}
        self.outputs: deque[RequestOutput] = deque()
        self.grammars: dict[str, PendingGrammar | None] = {}

    def check(self, output: RequestOutput) -> int:
        """The index of an output's prompt. ValueError: the prompt's grammar is not served."""
        index, grammar = self.indices[output.request_id], self.grammars.get(output.request_id)
        if output.finished and grammar is not None and grammar.is_ready and grammar.error:
            raise ValueError(f"prompt {index} cannot be served: {grammar.error}")
        return index


def _load_draft(
    ranks: Ranks,
    config: SpeculativeConfig | None,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
) -> Model | None:
    if config is None or config.model is None:
        return None
    if not ranks.is_single:
        raise ValueError('method="draft" of speculative_config needs tensor_parallel_size=1')
    model = config.model
    return ranks.load(resolve(model) if isinstance(model, (str, Path)) else model, device, dtype)


def _tokenizer(
    model: str | Path | Model, tokenizer: str | Path | Tokenizer | None
) -> Tokenizer | None:
    if isinstance(tokenizer, (str, Path)):
        return _load_tokenizer(resolve(tokenizer))
    if tokenizer is not None or not isinstance(model, (str, Path)):
        return tokenizer
    if model in builtin.NAMES:
        return ByteTokenizer()
    return _load_tokenizer(model) if (Path(model) / "tokenizer.json").is_file() else None


def _load_tokenizer(folder: str | Path) -> FileTokenizer:
    """Load it first in a process with bounded memory: a tokenizer.json that crashes or exhausts
    memory while loading then ends that process, not this one.
    """
    TextWorker(folder).close()
    return FileTokenizer(folder)


def _eos(model: str | Path | Model) -> tuple[int, ...] | None:
    """generation_config.json overrides config.json and the tokenizer."""
    if not isinstance(model, (str, Path)) or model in builtin.NAMES:
        return None
    return generation_eos(model) or None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one; a list of numbers is a single prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int) else several


def _params_per_prompt(params: Params | Sequence[Params] | None, count: int) -> list[Params | None]:
    if params is None or isinstance(params, (SamplingParams, BeamSearchParams)):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts")
    return list(params)
