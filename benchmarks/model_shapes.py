"""The attention layers of real models: one row for every kind of layer, with its published source.

Heads, head dims, windows, softcaps and context lengths come from `source`. Batch sizes, and the
lengths of served requests, are ours: 16k tokens or so where the context allows it. Sources on the
Hub of gated models were compared with the same numbers in litgpt/config.py of Lightning-AI/litgpt
or in copies of the file on the Hub; the other sources were read themselves.
"""

import math
from typing import NamedTuple

from benchmarks.video import QUICK_MASKS, VIDEO_MASKS, VideoMask

PAGE_SIZE = 16
SERVED_KEYS, DECODED = 8192, (64, 4096)  # of a prefill; sequences and keys of a decoding step
MIN_TOKENS = 16


class CallShape(NamedTuple):
    """One call of a layer. way: the pass. seqlen_k: 0 if the keys are as many as the queries.
    page_size: 0 if the keys are in one piece. documents: packed sequences of unequal lengths.
    """

    way: str
    batch: int
    seqlen_q: int
    seqlen_k: int = 0
    page_size: int = 0
    documents: int = 0

    @property
    def keys(self) -> int:
        return self.seqlen_k or self.seqlen_q


def train(batch: int, seqlen: int, seqlen_k: int = 0, documents: int = 0) -> tuple[CallShape, ...]:
    """The forward, which is also a prefill in one piece, and the backward."""
    sizes = (batch, seqlen, seqlen_k, 0, documents)
    return CallShape("forward", *sizes), CallShape("backward", *sizes)


def sample(batch: int, seqlen: int) -> tuple[CallShape, ...]:
    """The forward of a model that is seldom trained by its users."""
    return (CallShape("forward", batch, seqlen),)


