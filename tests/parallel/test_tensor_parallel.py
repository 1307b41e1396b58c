"""Tensor parallelism: two ranks equal one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import onchip
from onchip import models
from onchip.models import ModelConfig, Shard, random_model
from onchip.parallel.tensor_parallel import TensorParallelGroup

LLAMA = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "mlp_bias": True,
}
QWEN3 = {k: v for k, v in LLAMA.items() if k != "mlp_bias"}
QWEN3 |= {"model_type": "qwen3", "head_dim": 20, "tie_word_embeddings": True}
MIXTRAL = {k: v for k, v in LLAMA.items() if not k.endswith("bias")}
MIXTRAL |= {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2}
MIXTRAL |= {"sliding_window": None}
QWEN2_MOE = {k: v for k, v in LLAMA.items() if not k.endswith("_bias")}
QWEN2_MOE |= {"model_type": "qwen2_moe", "num_experts": 5, "num_experts_per_tok": 2}
QWEN2_MOE |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
QWEN2_MOE |= {"norm_topk_prob": False, "mlp_only_layers": [0]}
GPT_OSS = {k: v for k, v in LLAMA.items() if k != "mlp_bias"}
GPT_OSS |= {"model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2}
GPT_OSS |= {"head_dim": 12, "sliding_window": 7, "rope_scaling": {"type": "linear", "factor": 2.0}}
DEEPSEEK_V2 = {k: v for k, v in LLAMA.items() if not k.endswith("bias")}
DEEPSEEK_V2 |= {"model_type": "deepseek_v2", "num_key_value_heads": 4, "q_lora_rank": None}
DEEPSEEK_V2 |= {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
DEEPSEEK_V2 |= {"v_head_dim": 14, "first_k_dense_replace": 1, "n_shared_experts": 2}
DEEPSEEK_V2 |= {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK_V3 = DEEPSEEK_V2 | {"model_type": "deepseek_v3", "q_lora_rank": 28, "n_group": 3}
DEEPSEEK_V3 |= {"topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
GPT2 = {"model_type": "gpt2", "vocab_size": 131, "n_embd": 48, "n_layer": 2, "n_head": 4}
GPT2 |= {"n_positions": 64}


def run_ranks(folder, world_size):
    worker, package = Path(__file__).parent / "ranks.py", Path(onchip.__file__).parents[1]
    paths = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    start = lambda rank: subprocess.Popen(
        [sys.executable, worker, folder, str(rank), str(world_size)],
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    for process in [start(rank) for rank in range(world_size)]:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()


@torch.no_grad()
def test_two_ranks_equal_one(tmp_path):
    """gloo, fp64, biases that must be added once, over whole sequences and over pages."""
    families = {"llama": LLAMA, "qwen3": QWEN3, "mixtral": MIXTRAL, "gpt2": GPT2}
    families |= {"qwen2_moe": QWEN2_MOE, "gpt_oss": GPT_OSS}
    families |= {"deepseek_v2": DEEPSEEK_V2, "deepseek_v3": DEEPSEEK_V3}
    for name, data in families.items():
        config = ModelConfig.from_hf(data)
        models.save(random_model(config, seed=1, dtype=torch.float64), tmp_path / name)
    run_ranks(tmp_path, 2)
    text = torch.arange(41).mul(29).remainder(130)
    for name in families:
        one = models.load(tmp_path / name)
        expected = one.logits(one.full(text[None])[0])
        for rank in (0, 1):
            whole, paged = torch.load(tmp_path / name / f"{rank}.pt")
            torch.testing.assert_close(whole, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(paged, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "change, world_size, sentence",
    [
        ({}, 4, "num_kv_heads=2 cannot be divided among 4 ranks"),
        ({}, 3, "num_heads=4 cannot be divided among 3 ranks"),
        ({"intermediate_size": 71}, 2, "intermediate_size=71 cannot be divided among 2 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change, world_size, sentence):
    config = ModelConfig.from_hf(LLAMA | change)
    with pytest.raises(ValueError, match=sentence):
        models.Decoder(config, shard=Shard(0, world_size))


@pytest.fixture
def single_rank_mesh(tmp_path):
    """The mesh of a single rank, in this process."""
    where = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_wrong_parts_and_meshes_are_refused(single_rank_mesh):
    config = ModelConfig.from_hf(LLAMA)
    with pytest.raises(ValueError, match="Shard\\(rank=0, world_size=2\\), this is rank 0 of 1"):
        TensorParallelGroup(single_rank_mesh).connect(models.Decoder(config, shard=Shard(0, 2)))
    with pytest.raises(ValueError, match="the mesh has 2 dimensions"):
        TensorParallelGroup(init_device_mesh("cpu", (1, 1)))
    group = TensorParallelGroup(single_rank_mesh)
    decoder = group.connect(random_model(config))
    with pytest.raises(ValueError, match="share no gradient"):
        decoder.full(torch.ones(1, 3, dtype=torch.int64))
    group.leave()
    with torch.no_grad(), pytest.raises(ValueError, match="has left its group"):
        decoder.full(torch.ones(1, 3, dtype=torch.int64))
