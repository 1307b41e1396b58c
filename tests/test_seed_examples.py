"""The code samples of the five texts that this project started from run, with other paths to models
and, without a GPU, with less work. Each test says which text and section it stands for.

The samples say device="cuda": here that is a GPU if there is one. Their sizes are kept on a GPU;
on the CPU heads and batch are few, and long sequences stay long where they are the point.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onchip import testing as ot
from onchip.integrations import flash_attn as drop_in
from onchip.integrations import sdpa

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LAST = 40  # rows that are judged: those that see most


@pytest.fixture
def flash_attn():
    """`from flash_attn import ...` works, and transformers finds it."""
    with drop_in.installed(transformers=True):
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A folder like those of the hub: a random Llama with 8,192 positions, and its tokenizer, of
    bytes and of two dots.
    """
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "..", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(".", ".")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = transformers.LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=vocab["</s>"],
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


def judge(out, q, k, v, causal):
    """The accuracy rule for the last rows of (batch, seqlen, heads, head_dim) tensors."""
    ot.assert_accurate(out[:, -LAST:], q[:, -LAST:], k, v, causal=causal)


def test_002_conceptual_algorithm():
    """002, "Tiling and Recomputation": the tiled loop. Two repairs: the head dimension and the
    denominators are both called d in the text, and 1 / sqrt(d) is missing.
    """

    def flash_attention(Q, K, V, block_size):
        N, dim = Q.shape
        m = torch.full((N,), -math.inf, dtype=Q.dtype)
        d = torch.zeros(N, dtype=Q.dtype)
        O = torch.zeros(N, dim, dtype=Q.dtype)
        for j in range(0, N, block_size):
            K_block, V_block = K[j : j + block_size, :], V[j : j + block_size, :]
            for i in range(N):
                x = Q[i, :] @ K_block.T / math.sqrt(dim)
                m_new = max(m[i], x.max())
                scale = torch.exp(m[i] - m_new)
                d_new = d[i] * scale + torch.exp(x - m_new).sum()
                O[i] = O[i] * d[i] * scale / d_new + (torch.exp(x - m_new) / d_new) @ V_block
                m[i] = m_new
                d[i] = d_new
        return O

    q, k, v = ot.make_qkv(1, 63, num_heads=1, head_dim=16, dtype=torch.float64)
    out = flash_attention(q[0, :, 0], k[0, :, 0], v[0, :, 0], 13)
    torch.testing.assert_close(out, ot.oracle(q, k, v).out[0, :, 0])


@pytest.mark.parametrize("repaired", [False, True])
def test_004_forward_pseudocode(repaired):
    """004, "FlashAttention forward pass": as printed, m_i and l_i are rebound and never written
    back, which leaves attention over the last block of keys. With two assignments it is attention.
    """
    q, k, v = ot.make_qkv(1, 66, num_heads=1, head_dim=16, dtype=torch.float64)
    Q, K, V = (t[0, :, 0] for t in (q, k, v))
    (N, d), B_r, B_c = Q.shape, 16, 11
    O, m = torch.zeros_like(Q), torch.full((N, 1), -math.inf, dtype=Q.dtype)
    l = torch.zeros(N, 1, dtype=Q.dtype)
    for j in range(0, N, B_c):
        K_j, V_j = K[j : j + B_c], V[j : j + B_c]
        for i in range(0, N, B_r):
            Q_i, O_i, m_i, l_i = (t[i : i + B_r] for t in (Q, O, m, l))
            S_ij = Q_i @ K_j.T / math.sqrt(d)
            m_new = torch.maximum(m_i, S_ij.amax(1, keepdim=True))
            P_ij = torch.exp(S_ij - m_new)
            l_new = torch.exp(m_i - m_new) * l_i + P_ij.sum(1, keepdim=True)
            O_i = (torch.exp(m_i - m_new) * l_i / l_new) * O_i + (1 / l_new) * P_ij @ V_j
            m_i, l_i = m_new, l_new
            O[i : i + B_r] = O_i
            if repaired:
                m[i : i + B_r], l[i : i + B_r] = m_i, l_i
    exact = ot.oracle(q, k, v) if repaired else ot.oracle(q, k[:, -B_c:], v[:, -B_c:])
    torch.testing.assert_close(O, exact.out[0, :, 0])


def test_002_pytorch_integration():
    """002, "PyTorch Integration (2.0+)"."""
    q, k, v = (t.transpose(1, 2) for t in ot.make_qkv(2, 399, num_heads=2, device=DEVICE))
    with sdpa.active():
        from torch.nn.functional import scaled_dot_product_attention

        output = scaled_dot_product_attention(q, k, v, attn_mask=None)
        assert sum(sdpa.counts().served.values()) == 1
    judge(*(t.transpose(1, 2) for t in (output, q, k, v)), causal=False)


def deprecated(**switches):
    """The context manager that the text names; torch warns of it."""
    with pytest.warns(FutureWarning):
        return torch.backends.cuda.sdp_kernel(**switches)


def current(**switches):
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


