"""The repository's further benchmarks, in addition to `onchip bench`: `python -m benchmarks NAME`.

Importing this package adds its suites to the registry of onchip.cli.bench, so that all of them
share one harness, one command line and one report of thresholds. To add a suite, add its file and a
line here. Rows are committed under results/; `python -m benchmarks.tables` writes them into the
documents.
"""

from onchip.cli.bench import BENCHES, Benchmark

BENCHES["forward"] = BENCHES["forward"]._replace(module_8bit="benchmarks.forward8")
BENCHES["paged"] = BENCHES["paged"]._replace(
    summary="GPU: decoding over pages and in one piece, shared prefixes, swapping, offloading",
    module="benchmarks.tiers",
)
BENCHES |= {
    name: Benchmark(summary, f"benchmarks.{name}")
    for name, summary in {
        "short": "GPU: sequences of at most 512 tokens",
        "host": "GPU: host time of an eager call",
        "peak": "GPU: peak memory of a call, 1k to 1M tokens",
        "versions": "GPU: FlashAttention v1 to v4 of examples/versions, side by side",
        "ablation": "GPU: from v2 to v4 one idea at a time, with the speed-up of each",
        "step": "GPU: time of one decoding step of a served model, by part",
        "products": "GPU: matrix products of 1 to 16 rows against torch's, and against a copy",
        "decoding": "GPU: latency of small batches, drafts, structured texts, long requests",
        "reproducible": "GPU: what reproducible=True costs: attention, products, engine, training",
        "masks": "GPU: windows, block-sparse masks, masks of single bits",
        "wide": "GPU: head_dim 512 and its memory; decoding over latent pages",
        "hbm": "GPU: time and bytes over HBM of standard attention, v1 to v3 and onchip",
        "video": "GPU: masks of videos against FlexAttention, forward and forward+backward",
        "score_mods": "GPU: functions of the score against FlexAttention; jvp; MeanFlow's step",
    }.items()
}
BENCHES |= {
    name: Benchmark(summary, f"benchmarks.{name}", f"benchmarks.{name}_report")
    for name, summary in {
        "models": "GPU: the attention calls of real models against the best peer of each shape",
        "train": "training steps, tokens/s: GPT-2 medium, 1B Llama, BERT-large; loss curves",
        "serving": "GPU: a workload through the whole engine: tokens/s, latency, preemption",
        "ring": "ring attention over two local processes; --simulate: over up to 1,024 GPUs",
        "memory": "simulation: memory that a key/value cache wastes, by allocation scheme",
        "approximate": "approximations of attention beside exact attention: error, time, memory",
        "paper": "published figures on attention's bytes and times: predicted and measured",
        "roofline": "predicted times of the Hopper kernels against committed measurements",
        "architectures": "registers and memory of the portable kernels, compiled for every GPU",
        "accuracy": "errors against fp64 by dtype, kernel and input family; 8-bit emulation; exp2",
    }.items()
}
BENCHES["peak"] = BENCHES["peak"]._replace(plots="benchmarks.plots")
BENCHES["score_mods"] = BENCHES["score_mods"]._replace(plots="benchmarks.plots")
BENCHES["ring"] = BENCHES["ring"]._replace(simulates=True)
BENCHES["serving"] = BENCHES["serving"]._replace(has_cache=True)
