"""`python -m benchmarks decoding`: what small batches wait for, and what features of the engine
cost or save. Parts (`--only`):

  latency      a decoding step of 1 and of 8 requests, with `fused_decode` and without, and the
               first token of a prompt on an idle engine, Qwen3-0.6B in shape; a step of one
               request, Llama-3-8B in shape, beside the time in which its bytes can be read
  speculation  one request with 4 drafts a step of a draft model of which 0.7 are right, and of
               ngram on a text that repeats its prompt; a large batch with either; all against the
               same requests without drafts
  structure    requests whose texts follow a JSON schema, against free ones; the first token with a
               schema that is compiled
  long         one request of which 3/4 of the keys are in host memory: bytes a second beside those
               of the link; other requests while it runs, against without it
  experts      a step of 1, 32 and 256 requests of models with experts, 8 x 1.5B and gpt-oss-20b in
               shape, with `fused_experts` ("fused_moe") and without ("onchip"), beside the time in
               which the bytes of the experts that have tokens can be read

The models are `successor_model`s: random weights of the named shape, with outputs that are known,
so that drafts are right as often as is asked for. --quick: tiny shapes, also without a GPU.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from benchmarks.serving import LLAMA3, TINY, copy_bytes_per_s, least, select
from benchmarks.step import QWEN3
from benchmarks.workload import Roofline
from onchip.cli.bench import gpu
from onchip.cli.bench.harness import Case, Row, RowRefused, Session, Threshold
from onchip.cli.bench.measure import seconds
from onchip.engine import LLM, ByteTokenizer, Request, SamplingParams
from onchip.engine.stats import EngineStats
from onchip.models import Decoder, ModelConfig, random_model

PARTS = ("latency", "speculation", "structure", "long", "experts")
GREEDY = {"temperature": 0.0, "ignore_eos": True}
NUM_DRAFTS, RIGHT = 4, 0.7  # drafts of a step, and how many of them the draft model gets right
SURE = 30.0  # the logit of the next token; all others are of order one
DRAFT = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Qwen2.5-1.5B in shape with eight MLPs; https://huggingface.co/openai/gpt-oss-20b (config.json).
EIGHT_EXPERTS = {
    "model_type": "mixtral",
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}
KEPT = ("model_type", "num_local_experts", "num_experts_per_tok", "sliding_window", "rope_scaling")
TINY_DRAFT = DRAFT | {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}, "minItems": 64}},
    "required": ["names"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Sizes:
    """Prompt and output tokens of the short requests, the large batches, the batches of models with
    experts, and the long request: its tokens, of which `cached` fit into the cache.
    """

    prompt: int = 64
    output: int = 256
    first_prompt: int = 1024
    batch: int = 256
    structured: int = 64
    sparse: tuple[int, ...] = (1, 32, 256)
    long: int = 131_072
    cached: int = 32_768
    long_output: int = 24
    max_model_len: int = 4096


QUICK = Sizes(24, 32, 96, 8, 4, (1, 4), 448, 112, 4, 256)


FUSED = partial(select, kernel="fused")
THRESHOLDS = (
    Threshold("a step of 1, ms", FUSED("latency", mask="qwen3-0.6b", batch=1), at_most=1.0),
    Threshold("a step of 8, ms", FUSED("latency", mask="qwen3-0.6b", batch=8), at_most=1.1),
    Threshold(
        "a step of 1, Llama-3-8B, of the time of its bytes",
        FUSED("latency", mask="llama-3-8b"),
        at_least=0.8,
        measure=least("roofline_share"),
    ),
    Threshold("first token, ms", select("first token"), at_most=8.0),
    Threshold("a draft model", select("speculation", kernel="draft"), at_least=2.2),
    Threshold("ngram", select("speculation", kernel="ngram"), at_least=3.0),
    Threshold("drafts in a large batch", select("large batch"), at_least=0.97),
    Threshold("structured texts", select("structure"), at_least=0.93),
    Threshold("first token with a schema, ms more", select("structured first token"), at_most=20.0),
    Threshold("a long request, of the link", select("long"), at_least=0.8),
    Threshold("others beside a long request", select("beside"), at_least=0.9),
    Threshold(
        "experts, a step of 32, of the time of its bytes",
        select("experts", kernel="fused_moe", batch=32),
        at_least=0.5,
        measure=least("roofline_share"),
    ),
)


class Decoded(NamedTuple):
    """Requests that ran together. first_s: until all had their first token; rest_s: from then to
    the end, in `steps` steps that read `streamed` pages from host memory. tokens: of the rest.
    """

    first_s: float
    rest_s: float
    steps: int
    streamed: int
    tokens: int
    stats: EngineStats

    @property
    def rate(self) -> float:
        """Tokens a second, without the first ones."""
        return self.tokens / self.rest_s

    @property
    def step_ms(self) -> float:
        return 1e3 * self.rest_s / self.steps


@dataclass
class Setting:
    """A shape of model and the sizes of its requests."""

    name: str
    fields: dict[str, Any]
    session: Session = field(default_factory=Session)

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.session.quick else Sizes()

    @property
    def device(self) -> torch.device:
        return self.session.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @cached_property
    def model(self) -> Decoder:
        return successor_model(self.fields, self.device, self.dtype)

    @cached_property
    def draft(self) -> Decoder:
        small = TINY_DRAFT if self.session.quick else DRAFT
        return successor_model(self.fields | small, self.device, self.dtype, RIGHT)

    @contextmanager
    def llm(self, **options: Any) -> Iterator[LLM]:
        """An engine that finds no prompt in its cache. Its one-time work is done."""
        own = {"max_model_len": self.sizes.max_model_len, "enable_prefix_caching": False}
        with LLM(self.model, **own | options) as llm:
            llm.engine.warm_up()
            yield llm

    def case(self, bench: str, batch: int, tokens: int) -> Case:
        config = self.model.config
        sizes = (config.head_dim, tokens, batch, config.num_heads)
        return Case(
            bench, self.name, self.dtype, *sizes, way="decode", num_kv_heads=config.num_kv_heads
        )

    def row(
        self, bench: str, kernel: str, batch: int, value: float, unit: str, **columns: Any
    ) -> Row:
        tokens = columns.pop("tokens", self.sizes.prompt + self.sizes.output)
        return self.case(bench, batch, tokens).row(kernel, value, unit, **columns)

    def against(self, bench: str, kernel: str, batch: int, ours: Decoded, plain: Decoded) -> Row:
        """Tokens a second, relative to the same requests without the feature."""
        peers = {"peers": {"without": plain.rate}, "best_peer": "without"}
        ratio = ours.rate / plain.rate
        return self.row(bench, kernel, batch, ours.rate, "tokens/s", **peers, ratio=ratio)


def run(session: Session) -> None:
    """On a GPU; the quick sizes on the CPU where there is none."""
    gpu.run_or_quick(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    parts = session.only or PARTS
    qwen3 = setting(session, "qwen3-0.6b", QWEN3)
    if "latency" in parts:
        yield f"{qwen3.name}, latency", partial(latency, qwen3)
        yield "llama-3-8b, latency", lambda: step_latency(setting(session, "llama-3-8b", LLAMA3), 1)
    if "speculation" in parts:
        yield f"{qwen3.name}, drafts", partial(speculation, qwen3)
        yield f"{qwen3.name}, drafts of a large batch", partial(large_batch, qwen3)
    if "structure" in parts:
        yield f"{qwen3.name}, structure", partial(structure, qwen3)
    if "long" in parts:
        yield f"{qwen3.name}, a long request", partial(long, qwen3)
    if "experts" in parts:
        for name, fields in {"8 x 1.5b": EIGHT_EXPERTS, "gpt-oss-20b": GPT_OSS_20B}.items():
            yield f"{name}, experts", partial(_experts, session, name, fields)


def setting(session: Session, name: str, fields: dict[str, Any]) -> Setting:
    """Each shape has a head of its own, which a step reads instead of the embeddings."""
    if session.quick:
        fields = TINY | {field: fields[field] for field in KEPT if field in fields}
        name = f"tiny {fields['model_type']}"
    return Setting(name, fields | {"tie_word_embeddings": False}, session)


def successor_model(
    fields: dict[str, Any], device: torch.device, dtype: torch.dtype, right: float = 1.0
) -> Decoder:
    """A model that continues token t with t + 1, at the cost of any model of its shape. right: the
    share of tokens that it continues so; the others get the successors of one another.

    Attention and feed-forward networks compute with random weights, but what writes to the residual
    stream is zero: the hidden state is the token's embedding, which the head finds.
    """
    model = random_model(ModelConfig.from_hf(fields), device=device, dtype=dtype)
    for name, parameter in model.named_parameters():
        if ".attention.out." in name or ".mlp.down." in name:
            parameter.data.zero_()
    vocab = model.config.vocab_size
    successor = torch.arange(1, vocab + 1) % vocab
    shuffled = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))
    wrong = shuffled[: round((1 - right) * vocab)]
    successor[wrong] = successor[wrong.roll(1)]
    embed = model.embed.data.float()
    normed = embed * embed.square().mean(-1, keepdim=True).rsqrt() * model.norm.weight.float()
    scale = SURE / normed.square().sum(-1, keepdim=True)
    model.head.data[successor.to(device)] = (normed * scale).to(dtype)
    return model


def decode(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int, **params: Any) -> Decoded:
    """Greedy requests that start at once. RowRefused if one of them fails."""
    options = SamplingParams(max_tokens=num_tokens, **GREEDY | params)
    start = time.perf_counter()
    requests = [_add(llm, prompt, options) for prompt in prompts]
    _step_until(llm, requests, 1)
    first, before = time.perf_counter(), llm.stats()
    had = sum([len(request.samples[0].token_ids) for request in requests])
    _step_until(llm, requests, num_tokens)
    end, stats = time.perf_counter(), llm.stats()
    return Decoded(
        first - start,
        end - first,
        stats.steps - before.steps,
        stats.pages_streamed - before.pages_streamed,
        num_tokens * len(requests) - had,
        stats,
    )


def _step_until(llm: LLM, requests: Sequence[Request], num_tokens: int) -> None:
    """Until each of the requests has so many tokens; others may run beside them."""
    samples = [request.samples[0] for request in requests]
    while any([len(sample.token_ids) < num_tokens for sample in samples]):
        if error := next((r.error for r in requests if r.error), None):
            raise RowRefused(f"a request failed: {error}")
        if not llm.engine.has_work:
            raise RowRefused(f"a request ended before its {num_tokens} tokens")
        llm.engine.step()


def _add(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Request:
    answer = llm.engine.add(list(prompt), params, stream=False)
    if not isinstance(answer, Request):
        raise RowRefused(f"a request was refused: {answer.reason}")
    return answer


def twice(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int, **params: Any) -> Decoded:
    """`decode`, when all that has to be compiled is."""
    decode(llm, prompts, num_tokens, **params)
    return decode(llm, prompts, num_tokens, **params)


def random_prompts(setting: Setting, count: int, length: int, seed: int = 0) -> list[list[int]]:
    vocab = setting.model.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


def latency(setting: Setting) -> list[Row]:
    """Steps of 1 and of 8 requests, and the first token of a prompt."""
    sizes, rows = setting.sizes, step_latency(setting, 1, 8)
    with setting.llm() as llm:
        prompts = random_prompts(setting, 1, sizes.first_prompt)
        first = min(decode(llm, prompts, 2).first_s for _ in range(5))
    tokens = {"tokens": sizes.first_prompt}
    return [*rows, setting.row("first token", "onchip", 1, 1e3 * first, "ms", **tokens)]


def step_latency(setting: Setting, *batches: int) -> list[Row]:
    """A row for each batch with `fused_decode` ("fused") and without ("unfused")."""
    roofline = Roofline.of(
        setting.model.config, setting.dtype.itemsize, copy_bytes_per_s(setting.device)
    )
    rows, plain_ms = [], {}
    for name, is_fused in {"unfused": False, "fused": True}.items():
        with setting.llm(fused_decode=is_fused) as llm:
            for batch in batches:
                row = _time_steps(setting, llm, name, batch, roofline)
                plain = plain_ms.setdefault(batch, row["value"])
                peers = {"peers": {"unfused": plain}, "best_peer": "unfused"}
                rows.append(row | (peers | {"ratio": plain / row["value"]} if is_fused else {}))
    return rows


def _time_steps(
    setting: Setting,
    llm: LLM,
    name: str,
    batch: int,
    roofline: Roofline,
    bench: str = "latency",
) -> Row:
    sizes = setting.sizes
    ran = twice(llm, random_prompts(setting, batch, sizes.prompt), sizes.output)
    keys = batch * (sizes.prompt + sizes.output // 2)  # in the middle of the output
    read = roofline.weight_bytes + keys * roofline.token_bytes
    share = 1e3 * read / roofline.bytes_per_s / ran.step_ms
    setting.session.say(
        f"{setting.name}, {name}: {ran.step_ms:.3f} ms a step of {batch}, {100 * share:.0f} % of"
        f" the time of its bytes"
    )
    return setting.row(bench, name, batch, ran.step_ms, "ms", roofline_share=share)


def _experts(session: Session, name: str, fields: dict[str, Any]) -> list[Row]:
    """Steps of a model with experts; it is freed before the next one is made."""
    sparse = setting(session, name, fields)
    rate, rows, plain_ms = copy_bytes_per_s(sparse.device), [], {}
    # Without a GPU the option changes nothing: there are no fused kernels to compare.
    candidates = {"onchip": False} | ({"fused_moe": True} if sparse.device.type == "cuda" else {})
    for kernel, is_fused in candidates.items():
        with sparse.llm(fused_experts=is_fused) as llm:
            for batch in sparse.sizes.sparse:
                roofline = Roofline.of(
                    sparse.model.config, sparse.dtype.itemsize, rate, tokens=batch
                )
                row = _time_steps(sparse, llm, kernel, batch, roofline, bench="experts")
                plain = plain_ms.setdefault(batch, row["value"])
                peers = {"peers": {"onchip": plain}, "best_peer": "onchip"}
                rows.append(row | (peers | {"ratio": plain / row["value"]} if is_fused else {}))
    return rows


def _drafting(setting: Setting, method: str) -> dict[str, Any]:
    model = {"model": setting.draft} if method == "draft" else {}
    graphs = {"enforce_eager": False}
    return {"method": method, "num_speculative_tokens": NUM_DRAFTS, **graphs, **model}


def speculation(setting: Setting) -> list[Row]:
    """One request: with a draft model on any text, and with ngram on a text that is in its prompt:
    the prompt counts up, and its last token is its first.
    """
    sizes = setting.sizes
    texts = {
        "draft": random_prompts(setting, 1, sizes.prompt),
        "ngram": [[*range(sizes.output + 8), 0]],
    }
    return [_speculate(setting, "speculation", method, texts[method]) for method in texts]


def large_batch(setting: Setting) -> list[Row]:
    """As many requests as a step takes, of texts that repeat nothing."""
    prompts = random_prompts(setting, setting.sizes.batch, setting.sizes.prompt)
    return [_speculate(setting, "large batch", method, prompts) for method in ("draft", "ngram")]


def _speculate(setting: Setting, bench: str, method: str, prompts: list[list[int]]) -> Row:
    count = setting.sizes.output
    with setting.llm() as llm:
        plain = twice(llm, prompts, count)
    with setting.llm(speculative_config=_drafting(setting, method)) as llm:
        ours = twice(llm, prompts, count)
    drafted = ours.stats.speculation
    row = setting.against(bench, method, len(prompts), ours, plain)
    setting.session.say(f"{setting.name}, {bench}, {method}: {row['ratio']:.2f}x; {drafted}")
    accepted = drafted.acceptance_rate if drafted.num_drafts else None
    length = drafted.mean_acceptance_length if drafted.num_drafts else None
    return row | {"accepted": accepted, "tokens_per_step": length}


class WideTokenizer(ByteTokenizer):
    """The tokens of ByteTokenizer, and then all texts of two, three ... letters, up to a size."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        letters = [chr(c).encode() for c in range(ord("a"), ord("z") + 1)]
        words, longest = [], letters
        while len(words) < vocab_size - self.VOCAB_SIZE:
            longest = [word + letter for word in longest for letter in letters]
            words += longest
        self._words = words[: vocab_size - self.VOCAB_SIZE]

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < self.VOCAB_SIZE:
            return super().token_bytes(token_id)
        return self._words[token_id - self.VOCAB_SIZE]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [t for t in token_ids if not (skip_special_tokens and t == self.EOS)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")


def structure(setting: Setting) -> list[Row]:
    """Requests that sample from all tokens that a schema allows, and the same without it."""
    sizes, vocab = setting.sizes, setting.model.config.vocab_size
    prompts = random_prompts(setting, sizes.structured, sizes.prompt)
    schema = {"structured_outputs": {"json": SCHEMA}, "temperature": 1.0, "ignore_eos": False}
    with setting.llm(tokenizer=WideTokenizer(vocab)) as llm:
        plain = twice(llm, prompts, sizes.output, temperature=1.0)
        ours = twice(llm, prompts, sizes.output, **schema)
        firsts = {
            name: min(decode(llm, prompts[:1], 2, **params).first_s for _ in range(5))
            for name, params in {"free": {}, "schema": schema}.items()
        }
    row = setting.against("structure", "json", sizes.structured, ours, plain)
    more = 1e3 * (firsts["schema"] - firsts["free"])
    first = setting.row("structured first token", "json", 1, more, "ms", tokens=sizes.prompt)
    setting.session.say(
        f"{setting.name}, JSON schema: {row['ratio']:.3f}x, first token {more:+.1f} ms"
    )
    return [row, first]


def long(setting: Setting) -> list[Row]:
    """A request of which a part is in the cache and the rest in host memory."""
    sizes = setting.sizes
    fields = setting.fields | {"max_position_embeddings": 2 * sizes.long}
    setting = Setting(setting.name, fields, setting.session)
    page_size = setting.model.cache_spec().page_size
    token_bytes = setting.model.cache_spec().page_bytes // page_size
    options = {
        "max_model_len": sizes.long + 2 * sizes.output,
        "num_pages": 1 + sizes.cached // page_size,
        "kv_offloading_size": 1.1 * token_bytes * (sizes.long + 2 * sizes.output) / 2**30,
    }
    prompt = random_prompts(setting, 1, sizes.long)[0]
    others = random_prompts(setting, 8, sizes.prompt)
    with setting.llm(**options) as llm:
        alone = twice(llm, others, sizes.output)
        decode(llm, [prompt], 2)
        row = _streamed(setting, decode(llm, [prompt], sizes.long_output))
        held = _add(llm, prompt, SamplingParams(max_tokens=2 * sizes.output, **GREEDY))
        _step_until(llm, [held], 1)
        beside = decode(llm, others, sizes.output)
        llm.engine.cancel(held.request_id)
    return [row, setting.against("beside", "onchip", len(others), beside, alone)]


def _streamed(setting: Setting, ran: Decoded) -> Row:
    rate, link = ran.streamed * ran.stats.page_bytes / ran.rest_s, link_bytes_per_s(setting.device)
    setting.session.say(
        f"{setting.name}, {setting.sizes.long:,} tokens: {ran.step_ms:.1f} ms a step,"
        f" {rate / 1e9:.1f} of {link / 1e9:.1f} GB/s"
    )
    peers = {"peers": {"link": link / 1e9}, "best_peer": "link", "ratio": rate / link}
    tokens = setting.sizes.long
    return setting.row("long", "onchip", 1, rate / 1e9, "GB/s", **peers, tokens=tokens)


def link_bytes_per_s(device: torch.device) -> float:
    """Of copies from pinned host memory to the device, the best of some."""
    on_gpu = device.type == "cuda"
    source = torch.ones(2**28 if on_gpu else 2**22, pin_memory=on_gpu)
    target = torch.empty_like(source, device=device)
    copy = lambda: target.copy_(source, non_blocking=True)
    return source.nbytes / min(seconds(copy, device) for _ in range(6))