def serve(context: int) -> tuple[CallShape, ...]:
    """A prefill of the last quarter of each prompt, and a decoding step, both over pages."""
    keys = min(context, SERVED_KEYS)
    batch, decoded = DECODED
    prefill = CallShape("prefill", 4, keys // 4, keys, PAGE_SIZE)
    return prefill, CallShape("decode", batch, 1, min(context, decoded), PAGE_SIZE)


class ModelLayer(NamedTuple):
    """A kind of layer of a model.

    kind: what distinguishes it from the model's other layers. window: the keys that a query sees,
    itself included. bias: an additive bias, "shared" by the batch or "own" of each sequence;
    it and the sinks have a gradient in a backward. video: a 3-D window.
    """

    name: str
    source: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    calls: tuple[CallShape, ...]
    kind: str = ""
    head_dim_v: int | None = None
    causal: bool = False
    window: int | None = None
    softcap: float = 0.0
    softmax_scale: float | None = None
    has_sinks: bool = False
    bias: str = ""
    video: VideoMask | None = None

    @property
    def title(self) -> str:
        return f"{self.name}, {self.kind}" if self.kind else self.name

    def shrink(self, tokens: int) -> "ModelLayer":
        """The same layer over at most `tokens` keys, windows in proportion, at most two sequences;
        of a 3-D window its small one.
        """
        if self.video is not None:
            video = next(x for x in QUICK_MASKS if x.is_sliding == self.video.is_sliding)
            calls = (call._replace(seqlen_q=video.tokens) for call in self.calls)
            return self._replace(video=video, calls=tuple(calls))
        factor = max(1, math.ceil(max(call.keys for call in self.calls) / tokens))
        window = None if self.window is None else max(2, self.window // factor)
        calls = tuple(_shrink_call(call, factor) for call in self.calls)
        return self._replace(window=window, calls=calls)


def _shrink_call(call: CallShape, factor: int) -> CallShape:
    """Lengths over pages stay multiples of a page."""
    least = call.page_size or MIN_TOKENS
    shorten = lambda n: n if n <= least else max(least, n // factor // least * least)
    return call._replace(
        batch=min(call.batch, 2),
        seqlen_q=shorten(call.seqlen_q),
        seqlen_k=shorten(call.seqlen_k),
        documents=min(call.documents, 3),
    )


def _hub(model: str, file: str = "config.json") -> str:
    return f"https://huggingface.co/{model}/blob/main/{file}"


def _github(repository: str, file: str, branch: str = "main") -> str:
    return f"https://github.com/{repository}/blob/{branch}/{file}"


_GEMMA2, _GEMMA3 = _hub("google/gemma-2-9b"), _hub("google/gemma-3-12b-it")
_GPT_OSS = _github("openai/gpt-oss", "gpt_oss/torch/model.py")
_SAM = _github("facebookresearch/segment-anything", "segment_anything/build_sam.py")
_WAN = _github("Wan-Video/Wan2.1", "wan/configs/wan_t2v_1_3B.py")
_ALPHAFOLD = _github("google-deepmind/alphafold", "alphafold/model/config.py")
_PATH_X = "lra_benchmarks/image/configs/pathfinder128/base_pathfinder128_config.py"
# DeepSeek-V3 scales by mscale^2 / sqrt(192), mscale = 0.1 ln(rope_factor) + 1, rope_factor 40
_DEEPSEEK_SCALE = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2

MODELS = (
    ModelLayer(
        "llama3-8b", _hub("meta-llama/Meta-Llama-3-8B"), 32, 8, 128,
        train(2, 8192) + serve(8192), causal=True,
    ),
    ModelLayer(
        "llama3-70b", _hub("meta-llama/Meta-Llama-3-70B"), 64, 8, 128,
        train(2, 8192) + serve(8192), causal=True,
    ),
    ModelLayer(
        "qwen3-0.6b", _hub("Qwen/Qwen3-0.6B"), 16, 8, 128,
        train(4, 4096) + serve(32768), causal=True,
    ),
    ModelLayer(
        "qwen3-8b", _hub("Qwen/Qwen3-8B"), 32, 8, 128,
        train(1, 32768) + serve(32768), causal=True,
    ),
    ModelLayer(
        "qwen3-32b", _hub("Qwen/Qwen3-32B"), 64, 8, 128,
        train(4, 4096) + serve(32768), causal=True,
    ),
    ModelLayer(
        "gemma3-12b", _GEMMA3, 16, 8, 256,
        train(1, 16384) + serve(32768), "window 1,024", causal=True, window=1024,
    ),
    ModelLayer(
        "gemma3-12b", _GEMMA3, 16, 8, 256,
        train(1, 16384) + serve(32768), "global", causal=True,
    ),
    ModelLayer(
        "gemma2-9b", _GEMMA2, 16, 8, 256,
        train(2, 8192) + serve(8192), "window 4,096", causal=True, window=4096, softcap=50.0,
    ),
    ModelLayer(
        "gemma2-9b", _GEMMA2, 16, 8, 256,
        train(2, 8192) + serve(8192), "global", causal=True, softcap=50.0,
    ),
    ModelLayer(
        "phi3-mini", _hub("microsoft/Phi-3-mini-4k-instruct"), 32, 32, 96,
        train(4, 4096) + serve(4096), causal=True, window=2047,
    ),
    ModelLayer(
        "phi-2", _hub("microsoft/phi-2"), 32, 32, 80,
        train(8, 2048) + serve(2048), causal=True,
    ),
    ModelLayer(
        "gpt-oss-120b", _GPT_OSS, 64, 8, 64,
        train(4, 4096) + serve(32768), "window 128", causal=True, window=128, has_sinks=True,
    ),
    ModelLayer(
        "gpt-oss-120b", _GPT_OSS, 64, 8, 64,
        train(4, 4096) + serve(32768), "global", causal=True, has_sinks=True,
    ),
    ModelLayer(
        "mistral-7b", _hub("mistralai/Mistral-7B-v0.1"), 32, 8, 128,
        train(2, 8192) + serve(32768), causal=True, window=4096,
    ),
    ModelLayer(
        "deepseek-v3",
        _github("deepseek-ai/DeepSeek-V3", "inference/configs/config_671B.json"), 128, 128, 192,
        train(1, 4096), head_dim_v=128, causal=True, softmax_scale=_DEEPSEEK_SCALE,
    ),
    ModelLayer(
        "falcon-7b", _hub("tiiuae/falcon-7b"), 71, 1, 64,
        train(8, 2048) + serve(2048), causal=True,
    ),
    ModelLayer(
        "starcoder", _hub("bigcode/starcoder"), 48, 1, 128,
        train(2, 8192) + serve(8192), causal=True,
    ),
    ModelLayer(
        "gpt2-medium", _github("karpathy/nanoGPT", "model.py", "master"), 16, 16, 64,
        train(16, 1024), causal=True,
    ),
    ModelLayer(
        "bert-large", _github("google-research/bert", "README.md", "master"), 16, 16, 64,
        train(1, 16384, documents=48), "packed",
    ),
    ModelLayer(
        "vit-h14",
        _github("google-research/vision_transformer", "vit_jax/configs/models.py"), 16, 16, 80,
        train(64, 257),
    ),
    ModelLayer("sam-vit-h", _SAM, 16, 16, 80, sample(1, 4096), "global", bias="own"),
    ModelLayer("sam-vit-h", _SAM, 16, 16, 80, sample(25, 196), "14 x 14 windows", bias="own"),
    ModelLayer(
        "whisper-large-v3", _hub("openai/whisper-large-v3"), 20, 20, 64,
        (*train(16, 448, 1500), CallShape("decode", 16, 1, 1500)), "cross",
    ),
    # 1,024 x 1,024 pixels are 4,096 tokens; then the text: 512 of T5, or 77 of CLIP and 256 of T5
    ModelLayer(
        "flux1-dev", _github("black-forest-labs/flux", "src/flux/util.py"), 24, 24, 128,
        train(1, 4096 + 512),
    ),
    ModelLayer(
        "sd3-medium",
        _hub("stabilityai/stable-diffusion-3-medium-diffusers", "transformer/config.json"),
        24, 24, 64, train(2, 4096 + 77 + 256),
    ),
    ModelLayer("wan2.1-1.3b", _WAN, 12, 12, 128, sample(1, VIDEO_MASKS[0].tokens), "as published"),
    # its window is that of `python -m benchmarks video`: the published model attends to everything
    ModelLayer(
        "wan2.1-1.3b", _WAN, 12, 12, 128,
        train(1, VIDEO_MASKS[2].tokens), "3-D windows", video=VIDEO_MASKS[2],
    ),
    ModelLayer("esm2-650m", _hub("facebook/esm2_t33_650M_UR50D"), 20, 20, 64, train(16, 1024)),
    # 512 MSA clusters of 384 residues, as in the fine-tuning of openfold/config.py
    ModelLayer("alphafold2", _ALPHAFOLD, 8, 8, 32, train(512, 384), "MSA rows", bias="shared"),
    ModelLayer("alphafold2", _ALPHAFOLD, 4, 4, 32, train(384, 384), "triangle", bias="shared"),
    ModelLayer(
        "path-x", _github("google-research/long-range-arena", _PATH_X), 2, 2, 8, train(64, 16384),
    ),
)  # fmt: skip
NAMES = tuple(dict.fromkeys(layer.name for layer in MODELS))
