"""The modules of flash_attn in the alias, and their names: where each name is defined here, as
"file:name". Parents are listed first.
"""


def _names(file: str, text: str) -> dict[str, str]:
    """Names of one file, with blanks between them; "theirs=ours" if onchip has another name."""
    pairs = (name.partition("=") for name in text.split())
    return {theirs: f"{file}:{ours or theirs}" for theirs, _, ours in pairs}


FUNCTIONS = _names(
    "functions",
    "flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func flash_attn_varlen_func"
    " flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func",
)
FUNCTIONS |= _names("kvcache", "flash_attn_with_kvcache")
_PASSES = ("forward", "backward", "varlen_forward", "varlen_backward")
PASSES = {f"_flash_attn_{one}": f"primitives:flash_attn_{one}" for one in _PASSES}
PASSES |= {f"_wrapped{name}": ours for name, ours in PASSES.items()}
CUTE = _names("cute", "flash_attn_func flash_attn_varlen_func")

FLASH_ATTN = {
    "flash_attn": FUNCTIONS,
    "flash_attn_2_cuda": _names("extension", "fwd bwd varlen_fwd varlen_bwd fwd_kvcache"),
    "flash_attn.flash_attn_interface": {
        **FUNCTIONS,
        **PASSES,
        **_names("options", "maybe_contiguous=contiguous round_multiple"),
        **_names("s_dmask", "_get_block_size_n=get_block_size_n"),
        **_names("extension", "USE_TRITON_ROCM"),
        "flash_attn_gpu": "extension",
    },
    "flash_attn.bert_padding": _names(
        "bert_padding",
        "index_first_axis index_first_axis_residual index_put_first_axis pad_input rearrange"
        " unpad_input unpad_input_for_concatenated_sequences",
    ),
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": _names(
        "rotary",
        "RotaryEmbedding apply_rotary_emb apply_rotary_emb_func apply_rotary_emb_kv_"
        " apply_rotary_emb_qkv_ apply_rotary_emb_torch",
    ),
    "flash_attn.flash_attn_triton": _names(
        "biased", "flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func"
    ),
    "flash_attn.losses": {},
    "flash_attn.losses.cross_entropy": _names("losses", "CrossEntropyLoss cross_entropy_loss"),
    "flash_attn.modules": {},
    "flash_attn.modules.mha": FUNCTIONS
    | _names("mha", "MHA FlashSelfAttention FlashCrossAttention SelfAttention CrossAttention")
    | _names("mha", "get_alibi_slopes"),
    "flash_attn.modules.mlp": _names("mlp", "Mlp GatedMlp FusedMLP swiglu"),
    "flash_attn.ops": {},
    "flash_attn.ops.activations": _names("mlp", "swiglu sqrelu_fwd"),
    "flash_attn.ops.fused_dense": _names("mlp", "FusedMLP FusedDense"),
    "flash_attn.ops.layer_norm": _names(
        "norms", "DropoutAddLayerNorm dropout_add_layer_norm layer_norm"
    ),
    "flash_attn.ops.rms_norm": _names(
        "norms", "DropoutAddRMSNorm dropout_add_rms_norm rms_norm RMSNorm=PlainRMSNorm"
    ),
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.cross_entropy": _names("losses", "cross_entropy_loss"),
    "flash_attn.ops.triton.layer_norm": _names("norms", "RMSNorm layer_norm_fn rms_norm_fn"),
    "flash_attn.ops.triton.rotary": _names("rotary", "apply_rotary"),
    "flash_attn.utils": {},
    "flash_attn.utils.distributed": _names(
        "collectives",
        "all_gather all_gather_raw all_reduce all_reduce_raw reduce_scatter reduce_scatter_raw",
    ),
    "flash_attn.cute": CUTE,
    "flash_attn.cute.interface": CUTE
    | _names("cute", "_validate_head_dims=check_head_dims")
    | _names("hopper", "flash_attn_combine"),
}
HOPPER = _names(
    "hopper",
    "_flash_attn_forward=flash_attn_forward _flash_attn_backward=flash_attn_backward"
    " flash_attn_combine flash_attn_func flash_attn_qkvpacked_func flash_attn_varlen_func"
    " flash_attn_with_kvcache get_scheduler_metadata",
)
HOPPER |= _names("options", "maybe_contiguous=contiguous")
FLASH_ATTN_3 = {
    "flash_attn_interface": HOPPER,
    "flash_attn_3": {},
    "flash_attn_3.flash_attn_interface": HOPPER,
}

