"""Which modules and names of flash_attn the alias has. A row is a module of flash_attn: the module
here that serves it ("" is this package), and their name -> our name. Parents are listed first.
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

FLASH_ATTN: Rows = {
    "flash_attn": ("", FUNCTIONS),
    "flash_attn_2_cuda": ("extension", _same("fwd", "bwd", "varlen_fwd", "varlen_bwd", "fwd_kvcache")),
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
}
FLASH_ATTN_3: Rows = {}
UNSERVED: dict[str, str] = {}
