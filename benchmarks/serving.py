"""`python -m benchmarks serving`: a workload through the whole engine, on random weights.

The workload is nano-vllm's: 256 requests at once, prompts and outputs of 100 to 1,024 tokens,
temperature 0.6. Parts (`--only`):

  throughput  Qwen3-0.6B in shape; all the pages that fit
  ready       the same from the start of a process until its first token; compiled kernels are on
              disk, weights are random and not read
  llama       the same, Llama-3-8B in shape
  capped      40 % of the pages that the workload needs: preemption by swapping, by recomputation,
              and by the estimated cheaper of the two; against `throughput`
  allocation  one budget of pages, used in three ways: the longest request reserved for each, the
              same in batches that run until their last member ends, and pages
  prefill     the first token of prompts of 8k, 16k and 32k tokens, with attention in FP8 and in 16
              bits
  samples     64 samples of one prompt of 16,384 tokens, with the cascade and without it
  peers       `transformers`, static and continuous batching, on a part of the workload
  http        an open loop against `onchip serve` on the CPU, only if chosen by name
  crowd       1,000 clients that send requests all the time; likewise

All one-time work of a first request happens before the clock starts. Columns of a row beyond the
schema's are `workload.Ran.columns` and the columns of each part. --quick: a tiny model, also
without a GPU.
"""

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from benchmarks import serving_http, serving_peers, serving_prefill, serving_samples
from benchmarks.step import QWEN3
from benchmarks.workload import Ran, Roofline, Workload, serve, warm_up
from onchip.cli.bench import gpu
from onchip.cli.bench.harness import Case, Row, RowRefused, Session, Threshold
from onchip.cli.bench.measure import seconds
from onchip.engine import LLM, SamplingParams
from onchip.models import Decoder, ModelConfig, random_model

LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
}
TINY = QWEN3 | {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
HTTP = {"http": serving_http.measure, "crowd": serving_http.crowd}  # on the CPU
PARTS = (
    *("throughput", "ready", "capped", "allocation", "samples", "prefill", "peers", "llama"),
    *HTTP,
)
READY = "ready"  # what the process says
CAP = 0.4  # of the pages that the workload holds at its peak
WAYS = ("auto", "swap", "recompute")
POLICIES = ("contiguous", "static", "paged")
PEER_REQUESTS, PEER_TOKENS = 128, 256  # a part of the workload that peers do in seconds


def select(bench: str, **columns: Any) -> Callable[[Row], bool]:
    """Rows of a benchmark with these columns."""
    selected = {"bench": bench, **columns}
    return lambda row: selected.items() <= row.items()


def least(column: str) -> Callable[[list[Row]], float]:
    return lambda rows: min(row[column] for row in rows)


def _most(column: str) -> Callable[[list[Row]], float]:
    return lambda rows: max(row[column] for row in rows)


_WHOLE = select("throughput", mask="qwen3-0.6b", kernel="onchip")
THRESHOLDS = (
    Threshold("Qwen3-0.6B", _WHOLE, at_least=22_000, measure=least("value"), unit="tokens/s"),
    Threshold(
        "Qwen3-0.6B, ready to serve",
        select("ready", mask="qwen3-0.6b", kernel="onchip"),
        at_most=20,
    ),
    Threshold(
        "lost with 40 % of the pages",
        select("capped", mask="qwen3-0.6b", kernel="auto"),
        at_most=35,
        measure=_most("lost"),
        unit="%",
    ),
    Threshold(
        "64 samples of a prompt of 16,384 tokens",
        select("samples", mask="qwen3-0.6b", kernel="cascade"),
        at_least=3,
        measure=least("ratio"),
        unit="x",
        optional=True,  # results before 2026-11-18 have no such row
    ),
)


@dataclass
class Setting:
    """A shape of model, its random weights on a device, and its workload."""

    name: str
    fields: dict[str, Any]
    workload: Workload
    device: torch.device
    max_model_len: int
    session: Session = field(default_factory=Session)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @cached_property
    def model(self) -> Decoder:
        config = ModelConfig.from_hf(self.fields)
        return random_model(config, device=self.device, dtype=self.dtype)

    @cached_property
    def roofline(self) -> Roofline:
        bandwidth = copy_bytes_per_s(self.device)
        roofline = Roofline.of(self.model.config, self.dtype.itemsize, bandwidth)
        token_bytes = self.model.cache_spec(1, self.kv_dtype).page_bytes
        roofline = roofline._replace(token_bytes=token_bytes)
        self.session.say(roofline.formula(self.workload))
        return roofline

    @property
    def kv_dtype(self) -> str | None:
        """Of the cache, None for that of the model."""
        return self.session.kv_dtypes[0] if self.session.kv_dtypes else None

    @property
    def page_bytes(self) -> int:
        return self.model.cache_spec(kv_dtype=self.kv_dtype).page_bytes

    @property
    def capped_pages(self) -> int:
        """With the null page; the longest request fits into it alone."""
        size = self.model.cache_spec().page_size
        alone = -(-self.workload.longest // size)
        return 1 + max(alone, math.ceil(CAP * self.workload.peak_pages(size)))

    @cached_property
    def whole(self) -> Row:
        """The row of the workload with all the pages that fit, measured once."""
        start = time.perf_counter()
        _ = self.model
        with self.llm() as llm:
            ready_s = time.perf_counter() - start
            self.session.say(f"{self.name}: ready in {ready_s:.1f} s")
            return self.row("throughput", "onchip", llm, [self.workload]) | {"ready_s": ready_s}

    def llm(self, **options: Any) -> LLM:
        own = {"max_model_len": self.max_model_len, "kv_dtype": self.kv_dtype}
        return LLM(self.model, **own, **options)

    def row(self, bench: str, kernel: str, llm: LLM, groups: Sequence[Workload]) -> Row:
        """The groups served one after another, when what has to be compiled is."""
        warm_up(llm.engine, groups[0])
        start = time.monotonic()
        ran = serve(llm.engine, groups)
        columns = self._columns(ran, llm) | self.session.watch(start)
        row = self.case(bench, len(ran.workload.requests)).row(
            kernel, ran.tokens_per_s, "tokens/s", failed=0, **columns
        )
        self.session.say(sentence(row))
        return row

    def case(self, bench: str, num_requests: int) -> Case:
        config = self.model.config
        size = (config.head_dim, self.workload.longest, num_requests, config.num_heads)
        kv_heads = config.num_kv_heads
        return Case(bench, self.name, self.dtype, *size, way="serve", num_kv_heads=kv_heads)

    def _columns(self, ran: Ran, llm: LLM) -> dict[str, Any]:
        roofline, measured = self.roofline, ran.columns
        return measured | {
            "roofline_share": roofline.seconds(ran.workload) / ran.seconds,
            "bytes_per_s": roofline.bytes_per_s,
            "kv_bytes": llm.stats().pages_total * self.page_bytes,
            "peak_kv_bytes": measured["peak_pages"] * self.page_bytes,
        }


def run(session: Session) -> None:
    """On a GPU; the quick sizes on the CPU where there is none, and HTTP always there."""
    asks_cpu = bool(session.only) and set(session.only) <= set(HTTP)
    if asks_cpu:
        gpu.run_on_cpu(session, steps(session))
    else:
        gpu.run_or_quick(session, lambda: steps(session), "--quick and --only http crowd run")


def steps(session: Session) -> Iterator[gpu.Step]:
    """The chosen parts; without a choice, the parts of the engine alone."""
    parts = session.only or [part for part in PARTS if part not in HTTP]
    qwen3 = setting(session, "qwen3-0.6b", QWEN3)
    if "throughput" in parts:
        yield f"{qwen3.name}, whole", lambda: [qwen3.whole]
    if "ready" in parts:
        yield f"{qwen3.name}, ready", partial(ready, qwen3)
    if "capped" in parts:
        for way in WAYS:
            yield f"{qwen3.name}, 40 % of the pages, {way}", partial(capped, qwen3, way)
    if "allocation" in parts:
        for policy in POLICIES:
            yield f"{qwen3.name}, {policy}", partial(allocation, qwen3, policy)
    if "samples" in parts:
        yield f"{qwen3.name}, samples", partial(samples, qwen3)
    if "prefill" in parts:
        yield f"{qwen3.name}, prefill", partial(prefill, qwen3)
    if "peers" in parts:
        yield f"{qwen3.name}, peers", partial(peers, qwen3)
    if "llama" in parts:
        yield "llama-3-8b, whole", lambda: [setting(session, "llama-3-8b", LLAMA3).whole]
    for part in parts:
        if part in HTTP:
            yield part, partial(HTTP[part], session)


def setting(session: Session, name: str, fields: dict[str, Any]) -> Setting:
    if len(session.kv_dtypes) > 1:
        raise ValueError("serving has one cache at a time: --kv-dtype fp8, or --kv-dtype int8")
    cache = f", {session.kv_dtypes[0]} cache" if session.kv_dtypes else ""
    if not session.quick:
        return Setting(name + cache, fields, Workload.uniform(), session.device, 4096, session)
    workload = Workload.uniform(24, 8, 64, vocab=TINY["vocab_size"])
    small = TINY | {key: fields[key] for key in ("model_type", "tie_word_embeddings")}
    name = f"tiny {small['model_type']}{cache}"
    return Setting(name, small, workload, session.device, 256, session)


def ready(setting: Setting) -> list[Row]:
    """A process of its own; RowRefused if it ends without a word."""
    quick = ["--quick"] if setting.session.quick else []
    command, start = [sys.executable, "-m", "benchmarks.serving", *quick], time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = (line.strip() for line in process.stdout or ())
        heard = READY in lines
        spent = time.perf_counter() - start
    if not heard:
        raise RowRefused(f"the process ended with {process.returncode} before it was ready")
    setting.session.say(f"{setting.name}: a new process is ready in {spent:.1f} s")
    return [setting.case("ready", 1).row("onchip", spent, "s")]


def capped(setting: Setting, way: str) -> list[Row]:
    whole = setting.whole
    with _capped_llm(setting, way) as llm:
        row = setting.row("capped", way, llm, [setting.workload])
    lost = 100 * (1 - row["value"] / whole["value"])
    setting.session.say(f"{lost:.1f} % less than with all pages")
    return [row | {"lost": lost}]


@contextmanager
def _capped_llm(setting: Setting, way: str) -> Iterator[LLM]:
    """An engine with few pages that preempts one way."""
    pages = setting.capped_pages
    swap_gib = 0 if way == "recompute" else pages * setting.page_bytes / 2**30
    with setting.llm(num_pages=pages, swap_space=swap_gib) as llm:
        if way == "swap":
            llm.engine.costs.link_bytes_per_s = math.inf
        yield llm


def allocation(setting: Setting, policy: str) -> list[Row]:
    """How many run at a time is all that a reservation changes: with the slots of the longest for
    each, as many as the budget holds.
    """
    pages, page_size = setting.capped_pages, setting.model.cache_spec().page_size
    slots = (pages - 1) * page_size
    length = -(-setting.workload.longest // page_size) * page_size
    seats = max(1, slots // length) if policy != "paged" else 256
    groups = setting.workload.batches(seats) if policy == "static" else [setting.workload]
    with setting.llm(num_pages=pages, max_num_seqs=seats) as llm:
        row = setting.row("allocation", policy, llm, groups)
    return [row | {"seats": seats, "reserved_tokens": length if policy != "paged" else 0}]


def samples(setting: Setting) -> list[Row]:
    """Many samples of one long prompt; the quick model has longer positions here."""
    load, model = serving_samples.SamplesLoad(), setting.model
    if setting.session.quick:
        load = serving_samples.QUICK
        model = longer_model(setting, load.max_model_len)
    return serving_samples.measure(setting.session, setting.name, model, setting.kv_dtype, load)


def prefill(setting: Setting) -> list[Row]:
    """One long prompt at a time."""
    load, model = serving_prefill.PrefillLoad(), setting.model
    if setting.session.quick:
        load = serving_prefill.QUICK
        model = longer_model(setting, load.max_model_len)
    return serving_prefill.measure(setting.session, setting.name, model, setting.kv_dtype, load)


def longer_model(setting: Setting, max_model_len: int) -> Decoder:
    """The model of a setting with more positions."""
    config = ModelConfig.from_hf(setting.fields | {"max_position_embeddings": max_model_len})
    return random_model(config, device=setting.device, dtype=setting.dtype)


def peers(setting: Setting) -> list[Row]:
    """Ours, with what the peers did in the same run, on the same part of the workload."""
    part = setting.workload.cut(PEER_REQUESTS, PEER_TOKENS)
    with setting.llm() as llm:
        row = setting.row("peers", "onchip", llm, [part])
    rates = serving_peers.tokens_per_s(setting.session, setting.fields, part, setting.dtype)
    if not rates:
        return [row]
    best = max(rates, key=lambda name: rates[name])
    columns = {"peers": rates, "best_peer": best, "ratio": row["value"] / rates[best]}
    return [row | columns]


def copy_bytes_per_s(device: torch.device) -> float:
    """What a plain copy reads and writes in a second, the best of some."""
    words = 2**28 if device.type == "cuda" else 2**22
    source = torch.ones(words, device=device)
    target = torch.empty_like(source)
    best = min(seconds(lambda: target.copy_(source), device) for _ in range(6))
    return 2 * source.nbytes / best


def sentence(row: Row) -> str:
    """A row as a sentence."""
    at = lambda name: " / ".join(f"{row[name].get(q, 0):.1f}" for q in ("p50", "p99"))
    host = "" if row["host_share"] is None else f", host {100 * row['host_share']:.0f} %"
    by_draws = ", ".join(f"{n} draws {ms:.2f}" for n, ms in row["step_ms_by_draws"].items())
    return (
        f"{row['mask']} {row['bench']} {row['kernel']}: {row['value']:,.0f} tokens/s,"
        f" {row['output_tokens']:,} in {row['seconds']:.2f} s, {100 * row['roofline_share']:.0f} %"
        f" of the roofline; first token {at('first_token_ms')} ms, then {at('between_tokens_ms')}"
        f" ms (p50 / p99); {row['steps']:,} steps of {row['step_ms']['mean']:.2f} ms, at most"
        f" {row['step_ms']['max']:.1f} ({by_draws}){host}; {row['peak_kv_bytes'] / 1e9:.2f} of"
        f" {row['kv_bytes'] / 1e9:.2f} GB of pages; {row['swapped']} swapped,"
        f" {row['recomputed']} computed again"
    )


def main(argv: Sequence[str]) -> int:
    """What `ready` waits for: an engine, and a token from it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    session = Session(quick="--quick" in argv, device=device)
    with setting(session, "qwen3-0.6b", QWEN3).llm() as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
        print(READY, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
