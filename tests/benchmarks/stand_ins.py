"""A GPU's clock and peers, replaced: a capture runs its jobs once and takes a given time."""

import torch

import onchip
from onchip.cli.bench import gpu, peers
from onchip.cli.bench.gpu import Capture

capture = lambda ms: Capture(lambda: None, 1, ms)


def steady(captures):
    return [x.ms for x in captures]


def replace_clock(monkeypatch, took):
    """A candidate takes as long as `took` says of its name, else 2 ms; two sets of inputs."""

    def capture_calls(candidate, backward):
        for job in candidate.jobs(backward):
            job()
        return capture(took.get(candidate.name, 2.0))

    monkeypatch.setattr(gpu, "capture_calls", capture_calls)
    monkeypatch.setattr(gpu, "replay_in_order", steady)
    monkeypatch.setattr(gpu, "still_there", lambda device: None)
    draw = lambda case, device: [gpu.draw(case, device, seed=i) for i in range(2)]
    monkeypatch.setattr(gpu, "draw_sets", draw)


def replace_peers(monkeypatch):
    """Peers that compute what their options say, with onchip on a CPU. FlexAttention is its own,
    not compiled; SDPA's efficient backend has no grouped heads, as on a GPU.
    """
    monkeypatch.setattr(peers, "fa3", _flash)
    monkeypatch.setattr(peers, "fa4", _flash)
    monkeypatch.setattr(peers, "fa2", _fa2)
    monkeypatch.setattr(peers, "backend", _sdpa)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def _attend(packed, **options):
    if packed is None:
        return lambda q, k, v: onchip.attention(q, k, v, **options)
    cu, longest = packed
    return lambda q, k, v: onchip.varlen_attention(
        q[0], k[0], v[0], cu, cu, longest, longest, **options
    )[None]


def _flash(
    packed=None, cache_seqlens=None, *, window_size, learnable_sink=None, num_splits=1, **options
):
    bounds = tuple(None if x == -1 else x for x in window_size)
    options |= {"window_size": bounds, "sinks": learnable_sink}
    if cache_seqlens is None:
        return _attend(packed, **options)
    return lambda q, pages, table: onchip.paged_attention(
        q, *pages, table, cache_seqlens, **options
    )


def _fa2(causal, window=None, softmax_scale=None, packed=None):
    bounds = (None, None) if window is None else (window - 1, 0)
    return _attend(packed, causal=causal, window_size=bounds, softmax_scale=softmax_scale)


def _sdpa(name, *, is_causal, scale, enable_gqa=False, attn_mask=None):
    def attend(q, k, v):
        if name == "efficient" and enable_gqa:
            raise RuntimeError("No available kernel. Aborting execution.")
        assert enable_gqa == (q.shape[2] != k.shape[2])
        return onchip.attention(q, k, v, causal=is_causal, softmax_scale=scale, bias=attn_mask)

    return attend
