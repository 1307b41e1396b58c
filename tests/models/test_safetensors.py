"""The safetensors format, written and read."""

import torch

from onchip.models import safetensors


def test_tensors_of_any_size_and_order_come_back(tmp_path):
    """Three bf16 numbers before an fp64 one: it is not aligned to its size."""
    file = tmp_path / "odd.safetensors"
    tensors = {
        "three": torch.randn(3).bfloat16(),
        "wide": torch.randn(2, 5, dtype=torch.float64).T,
        "scalar": torch.tensor(7.0),
        "none": torch.empty(0, 4),
    }
    safetensors.write(file, tensors)
    mapped = safetensors.map_file(file)
    for name, entry in safetensors.header(file).items():
        assert torch.equal(safetensors.read(entry, mapped), tensors[name]), name
