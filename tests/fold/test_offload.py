"""Offload: keys in segments give the result of keys in memory; only visible keys are read."""

import subprocess
import sys

import pytest
import torch

import onchip
from onchip.fold import offload
from onchip.fold.offload import Offloaded, Segmentation
from onchip.testing import assert_accurate
from tests.grids import mark_all_after

HEADS, KV_HEADS, DIM, DIM_V = 6, 2, 16, 24
MASKS = [
    {},
    {"causal": True},
    {"window_size": (9, None)},
    {"window_size": (None, 3)},
    {"window_size": (5, 2)},
    {"causal": True, "window_size": (0, None)},
    {"causal": True, "window_size": (30, None)},
]


def tensors(seqlen_q, seqlen_k, batch=2):
    shapes = ((seqlen_q, HEADS, DIM), (seqlen_k, KV_HEADS, DIM), (seqlen_k, KV_HEADS, DIM_V))
    return [torch.randn(batch, *shape, dtype=torch.float64) for shape in shapes]


def streamed(q, k, v, tokens, **options):
    source = Offloaded(k, v)
    segment_bytes = tokens * source.token_bytes
    return offload.run(onchip.attention, q, source, segment_bytes=segment_bytes, **options)


def check(seqlens, tokens, **options):
    q, k, v = tensors(*seqlens)
    got = streamed(q, k, v, tokens, **options)
    want = onchip.attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("seqlens", [(1, 63), (7, 41), (29, 29), (40, 13), (5, 1)])
@pytest.mark.parametrize("tokens", [1, 8, 13, 64])
def test_any_segmentation_gives_the_result_of_one_call(seqlens, tokens, mask):
    check(seqlens, tokens, **mask)


@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_scores_and_sinks(tokens):
    options = {"softcap": 2.0, "softmax_scale": 0.3, "causal": True}
    check((9, 33), tokens, sinks=torch.randn(HEADS, dtype=torch.float64), **options)


@pytest.mark.parametrize("seqlens", [(3, 0), (0, 5), (0, 0)])
def test_no_key_and_no_query(seqlens):
    check(seqlens, 4, causal=True)
    check(seqlens, 4, sinks=torch.randn(HEADS, dtype=torch.float64))


class Watched(Offloaded):
    """Records which segments are read, prefetched and released, and poisons released ones."""

    def __init__(self, k, v):
        super().__init__(k, v)
        self.read, self.announced, self.released = [], [], []

    def segment(self, lo, hi):
        self.read.append((lo, hi))
        return super().segment(lo, hi)

    def prefetch(self, lo, hi):
        self.announced.append((lo, hi))

    def release(self, lo, hi):
        self.released.append((lo, hi))
        self.k[:, lo:hi] = self.v[:, lo:hi] = float("nan")


def test_one_segment_is_alive_at_a_time():
    """It is poisoned when it is released, and the next one is prefetched before."""
    q, k, v = tensors(3, 50)
    source, want = Watched(k.clone(), v.clone()), onchip.attention(q, k, v, causal=True)
    segment_bytes = 16 * source.token_bytes
    out, _ = offload.run(onchip.attention, q, source, causal=True, segment_bytes=segment_bytes)
    torch.testing.assert_close(out, want)
    assert source.read == source.released == [(0, 2), (2, 18), (18, 34), (34, 50)]
    assert source.announced == source.read[1:]


def test_a_window_reads_only_visible_keys():
    """NaN before the window is never read: 4 queries with 20 keys to the left."""
    q, k, v = tensors(4, 1000)
    k[:, : 1000 - 24] = v[:, : 1000 - 24] = float("nan")
    source = Watched(k, v)
    options = {"causal": True, "window_size": (20, None)}
    segment_bytes = 10 * source.token_bytes
    want = onchip.attention(q, k[:, -24:].clone(), v[:, -24:].clone(), **options)
    out, _ = offload.run(onchip.attention, q, source, segment_bytes=segment_bytes, **options)
    torch.testing.assert_close(out, want)
    assert source.read == [(976, 986), (986, 996), (996, 1000)]


