"""The modules and names of flash_attn in the alias. A row is a module of flash_attn: the module
here that implements it ("" is this package), and {their name: our name}. Parents are listed first.
"""

Rows = dict[str, tuple[str, dict[str, str]]]


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


FUNCTIONS = _same(
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
_PASSES = ("forward", "backward", "varlen_forward", "varlen_backward")
PASSES = {f"_flash_attn_{one}": f"flash_attn_{one}" for one in _PASSES}
PASSES |= {f"_wrapped{name}": ours for name, ours in PASSES.items()}

CUTE = _same("flash_attn_func", "flash_attn_varlen_func")

FLASH_ATTN: Rows = {
    "flash_attn": ("", FUNCTIONS),
    "flash_attn_2_cuda": (
        "extension",
        _same("fwd", "bwd", "varlen_fwd", "varlen_bwd", "fwd_kvcache"),
    ),
    "flash_attn.flash_attn_interface": (
        "interface",
        FUNCTIONS
        | PASSES
        | {"_get_block_size_n": "get_block_size_n", "maybe_contiguous": "contiguous"}
        | _same("flash_attn_gpu", "round_multiple", "USE_TRITON_ROCM"),
    ),
    "flash_attn.bert_padding": (
        "bert_padding",
        _same(
            "index_first_axis",
            "index_first_axis_residual",
            "index_put_first_axis",
            "pad_input",
            "rearrange",
            "unpad_input",
            "unpad_input_for_concatenated_sequences",
        ),
    ),
    "flash_attn.layers": ("", {}),
    "flash_attn.layers.rotary": (
        "rotary",
        _same(
            "RotaryEmbedding",
            "apply_rotary_emb",
            "apply_rotary_emb_func",
            "apply_rotary_emb_kv_",
            "apply_rotary_emb_qkv_",
            "apply_rotary_emb_torch",
        ),
    ),
    "flash_attn.flash_attn_triton": (
        "biased",
        _same("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"),
    ),
    "flash_attn.losses": ("", {}),
    "flash_attn.losses.cross_entropy": ("losses", _same("CrossEntropyLoss", "cross_entropy_loss")),
    "flash_attn.modules": ("", {}),
    "flash_attn.modules.mha": (
        "mha",
        _same("MHA", "FlashSelfAttention", "FlashCrossAttention", "SelfAttention", "CrossAttention")
        | _same("get_alibi_slopes", *FUNCTIONS),
    ),
    "flash_attn.modules.mlp": ("mlp", _same("Mlp", "GatedMlp", "FusedMLP", "swiglu")),
    "flash_attn.ops": ("", {}),
    "flash_attn.ops.activations": ("mlp", _same("swiglu", "sqrelu_fwd")),
    "flash_attn.ops.fused_dense": ("mlp", _same("FusedMLP", "FusedDense")),
    "flash_attn.ops.layer_norm": (
        "norms",
        _same("DropoutAddLayerNorm", "dropout_add_layer_norm", "layer_norm"),
    ),
    "flash_attn.ops.rms_norm": (
        "norms",
        _same("DropoutAddRMSNorm", "dropout_add_rms_norm", "rms_norm")
        | {"RMSNorm": "PlainRMSNorm"},
    ),
    "flash_attn.ops.triton": ("", {}),
    "flash_attn.ops.triton.cross_entropy": ("losses", _same("cross_entropy_loss")),
    "flash_attn.ops.triton.layer_norm": ("norms", _same("RMSNorm", "layer_norm_fn", "rms_norm_fn")),
    "flash_attn.ops.triton.rotary": ("rotary", _same("apply_rotary")),
    "flash_attn.utils": ("", {}),
    "flash_attn.utils.distributed": (
        "collectives",
        _same("all_gather", "all_gather_raw", "all_reduce", "all_reduce_raw")
        | _same("reduce_scatter", "reduce_scatter_raw"),
    ),
    "flash_attn.cute": ("cute", CUTE),
    "flash_attn.cute.interface": (
        "cute",
        CUTE
        | {"_validate_head_dims": "check_head_dims", "flash_attn_combine": "flash_attn_combine"},
    ),
}
_HOPPER = {
    "_flash_attn_forward": "flash_attn_forward",
    "_flash_attn_backward": "flash_attn_backward",
}
_HOPPER |= _same(
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
)
_HOPPER |= {"maybe_contiguous": "contiguous"}
FLASH_ATTN_3: Rows = {
    "flash_attn_interface": ("hopper", _HOPPER),
    "flash_attn_3": ("hopper", {}),
    "flash_attn_3.flash_attn_interface": ("hopper", _HOPPER),
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
