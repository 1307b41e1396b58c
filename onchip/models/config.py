"""The config of a decoder, read from Hugging Face's config.json.

A family (`model_type`) is one function of `FAMILIES` that reads the fields of its config.json. Any
field that it does not read and that is not known to be harmless is refused: it might change the
mathematics.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from onchip.core.problem import check_head_dims
from onchip.models.fields import Fields, check_size
from onchip.models.layer_config import (
    ClampedSwiGLU,
    ExpertGroups,
    Experts,
    LatentSizes,
    Layer,
)
from onchip.models.multimodal import text_fields
from onchip.models.rotary import Rotary, yarn_growth

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rms", "layer"]
MAX_LAYERS = 4096  # a config.json is untrusted: it must not make this process build longer lists
MAX_EXPERTS = 65_536  # of all layers together, for the same reason

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# Fields that do not change the forward pass of inference. auto_map names code, which is not run
# here; transformers does not need it either for types that it has.
_HARMLESS_BY_SUBJECT = {
    "provenance": "_name_or_path architectures auto_map tokenizer_class transformers_version"
    " unsloth_fixed unsloth_version",
    "initialisation, training, dropout": "attention_dropout attn_pdrop embd_pdrop"
    " gradient_checkpointing initializer_range pretraining_tp resid_pdrop",
    "ids of special tokens": "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id",
    "heads for other tasks": "finetuning_task id2label label2id problem_type summary_activation"
    " summary_first_dropout summary_proj_to_labels summary_type summary_use_proj"
    " task_specific_params",
    "settings of the author's run": "_attn_implementation_autoset _sliding_window_pattern"
    " attn_implementation cache_implementation chunk_size_feed_forward dtype"
    " keys_to_ignore_at_inference output_attentions output_hidden_states reorder_and_upcast_attn"
    " return_dict torch_dtype use_cache",
}
_HARMLESS = {name for names in _HARMLESS_BY_SUBJECT.values() for name in names.split()}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    norm: "rms" is x / rms(x) * (norm_offset + weight), "layer" a LayerNorm with bias. post_norms:
    the outputs of attention and MLP are also normalised before they are added to the residual
    stream. qk_norm: queries and keys of each head are normalised before they are rotated. gated:
    the MLP is down(activation(gate(x)) * up(x)), else down(activation(up(x))). softcap and
    logit_softcap: c * tanh(x / c) of scores and of logits, 0 for none. sinks: the softmax of every
    head of a layer has one more logit, learned and without a value. latent: multi-head latent
    attention, whose cache has one head of head_dim=latent.cached. unused_layers: further layers in
    a file, which draft tokens and are not loaded. tied: the head is the embedding. source: the text
    of its config.json.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    max_seqlen: int
    norm: Norm = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    softmax_scale: float | None = None
    softcap: float = 0.0
    logit_softcap: float = 0.0
    sinks: bool = False
    latent: LatentSizes | None = None
    unused_layers: int = 0
    embedding_scale: float = 1.0
    learned_positions: bool = False
    tied: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    source: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        for size in (f.name for f in fields(self) if f.type is int and f.default is MISSING):
            check_size(size, getattr(self, size))
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise ValueError(f"num_layers={len(self.layers)} must be in [1, {MAX_LAYERS}]")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        self._check_heads()
        for name, kinds in (("norm", Norm), ("activation", Activation)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {get_args(kinds)}")
        scale = 1.0 if self.softmax_scale is None else self.softmax_scale
        if not self.norm_eps > 0 or not 0 < scale < math.inf:
            raise ValueError(
                f"norm_eps={self.norm_eps} and softmax_scale={self.softmax_scale} must be above 0"
                " and finite"
            )
        if not self.softcap >= 0 or not self.logit_softcap >= 0:
            raise ValueError(
                f"softcap={self.softcap} and logit_softcap={self.logit_softcap} must be at least 0"
            )
        for layer in self.layers:
            self._check_layer(layer)
        num_experts = sum(layer.experts.num_experts for layer in self.layers if layer.experts)
        if num_experts > MAX_EXPERTS:
            raise ValueError(f"{num_experts} experts of all layers exceed {MAX_EXPERTS}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The distinct rotations of the layers, in the order of their first use."""
        return tuple(dict.fromkeys(l.rotary for l in self.layers if l.rotary is not None))

    @classmethod
    def from_hf(cls, data: Mapping[str, Any], ignore: Collection[str] = ()) -> "ModelConfig":
        """From the fields of a Hugging Face config.json; of a multimodal one, the language model.
        ignore: names of fields that change nothing.
        """
        data = text_fields(data)
        if not isinstance(data, Mapping):
            raise ValueError(f"config.json must hold an object, got {type(data).__name__}")
        model_type = data.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(f"{model_type=} is not one of {known}")
        f = Fields(data, f"config.json of {model_type}")
        facts = FAMILIES[model_type](f) | token_ids(data)
        hint = "; if it does not, pass ignore=['{}']"
        f.reject_unread({"model_type", *_HARMLESS, *ignore}, hint)
        return cls(model_type=model_type, source=json.dumps(dict(data), indent=2), **facts)

    def shard(self, world_size: int) -> "ModelConfig":
        """The config of one of world_size ranks: its share of the heads, of the MLP and of every
        expert.
        """
        names = ["num_heads", "num_kv_heads", "intermediate_size"]
        if self.latent is not None:
            names.remove("num_kv_heads")  # the latent vector is that of all heads
        shares = {name: _divide(name, getattr(self, name), world_size) for name in names}
        layers = tuple(_shard_experts(layer, world_size) for layer in self.layers)
        return replace(self, **shares, layers=layers)

    def _check_heads(self) -> None:
        if self.latent is None:
            check_head_dims(self.head_dim, self.head_dim)  # of keys and values
            return
        check_head_dims(self.head_dim, self.latent.kv_rank)
        if (self.num_kv_heads, self.head_dim) != (1, self.latent.cached):
            raise ValueError(
                f"latent attention has one head of {self.latent.cached} numbers in its cache, got"
                f" num_kv_heads={self.num_kv_heads} of head_dim={self.head_dim}"
            )
        if self.softmax_scale is None:
            raise ValueError("latent attention needs softmax_scale: head_dim is that of its cache")
        options = ("qk_norm", "qkv_bias", "out_bias", "sinks", "learned_positions")
        if given := [name for name in options if getattr(self, name)]:
            raise ValueError(f"latent attention has no {', '.join(given)}")

    def _check_layer(self, layer: Layer) -> None:
        if layer.window is not None:
            check_size("window", layer.window)
        if layer.rotary is not None and layer.rotary.dim > self.head_dim:
            raise ValueError(f"rotary dim={layer.rotary.dim} exceeds head_dim={self.head_dim}")
        if (layer.rotary is None) != self.learned_positions:
            raise ValueError("a layer rotates its queries if and only if no positions are learned")
        if layer.experts is not None and (self.mlp_bias or not self.gated):
            raise ValueError("experts are gated MLPs, and mlp_bias is of layers without experts")