_RANKS = "onchip.parallel distributes heads and sequences over ranks"
_MODEL = "onchip.models has a decoder, and transformers' models run with install(transformers=True)"
_AUTOGRAD = "torch.nn.functional has the activations, with gradients"
_NORM = "dropout_add_layer_norm, and layer_norm_fn of ops.triton.layer_norm, are differentiable"
UNSUPPORTED = {
    "flash_attn.flash_blocksparse_attention": "onchip.attention takes a mask=",
    "flash_attn.flash_blocksparse_attn_interface": "onchip.attention takes a mask=",
    "flash_attn.models": _MODEL,
    "flash_attn.modules.block": _MODEL,
    "flash_attn.modules.embedding": "torch.nn.Embedding does the same on one rank",
    "flash_attn.flash_attn_interface.FlashAttnVarlenKVPackedFunc": (
        "flash_attn.flash_attn_varlen_kvpacked_func is differentiable"
    ),
    "flash_attn.modules.mha.ParallelMHA": _RANKS,
    "flash_attn.modules.mlp.ParallelFusedMLP": _RANKS,
    "flash_attn.modules.mlp.ParallelGatedMlp": _RANKS,
    "flash_attn.modules.mlp.ParallelMLP": _RANKS,
    "flash_attn.ops.fused_dense.ColumnParallelLinear": _RANKS,
    "flash_attn.ops.fused_dense.ParallelFusedMLP": _RANKS,
    "flash_attn.ops.fused_dense.RowParallelLinear": _RANKS,
    "flash_attn.ops.activations.gelu_bwd": _AUTOGRAD,
    "flash_attn.ops.activations.relu_bwd": _AUTOGRAD,
    "flash_attn.ops.activations.sqrelu_bwd": _AUTOGRAD,
    "flash_attn.ops.layer_norm.DropoutAddLayerNormFn": _NORM,
    "flash_attn.ops.layer_norm.DropoutAddLayerNormParallelResidualFn": _NORM,
    "flash_attn.ops.layer_norm.DropoutAddLayerNormSubsetFn": _NORM,
    "flash_attn.ops.layer_norm.dropout_add_layer_norm_parallel_residual": _NORM,
    "flash_attn.ops.triton.k_activations": _AUTOGRAD,
    "flash_attn.ops.triton.linear": "torch.nn.functional.linear and an activation do the same",
    "flash_attn.ops.triton.mlp": "flash_attn.modules.mlp.Mlp(activation=sqrelu_fwd) does the same",
    "flash_attn.utils.distributed.get_dim_for_local_rank": _RANKS,
    "flash_attn.utils.distributed.sync_shared_params": _RANKS,
    "flash_attn.utils.generation": "onchip.LLM generates",
    "flash_attn.utils.benchmark": "torch.utils.benchmark times a call",
    "flash_attn.utils.pretrained": "onchip.models loads checkpoints",
    "flash_attn.cute.utils": "they build programs for FlashAttention-4's compiler",
    "flash_attn.cute.block_sparsity": "onchip.attention takes a mask=",
    "flash_attn.cute.interface._flash_attn_fwd": "flash_attn.cute.flash_attn_func has return_lse",
    "flash_attn.cute.interface._flash_attn_bwd": (
        "flash_attn.flash_attn_interface._flash_attn_backward writes dq, dk and dv"
    ),
    "flash_attn_interface.flash_attn_3_gpu": "call flash_attn_interface._flash_attn_forward",
    "flash_attn_interface.flash_attn_3_cuda": "call flash_attn_interface._flash_attn_forward",
}
