"""Language models, loaded from safetensors: one decoder for the families of `FAMILIES`, and any
other causal language model through transformers.
"""

from . import builtin
from .config import FAMILIES, ModelConfig
from .decoder import Decoder, positions_of
from .folders import about, is_native, resolve
from .foreign import Foreign, ForeignCheckpoint, inspect_foreign, load_foreign
from .layer_config import ClampedSwiGLU, ExpertGroups, Experts, LatentSizes, Layer
from .loader import Checkpoint, inspect, load, random_model, save
from .protocol import Model
from .rotary import Rotary
from .routing import Routing, balance_loss
from .weight_names import Shard, num_parameters

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "ClampedSwiGLU",
    "Decoder",
    "ExpertGroups",
    "Experts",
    "Foreign",
    "ForeignCheckpoint",
    "LatentSizes",
    "Layer",
    "Model",
    "ModelConfig",
    "Shard",
    "Rotary",
    "Routing",
    "about",
    "balance_loss",
    "builtin",
    "inspect",
    "inspect_foreign",
    "is_native",
    "load",
    "load_foreign",
    "num_parameters",
    "positions_of",
    "random_model",
    "resolve",
    "save",
]
