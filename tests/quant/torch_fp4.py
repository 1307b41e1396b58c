"""torch's own conversions to FP4 and MXFP4, which its test utilities hold: no operator of torch
converts to float4_e2m1fn_x2 on the CPU (2.13). The module imports packages that onchip does not
need, so only these functions are taken from its source.
"""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

FUNCTIONS = (
    "_n_ones",
    "_f32_to_floatx_unpacked",
    "down_size",
    "pack_uint4",
    "_bfloat16_to_float4_e2m1fn_x2",
    "to_mxfp",
)


def load() -> dict:
    """The functions by name; skips the test where torch has none of them."""
    package = importlib.util.find_spec("torch.testing._internal")
    path = Path(package.submodule_search_locations[0]) / "common_quantized.py"
    if not path.exists():
        pytest.skip(f"torch {torch.__version__} has no common_quantized.py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    named = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    missing = [name for name in FUNCTIONS if name not in named]
    if missing:
        pytest.skip(f"torch {torch.__version__} has no {', '.join(missing)}")
    module = ast.Module([named[name] for name in FUNCTIONS], [])
    names = {"torch": torch, "Tensor": torch.Tensor, "FP4_EBITS": 2, "FP4_MBITS": 1}
    names |= {"EBITS_F32": 8, "MBITS_F32": 23, "F32_EXP_BIAS": 127}
    exec(compile(module, str(path), "exec"), names)
    return names