def _divide(name: str, value: int, world_size: int) -> int:
    if value % world_size:
        raise ValueError(f"{name}={value} cannot be divided among {world_size} ranks")
    return value // world_size


def _shard_experts(layer: Layer, world_size: int) -> Layer:
    experts = layer.experts
    if experts is None:
        return layer
    sizes = {"intermediate_size": experts.intermediate_size}
    if experts.shared_size is not None:
        sizes["shared_size"] = experts.shared_size
    sizes = {name: _divide(f"{name} of experts", n, world_size) for name, n in sizes.items()}
    return replace(layer, experts=replace(experts, **sizes))


def token_ids(data: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token_id (null or an id) and eos_token_id (null, an id or a list of ids)."""
    bos, eos = data.get("bos_token_id"), data.get("eos_token_id")
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    for token in (*eos, *(() if bos is None else (bos,))):
        if type(token) is not int or token < 0:
            raise ValueError(f"token id {token!r} in config.json must be a non-negative integer")
    return {"bos_token_id": bos, "eos_token_ids": eos}


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _sizes(f: Fields) -> dict[str, Any]:
    """The fields of every family with Llama's field names."""
    num_heads, hidden_size = f.size("num_attention_heads"), f.size("hidden_size")
    return {
        "vocab_size": f.size("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": f.size("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": f.size("num_key_value_heads", num_heads),
        "head_dim": f.size("head_dim", hidden_size // num_heads),
        "max_seqlen": f.size("max_position_embeddings"),
        "norm_eps": f.positive("rms_norm_eps"),
        "tied": f.flag("tie_word_embeddings", False),
    }


def _num_layers(f: Fields) -> int:
    count = f.size("num_hidden_layers")
    if count > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers={count} exceeds {MAX_LAYERS}")
    return count


def _rotary(
    f: Fields, head_dim: int, partial: bool = False, default_theta: float = 10_000.0
) -> Rotary:
    """rope_parameters of transformers 5, or rope_theta and rope_scaling of older versions."""
    stated = {"rope_theta": f.positive("rope_theta", default_theta)} | f.block("rope_scaling")
    if partial:
        stated = {"partial_rotary_factor": f.positive("partial_rotary_factor", 1.0)} | stated
    stated |= f.block("rope_parameters")
    return Rotary.from_hf(stated, head_dim, f.size("max_position_embeddings"), partial)


def _uniform(f: Fields, rotary: Rotary, window: int | None = None) -> tuple[Layer, ...]:
    return (Layer(window, rotary),) * _num_layers(f)


def _patterned(
    f: Fields, window: int | None, default: list[str], rotary: dict[str, Rotary]
) -> tuple[Layer, ...]:
    """Layers by layer_types, the field that names the layers with a sliding window."""
    kinds = f.texts("layer_types", default)
    if len(kinds) != len(default) or not set(kinds) <= set(rotary):
        raise ValueError(f"layer_types must be {len(default)} of {sorted(rotary)}, got {kinds}")
    sliding = "sliding_attention"
    if sliding in kinds and window is None:
        raise ValueError("layer_types has sliding_attention, but sliding_window is null")
    return tuple(Layer(window if kind == sliding else None, rotary[kind]) for kind in kinds)


def _llama(f: Fields) -> dict[str, Any]:
    sizes = _sizes(f)
    bias = f.flag("attention_bias", False)
    return sizes | {
        "layers": _uniform(f, _rotary(f, sizes["head_dim"])),
        "activation": _activation(f.text("hidden_act", "silu")),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": f.flag("mlp_bias", False),
    }


def _mistral(f: Fields) -> dict[str, Any]:
    f.require_present("num_key_value_heads", "sliding_window")
    return _windowed(f)


def _phi3(f: Fields) -> dict[str, Any]:
    f.take("original_max_position_embeddings", None)  # only longrope reads it, which is refused
    return _windowed(f, partial=True)


def _windowed(f: Fields, partial: bool = False) -> dict[str, Any]:
    """Either all layers have a sliding window or none has."""
    sizes = _sizes(f)
    rotary = _rotary(f, sizes["head_dim"], partial)
    return sizes | {
        "layers": _uniform(f, rotary, f.size("sliding_window", None)),
        "activation": _activation(f.text("hidden_act", "silu")),
    }


def _qwen(f: Fields) -> dict[str, Any]:
    """Layers from max_window_layers on have a sliding window, if windows are used at all."""
    f.require_present("num_key_value_heads")
    sizes, count = _sizes(f), _num_layers(f)
    window, start = f.size("sliding_window", None), f.take("max_window_layers", count)
    if type(start) is not int:
        raise ValueError(f"max_window_layers={start!r} must be an integer")
    if f.flag("use_sliding_window", False):
        f.require_present("sliding_window", "max_window_layers")
    else:
        window = None
    slides = lambda i: window is not None and i >= start
    default = ["sliding_attention" if slides(i) else "full_attention" for i in range(count)]
    rotary = dict.fromkeys(("sliding_attention", "full_attention"), _rotary(f, sizes["head_dim"]))
    return sizes | {
        "layers": _patterned(f, window, default, rotary),
        "activation": _activation(f.text("hidden_act", "silu")),
    }


def _qwen2(f: Fields) -> dict[str, Any]:
    return _qwen(f) | {"qkv_bias": True}


def _qwen3(f: Fields) -> dict[str, Any]:
    f.require_present("head_dim")
    bias = f.flag("attention_bias", False)
    return _qwen(f) | {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}


def _mixtral(f: Fields) -> dict[str, Any]:
    """Experts in every layer, and either all layers have a sliding window or none has."""
    f.require_present("num_key_value_heads", "sliding_window")
    sizes = _sizes(f)
    experts = _experts(f, sizes["intermediate_size"], is_normalised=True)
    rotary = _rotary(f, sizes["head_dim"], default_theta=1_000_000.0)
    return sizes | {
        "layers": (Layer(f.size("sliding_window", None), rotary, experts),) * _num_layers(f),
        "activation": _activation(f.text("hidden_act", "silu")),
    }


def _qwen_moe(
    f: Fields, layers: tuple[Layer, ...], shared_size: int | None = None
) -> dict[str, Any]:
    """Experts in every decoder_sparse_step-th of the layers, but for mlp_only_layers."""
    f.require_present("num_key_value_heads", "norm_topk_prob")
    sizes, is_normalised = _sizes(f), f.flag("norm_topk_prob", False)
    experts = _experts(f, f.size("moe_intermediate_size"), is_normalised, shared_size)
    pairs = zip(layers, _sparsity(f), strict=True)
    return sizes | {
        "layers": tuple(replace(l, experts=experts) if sparse else l for l, sparse in pairs),
        "activation": _activation(f.text("hidden_act", "silu")),
    }


def _qwen2_moe(f: Fields) -> dict[str, Any]:
    """Beside the experts, a shared one. Of the first max_window_layers layers every other has a
    sliding window, if windows are used at all.
    """
    count, window, end = _num_layers(f), None, f.take("max_window_layers", 28)
    if f.flag("use_sliding_window", False):
        f.require_present("sliding_window", "max_window_layers")
        window = f.size("sliding_window")
    else:
        f.take("sliding_window", None)
    if type(end) is not int:
        raise ValueError(f"max_window_layers={end!r} must be an integer")
    slides = lambda i: window is not None and i < end and i % 2 == 0
    default = ["sliding_attention" if slides(i) else "full_attention" for i in range(count)]
    rotary = _rotary(f, _sizes(f)["head_dim"])
    kinds = dict.fromkeys(("sliding_attention", "full_attention"), rotary)
    layers = _patterned(f, window, default, kinds)
    bias = f.flag("qkv_bias", True)
    shared_size = f.size("shared_expert_intermediate_size")
    return _qwen_moe(f, layers, shared_size) | {"qkv_bias": bias}


def _qwen3_moe(f: Fields) -> dict[str, Any]:
    """Either all layers have a sliding window or none has."""
    f.must_be("use_qk_norm", True)
    bias, rotary = f.flag("attention_bias", False), _rotary(f, _sizes(f)["head_dim"])
    layers = (Layer(_window_of_all(f), rotary),) * _num_layers(f)
    return _qwen_moe(f, layers) | {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}


def _gpt_oss(f: Fields) -> dict[str, Any]:
    """Sinks in every layer, a sliding window in every other, experts with biases. A router that
    takes the softmax of the chosen logits alone has the weights of one over all, normalised.
    """
    f.require_present("num_key_value_heads", "head_dim", "sliding_window")
    f.must_be("hidden_act", "silu")  # the published name of what `swiglu` describes
    f.take("initial_context_length", None)  # only original_max_position_embeddings is read
    _check_mxfp4(f)
    if not f.block("rope_scaling") and not f.block("rope_parameters"):
        raise ValueError(f"{f.what} has neither rope_scaling nor rope_parameters")
    sizes, bias = _sizes(f), f.flag("attention_bias", True)
    rotary = _rotary(f, sizes["head_dim"], default_theta=150_000.0)
    period = ["sliding_attention", "full_attention"]
    default = [period[i % 2] for i in range(_num_layers(f))]
    window = f.size("sliding_window", None)
    layers = _patterned(f, window, default, dict.fromkeys(period, rotary))
    experts = _experts(f, sizes["intermediate_size"], is_normalised=True)
    f.must_be("experts_per_token", experts.per_token)
    swiglu = ClampedSwiGLU(f.positive("swiglu_limit", 7.0), f.positive("swiglu_alpha", 1.702))
    experts = replace(experts, has_bias=True, swiglu=swiglu)
    return sizes | {
        "layers": tuple(replace(layer, experts=experts) for layer in layers),
        "sinks": True,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _check_mxfp4(f: Fields) -> None:
    """A quantization_config may only be that of experts in MXFP4: names and types of the tensors
    tell which they are.
    """
    stated = Fields(f.block("quantization_config"), "quantization_config")
    stated.must_be("quant_method", "mxfp4")
    stated.take("modules_to_not_convert", None)
    stated.take("dequantize", None)
    stated.reject_unread()


def _deepseek_v2(f: Fields) -> dict[str, Any]:
    """Softmax scores; the router of transformers does not normalise the weights of a token."""
    f.must_be("scoring_func", "softmax")
    f.must_be("norm_topk_prob", False)
    f.must_be("mlp_bias", False)
    method = f.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method={method!r} is not one of greedy, group_limited_greedy")
    counts = f.size("n_group", 1), f.size("topk_group", 1)
    scale = f.positive("routed_scaling_factor", 1.0)
    groups = ExpertGroups("softmax", *(counts if method != "greedy" else (1, 1)), scale)
    return _deepseek(f, groups, is_normalised=False)


def _deepseek_v3(f: Fields) -> dict[str, Any]:
    """Sigmoid scores with a bias for the choice. The layers behind the last one draft tokens."""
    f.must_be("scoring_func", "sigmoid")
    f.must_be("topk_method", "noaux_tc")
    f.require_present("norm_topk_prob")
    counts = f.size("n_group"), f.size("topk_group")
    groups = ExpertGroups("sigmoid", *counts, f.positive("routed_scaling_factor"))
    facts = _deepseek(f, groups, f.flag("norm_topk_prob", True))
    interleaved = f.flag("rope_interleave", True)
    return facts | {
        "latent": replace(facts["latent"], is_interleaved=interleaved),
        "unused_layers": _unused_layers(f),
    }


def _unused_layers(f: Fields) -> int:
    """The number of layers that draft tokens, under its two names."""
    counts = [f.take(name, 0) for name in ("num_nextn_predict_layers", "num_mtp_layers")]
    if not all(type(count) is int and 0 <= count <= MAX_LAYERS for count in counts):
        raise ValueError(f"num_nextn_predict_layers={counts[0]!r} must be in [0, {MAX_LAYERS}]")
    return max(counts)


def _deepseek(f: Fields, groups: ExpertGroups, is_normalised: bool) -> dict[str, Any]:
    """Latent attention in every layer, and experts in all but the first layers."""
    f.require_present("q_lora_rank")
    f.must_be("attention_bias", False)
    f.must_be("moe_layer_freq", 1)
    f.must_be("use_mla", True)
    for name in ("aux_loss_alpha", "seq_aux", "ep_size"):  # of training
        f.take(name, None)
    latent = LatentSizes(
        f.size("kv_lora_rank"),
        f.size("q_lora_rank", None),
        f.size("qk_nope_head_dim"),
        f.size("qk_rope_head_dim"),
        f.size("v_head_dim"),
    )
    f.must_be("qk_head_dim", latent.head_dim)
    f.must_be("head_dim", latent.rope_dim)  # transformers 5 writes the rotated columns
    sizes, rotary = _sizes(f), _rotary(f, latent.rope_dim)
    if sizes["num_kv_heads"] != sizes["num_heads"]:
        raise ValueError(
            f"num_key_value_heads={sizes['num_kv_heads']} must be"
            f" num_attention_heads={sizes['num_heads']}: latent attention shares no heads"
        )
    experts = _experts(f, f.size("moe_intermediate_size"), is_normalised)
    shared_size = experts.intermediate_size * f.size("n_shared_experts")
    experts = replace(experts, shared_size=shared_size, has_shared_gate=False, groups=groups)
    num_dense, count = f.take("first_k_dense_replace"), _num_layers(f)
    if type(num_dense) is not int or num_dense < 0:
        raise ValueError(f"first_k_dense_replace={num_dense!r} must be an integer of at least 0")
    dense = min(num_dense, count)
    growth = _score_growth(f)
    return sizes | {
        "layers": (Layer(None, rotary),) * dense
        + (Layer(None, rotary, experts),) * (count - dense),
        "activation": _activation(f.text("hidden_act", "silu")),
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.cached,
        "softmax_scale": latent.head_dim**-0.5 * growth * growth,
    }


def _score_growth(f: Fields) -> float:
    """The factor of q and of k by which yarn sharpens the scores: of mscale_all_dim."""
    stated = Fields(f.block("rope_scaling") | f.block("rope_parameters"), "rope_parameters")
    mscale = stated.non_negative("mscale_all_dim", 0.0)
    return yarn_growth(stated.positive("factor"), mscale) if mscale else 1.0


def _experts(
    f: Fields, intermediate_size: int, is_normalised: bool, shared_size: int | None = None
) -> Experts:
    """The number of experts has three names, of which transformers writes one."""
    f.take("output_router_logits", None)  # the coefficient and the logits are for a loss
    f.take("router_aux_loss_coef", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    counts = [f.size(name, None) for name in names]
    stated = {count for count in counts if count is not None}
    if len(stated) != 1:
        raise ValueError(f"{f.what} must have one of {', '.join(names)}, got {counts}")
    per_token, noise = f.size("num_experts_per_tok"), f.non_negative("router_jitter_noise", 0.0)
    sizes = stated.pop(), per_token, intermediate_size
    return Experts(*sizes, is_normalised, shared_size, noise)


def _sparsity(f: Fields) -> list[bool]:
    """Whether each layer has experts."""
    step, dense = f.size("decoder_sparse_step", 1), f.take("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ValueError(f"mlp_only_layers={dense!r} must be a list of integers")
    excluded = set(dense)
    return [i not in excluded and (i + 1) % step == 0 for i in range(_num_layers(f))]


def _window_of_all(f: Fields) -> int | None:
    """The sliding window of all layers, if windows are used at all."""
    window, start = f.size("sliding_window", None), f.take("max_window_layers", None)
    if not f.flag("use_sliding_window", False):
        return None
    f.require_present("sliding_window")
    if start not in (None, 0):
        raise ValueError(
            f"max_window_layers={start!r} with use_sliding_window is not served: in transformers"
            " all layers of this family have the window"
        )
    return window


def _gemma_common(f: Fields) -> dict[str, Any]:
    """The common fields of Gemma: 1 + weight, a scaled embedding, the tanh form of GELU."""
    f.must_be("use_bidirectional_attention", False)
    f.require_present("head_dim", "num_key_value_heads")
    bias, sizes = f.flag("attention_bias", False), _sizes(f)
    activation = f.text("hidden_activation", f.text("hidden_act", "gelu_pytorch_tanh"))
    return sizes | {
        # The first releases wrote "gelu" for its tanh form.
        "activation": _activation("gelu_pytorch_tanh" if activation == "gelu" else activation),
        "norm_offset": 1.0,
        "embedding_scale": sizes["hidden_size"] ** 0.5,
        "tied": f.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _gemma(f: Fields) -> dict[str, Any]:
    common = _gemma_common(f)
    return common | {"layers": _uniform(f, _rotary(f, common["head_dim"]))}


def _gemma2(f: Fields) -> dict[str, Any]:
    f.require_present("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    common = _gemma_common(f)
    period = ["sliding_attention", "full_attention"]
    default = [period[i % 2] for i in range(_num_layers(f))]
    rotary = dict.fromkeys(period, _rotary(f, common["head_dim"]))
    return common | {
        "layers": _patterned(f, f.size("sliding_window", None), default, rotary),
        "post_norms": True,
        "softmax_scale": f.positive("query_pre_attn_scalar") ** -0.5,
        "softcap": f.positive("attn_logit_softcapping", 0.0),
        "logit_softcap": f.positive("final_logit_softcapping", 0.0),
    }


def _gemma3(f: Fields) -> dict[str, Any]:
    """Five layers have a sliding window and their own rotary base; the sixth has neither."""
    f.must_be("attn_logit_softcapping", 0.0)
    f.require_present("sliding_window")
    common, period = _gemma_common(f), f.size("sliding_window_pattern", 6)
    default = [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention"
        for i in range(_num_layers(f))
    ]
    rotary = _gemma3_rotary(f, common["head_dim"])
    return common | {
        "layers": _patterned(f, f.size("sliding_window", None), default, rotary),
        "post_norms": True,
        "qk_norm": True,
        "softmax_scale": f.positive("query_pre_attn_scalar") ** -0.5,
        "logit_softcap": f.positive("final_logit_softcapping", 0.0),
    }


def _gemma3_rotary(f: Fields, head_dim: int) -> dict[str, Rotary]:
    theta = f.positive("rope_theta", 1_000_000.0)
    local = f.positive("rope_local_base_freq", 10_000.0)
    new = Fields(f.block("rope_parameters"), "rope_parameters")
    old = {
        "full_attention": {"rope_theta": theta} | f.block("rope_scaling"),
        "sliding_attention": {"rope_theta": local},
    }
    both = {kind: old[kind] | new.block(kind) for kind in old}
    new.reject_unread()
    max_seqlen = f.size("max_position_embeddings")
    return {kind: Rotary.from_hf(values, head_dim, max_seqlen) for kind, values in both.items()}


def _gpt2(f: Fields) -> dict[str, Any]:
    f.must_be("scale_attn_weights", True)
    f.must_be("scale_attn_by_inverse_layer_idx", False)
    f.must_be("add_cross_attention", False)
    f.take("n_ctx", None)  # the old name of n_positions
    width, num_heads, count = f.size("n_embd"), f.size("n_head"), f.size("n_layer")
    if width % num_heads or count > MAX_LAYERS:
        raise ValueError(
            f"n_embd={width} must be a multiple of n_head={num_heads},"
            f" and n_layer={count} at most {MAX_LAYERS}"
        )
    return {
        "vocab_size": f.size("vocab_size"),
        "hidden_size": width,
        "intermediate_size": f.size("n_inner", 4 * width),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": width // num_heads,
        "layers": (Layer(),) * count,
        "max_seqlen": f.size("n_positions"),
        "norm": "layer",
        "norm_eps": f.positive("layer_norm_epsilon", 1e-5),
        "activation": _activation(f.text("activation_function", "gelu_new")),
        "gated": False,
        "learned_positions": True,
        "tied": f.flag("tie_word_embeddings", True),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    }


FAMILIES: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