def test_the_diagonal_is_one_call():
    """Of a prefill chunk over a long context only the last call is masked."""
    cut = Segmentation(64, 1000, 300, True, (None, None))
    options = [cut.options((0, 64), span) for span in cut.spans((0, 64))]
    free = {"causal": False, "window_size": (None, None)}
    assert options == [free] * 3 + [{"causal": True, "window_size": (None, None)}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accuracy_contract(dtype):
    q, k, v = (torch.randn(1, n, h, 64).to(dtype) for n, h in ((64, 4), (799, 2), (799, 2)))
    assert_accurate(lambda q, k, v, **o: streamed(q, k, v, 111, **o), q, k, v, causal=True)


def test_partials_are_not_rounded():
    q, k, v = (x.bfloat16() for x in tensors(5, 40))
    out, lse = streamed(q, k, v, 7, out_dtype=torch.float32)
    assert out.dtype == lse.dtype == torch.float32 and streamed(q, k, v, 7)[0].dtype == q.dtype


def test_mapped_tensors_are_sources(tmp_path):
    """torch.from_file and numpy's memmap, unchanged."""
    numpy = pytest.importorskip("numpy")
    q, k, v = (x.float() for x in tensors(3, 41, batch=1))
    for name, x in (("k", k), ("v", v)):
        x.numpy().tofile(tmp_path / name)
    torch_k = torch.from_file(str(tmp_path / "k"), size=k.numel()).view(k.shape)
    mapped_v = numpy.memmap(tmp_path / "v", numpy.float32, "r+", shape=v.shape)
    out, _ = streamed(q, torch_k, torch.from_numpy(mapped_v), 9, causal=True)
    torch.testing.assert_close(out, onchip.attention(q, k, v, causal=True))


class TestErrors:
    def test_source(self):
        k, v = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8)
        for bad, match in (
            ((k[0], v), r"k must be a CPU tensor .* got \(5, 2, 8\) on cpu"),
            ((k, v.to("meta")), "on meta"),
            ((k, v[:, :4]), "must agree"),
            ((k, v.half()), "must agree"),
            ((k, 3), "v must be a CPU tensor"),
        ):
            with pytest.raises(ValueError, match=match):
                Offloaded(*bad)

    @pytest.mark.parametrize("option", ["alibi_slopes", "bias", "mask", "dropout_p", "scale"])
    def test_options(self, option):
        q, k, v = tensors(2, 5)
        with pytest.raises(onchip.UnsupportedError, match=f"does not take {option}: "):
            streamed(q, k, v, 2, **{option: None})

    def test_call(self):
        q, k, v = tensors(2, 5)
        with pytest.raises(ValueError, match="segment_bytes=0 must be at least 1"):
            streamed(q, k, v, 0)
        with pytest.raises(ValueError, match="q must have rank 4"):
            streamed(q[0], k, v, 2)
        with pytest.raises(ValueError, match="q must be a torch.Tensor, got NoneType"):
            onchip.offload_attention(None, (k, v))
        with pytest.raises(ValueError, match="source must be .* got Tensor"):
            onchip.offload_attention(q, k)
        with pytest.raises(ValueError, match="window_size left=-1"):
            streamed(q, k, v, 2, window_size=(-1, None))
        with pytest.raises(ValueError, match=r"sinks must be \(heads,\) = \(6,\), got \(1,\)"):
            streamed(q, k, v, 2, sinks=torch.zeros(1))
        with pytest.raises(onchip.UnsupportedError, match="no gradient"):
            streamed(q.requires_grad_(), k, v, 2)


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("pinned", [True, False])
    @pytest.mark.parametrize("mask", MASKS[:3], ids=str)
    def test_copies_overlap_and_agree(self, pinned, mask):
        """Many short segments in two buffers: a copy that is early or late would show."""
        q, k, v = (x.half() for x in tensors(33, 4099))
        if pinned:
            k, v = k.pin_memory(), v.pin_memory()
        got = streamed(q.cuda(), k, v, 128, **mask)
        want = onchip.attention(q.cuda(), k.cuda(), v.cuda(), return_lse=True, **mask)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)

    def test_a_failing_attend_leaves_no_copy_behind(self):
        q, k, v = (x.half() for x in tensors(3, 999))
        broken = lambda *_, **__: 1 / 0
        with pytest.raises(ZeroDivisionError):
            offload.run(broken, q.cuda(), Offloaded(k, v), segment_bytes=4096)
        streamed(q.cuda(), k, v, 100)
        torch.cuda.synchronize()


LONG = """
import threading, time, torch, onchip
from onchip.fold import offload
from onchip.fold.spill import Spill

def kilobytes(*names):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return sum(int(lines[name].split()[0]) for name in names)

torch.manual_seed(0)
spill = Spill.create({path!r}, capacity=1 << 18, num_kv_heads=8, head_dim=128)
for _ in range(64):
    spill.append(*torch.randn(2, 1, 1 << 12, 8, 128, dtype=torch.bfloat16))
q = torch.randn(1, {seqlen_q}, 32, 128, dtype=torch.bfloat16)
spill.release(0, spill.seqlen)
onchip.attention(q, *spill.segment(0, 64), causal=True)  # code and thread pools are not the call's
peak, running = [0, 0], True
def watch():
    while running:
        anonymous, mapped = kilobytes("RssAnon"), kilobytes("RssFile")
        peak[:] = max(peak[0], anonymous), max(peak[1], mapped)
        time.sleep(0.005)
before = kilobytes("RssAnon"), kilobytes("RssFile")
thread = threading.Thread(target=watch)
thread.start()
out, lse = offload.run(onchip.attention, q, spill, causal=True)
running = False
thread.join()
torch.save((q, out, lse), {path!r} + ".pt")
print(*((p - b) / 1024 for p, b in zip(peak, before)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("seqlen_q", mark_all_after(1, (4, 1)))
def test_a_quarter_million_keys_on_disk(tmp_path, seqlen_q):
    """1 GB of keys and values in a file, against fp64, with less than 512 MB of other memory.

    ru_maxrss does not measure this: mapped pages of the file count as resident although the system
    can reclaim them at any time. So anonymous and file-backed memory are sampled separately. Even
    their sum stays below, because each segment is released after use.
    """
    code = LONG.format(path=str(tmp_path / "kv.safetensors"), seqlen_q=seqlen_q)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    anonymous, mapped = map(float, done.stdout.split())
    print(f"{seqlen_q} queries: {anonymous:.0f} MB anonymous, {mapped:.0f} MB of the file")
    assert anonymous + mapped < 512
    from onchip.fold.spill import Spill

    q, *result = torch.load(tmp_path / "kv.safetensors.pt")
    k, v = Spill(tmp_path / "kv.safetensors").segment(0, 1 << 18)
    heads = slice(0, 4)  # one kv head: the fp64 reference takes eight bytes where the file has two
    result = result[0][:, :, heads], result[1][:, heads]
    assert_accurate(result, q[:, :, heads], k[:, :, :1], v[:, :, :1], causal=True)
