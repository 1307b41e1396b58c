"""A program written for flash_attn, without any reference to onchip; test_program.py runs it as it
is. A small decoder is trained on packed documents and then generates from a paged cache; where
flash_attn would need a GPU and 16 bits, the device and the type are arguments.
"""

import torch
import torch.nn.functional as F
from flash_attn import flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.layers.rotary import apply_rotary_emb
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads, max_seqlen):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        angle = torch.arange(max_seqlen)[:, None] * 100.0 ** -torch.linspace(0, 1, 8)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x, cu_seqlens, max_seqlen):
        """x: (total, dim), documents one after another."""
        qkv = self.qkv(x).view(-1, 3, self.heads, self.head_dim)
        q, k, v = qkv.unbind(1)
        rotate = lambda t: apply_rotary_emb(
            t, self.cos, self.sin, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen
        )
        qkv = torch.stack([rotate(q), rotate(k), v], dim=1)
        out = flash_attn_varlen_qkvpacked_func(
            qkv, cu_seqlens, max_seqlen, 0.0, None, True, window_size=(-1, -1)
        )
        return self.out(out.flatten(1))

    def step(self, x, cache, block_table, cache_seqlens):
        """x: (batch, new tokens, dim); rotates keys, appends keys and values to the cache."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        out = flash_attn_with_kvcache(
            q,
            cache[0],
            cache[1],
            k,
            v,
            rotary_cos=self.cos,
            rotary_sin=self.sin,
            cache_seqlens=cache_seqlens,
            block_table=block_table,
            causal=True,
            rotary_interleaved=False,
        )
        return self.out(out.flatten(2))


class Decoder(nn.Module):
    def __init__(self, vocab=64, dim=64, heads=4, layers=2, max_seqlen=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attention = nn.ModuleList(Attention(dim, heads, max_seqlen) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(layers)
        )

    def blocks(self, x, attend):
        for layer, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attend(layer, attention, F.layer_norm(x, x.shape[-1:]))
            x = x + mlp(F.layer_norm(x, x.shape[-1:]))
        return F.layer_norm(x, x.shape[-1:]) @ self.embed.weight.T * x.shape[-1] ** -0.5

    def forward(self, ids, mask):
        """ids, mask: (batch, seqlen), padded; logits are padded too."""
        x, indices, cu_seqlens, max_seqlen, _ = unpad_input(self.embed(ids), mask)
        logits = self.blocks(x, lambda _, attention, y: attention(y, cu_seqlens, max_seqlen))
        return pad_input(logits, indices, *ids.shape)

    @torch.inference_mode()
    def generate(self, prompts, tokens, block_size=256):
        """Greedy; prompts: a list of lists of ids. The pages of a sequence are in any order."""
        device, dtype = self.embed.weight.device, self.embed.weight.dtype
        batch, blocks = len(prompts), 2
        heads, head_dim = self.attention[0].heads, self.attention[0].head_dim
        shape = (2, len(self.attention), batch * blocks, block_size, heads, head_dim)
        caches = torch.full(shape, float("nan"), device=device, dtype=dtype).unbind(1)
        order = torch.arange(batch * blocks, device=device, dtype=torch.int32).flip(0)
        block_table = order.view(batch, blocks).contiguous()
        seqlens = torch.zeros(batch, device=device, dtype=torch.int32)

        def step(rows, ids):
            table, lengths = block_table[rows], seqlens[rows]
            return self.blocks(
                self.embed(ids), lambda i, a, y: a.step(y, caches[i], table, lengths)
            )[:, -1].argmax(-1)

        last = torch.empty(batch, device=device, dtype=torch.int64)
        for b, prompt in enumerate(prompts):  # prompts one by one, of any length
            last[b] = step(slice(b, b + 1), torch.tensor([prompt], device=device))
            seqlens[b] = len(prompt)
        steps = [last]
        for _ in range(tokens - 1):  # then all together, a token each
            steps.append(step(slice(None), steps[-1][:, None]))
            seqlens += 1
        return torch.stack(steps, 1).tolist()


def batch_of_patterns(generator, device, batch=8, seqlen=33):
    """Documents of different lengths that count upwards by a step of their own, modulo 64."""
    start, by = torch.randint(64, (2, batch, 1), generator=generator)
    ids = (start + (1 + by % 3) * torch.arange(seqlen)) % 64
    lengths = torch.randint(9, seqlen + 1, (batch, 1), generator=generator)
    mask = torch.arange(seqlen) < lengths
    return ids.to(device), mask.to(device)


def train(model, steps, device):
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        ids, mask = batch_of_patterns(generator, device)
        logits = model(ids, mask)[:, :-1]
        targets = ids[:, 1:].masked_fill(~mask[:, 1:], -100)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