@pytest.mark.parametrize("sdp_kernel", [deprecated, current])
def test_004_flash_attention_via_sdpa(sdp_kernel, capsys):
    """004, "PyTorch - FlashAttention via SDPA", under sdp_kernel and under what replaced it."""
    batch, heads, seq_len, d_head = (4, 32, 8192, 128) if GPU else (1, 2, 1024, 128)
    make = lambda: torch.randn(batch, heads, seq_len, d_head, device=DEVICE, dtype=torch.float16)
    with sdpa.active():
        Q, K, V = make(), make(), make()
        with sdp_kernel(enable_flash=True, enable_math=False, enable_mem_efficient=False):
            output = F.scaled_dot_product_attention(Q, K, V)
        assert output.shape == (batch, heads, seq_len, d_head)
        print(torch.backends.cuda.flash_sdp_enabled())
        output_causal = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
        assert sum(sdpa.counts().served.values()) == 2 and not sdpa.counts().left
    assert capsys.readouterr().out == "True\n"
    some = [t[:1, :2].transpose(1, 2) for t in (Q, K, V)]
    judge(output[:1, :2].transpose(1, 2), *some, causal=False)
    judge(output_causal[:1, :2].transpose(1, 2), *some, causal=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_002_hugging_face_transformers(flash_attn, llama, dtype):
    """002, "Hugging Face Transformers": a model is loaded with FlashAttention-2."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        llama, torch_dtype=getattr(torch, dtype), attn_implementation="flash_attention_2"
    )
    eager = AutoModelForCausalLM.from_pretrained(
        llama, torch_dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(256, (2, 37))
    with torch.no_grad():
        got, want = (m(input_ids=ids).logits.float() for m in (model, eager))
    step = torch.finfo(getattr(torch, dtype)).eps
    assert (got - want).abs().max() < 16 * step * want.abs().max()


def test_002_direct_flash_attention_usage(flash_attn):
    """002, "Direct Flash Attention Usage"."""
    q, k, v = ot.make_qkv(2, 799, num_heads=2, dtype=torch.float16, device=DEVICE)
    from flash_attn import flash_attn_func

    # Q, K, V: (batch, seqlen, nheads, headdim)
    output = flash_attn_func(q, k, v, causal=True)
    judge(output, q, k, v, causal=True)


def test_004_enabling_flash_attention_2(flash_attn, llama):
    """004, "HuggingFace - Enabling FlashAttention-2": a long input through the loaded model. The
    sample's device_map="auto" needs the package accelerate; model.to() does the same for one
    device.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        llama, torch_dtype=torch.float16, attn_implementation="flash_attention_2"
    ).to(DEVICE)
    assert model.config._attn_implementation == "flash_attention_2"

    tokenizer = AutoTokenizer.from_pretrained(llama)
    long_input = tokenizer("..." * 4096, return_tensors="pt").to(DEVICE)
    assert long_input["input_ids"].shape == (1, 6144)
    with torch.no_grad():
        output = model(**long_input)
        short = model(**tokenizer("..." * 64, return_tensors="pt").to(DEVICE))
    assert output.logits.isfinite().all()
    # causal: the beginning of the long text says what the short one says, up to the rounding
    torch.testing.assert_close(output.logits[:, :96], short.logits, rtol=0.01, atol=0.01)


def test_004_paged_attention_in_practice(llama, capsys):
    """004, "vLLM - PagedAttention in Practice": beam search over prompts, arguments as printed."""
    from onchip import LLM, SamplingParams

    with LLM(
        model=str(llama),
        tensor_parallel_size=1,
        gpu_memory_utilization=0.90,
        max_model_len=4096,
        block_size=16,
        swap_space=4,
    ) as llm:
        sampling_params = SamplingParams(
            temperature=0.0,
            max_tokens=256,
            use_beam_search=True,
            best_of=4,
        )
        prompts = [
            "Explain the difference between FlashAttention and standard attention:",
            "What is the purpose of the KV cache in transformer inference?",
        ]
        outputs = llm.generate(prompts, sampling_params)
        for output in outputs:
            print(f"Prompt: {output.prompt[:60]}...")
            print(f"Output: {output.outputs[0].text[:200]}")
            print(f"Tokens generated: {len(output.outputs[0].token_ids)}")
            print()
    printed = capsys.readouterr().out
    assert [o.prompt for o in outputs] == prompts and "Tokens generated: " in printed
    for output in outputs:
        best = output.outputs[0]
        assert 0 < len(best.token_ids) <= 256
        want = logprob(llama, output.prompt_token_ids, best.token_ids)
        assert abs(best.cumulative_logprob - want) < 1e-3 * abs(want)


def logprob(folder, prompt, tokens) -> float:
    """What transformers gives to these tokens after this prompt, in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float(scores.gather(1, torch.tensor(tokens)[:, None]).sum())


def test_004_flash_attention_direct(flash_attn):
    """004, "FlashAttention Direct - Using the flash-attn Package"."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    batch, seq_len, n_heads, d_head = (4, 8192, 32, 128) if GPU else (1, 2048, 2, 128)
    make = lambda *shape: torch.randn(*shape, n_heads, d_head, device=DEVICE, dtype=torch.float16)
    q, k, v = (make(batch, seq_len) for _ in "qkv")

    output = flash_attn_func(q, k, v, causal=True)
    assert output.shape == (batch, seq_len, n_heads, d_head)
    judge(output[:1, :, :2], *(t[:1, :, :2] for t in (q, k, v)), causal=True)

    cu_seqlens_q = torch.tensor([0, 1024, 3072, 8192], dtype=torch.int32, device=DEVICE)
    cu_seqlens_k = torch.tensor([0, 1024, 3072, 8192], dtype=torch.int32, device=DEVICE)
    max_seqlen_q = 5120
    max_seqlen_k = 5120
    q_packed, k_packed, v_packed = (make(8192) for _ in "qkv")
    output_varlen = flash_attn_varlen_func(
        q_packed,
        k_packed,
        v_packed,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=True,
    )
    for lo, hi in ((0, 1024), (1024, 3072), (3072, 8192)):
        one = (t[None, lo:hi, :2] for t in (output_varlen, q_packed, k_packed, v_packed))
        judge(*one, causal=True)
