"""A built-in model from a trained one: its matrices in 8 bits, half the size of bf16.

    python examples/train_lm.py --size full --compile
    python examples/quantise_lm.py runs/full/model onchip/models/tiny
    python examples/train_lm.py --size draft --until 3000
    python examples/quantise_lm.py runs/draft/model onchip/models/tiny_draft

The same folder gives the same bytes, and so does what `onchip.models.save` writes of the built-in
model. With --measure, the held-out bits per byte of both models are computed: minutes on a CPU.
"""

import argparse
import shutil
from pathlib import Path

import torch
from packing import read_corpora
from train_lm import SIZES, bits_per_byte

from onchip.models import inspect, load, safetensors
from onchip.models.builtin import WEIGHTS
from onchip.models.int8_weights import dequantise, quantise
from onchip.models.loader import from_tensors


def convert(source: Path, target: Path) -> Path:
    """Write config.json and the weights of the folder `source`, of bf16, to the folder `target`."""
    inspect(source)
    target.mkdir(parents=True, exist_ok=True)
    file = target / WEIGHTS.name
    safetensors.write(file, quantise(safetensors.read_all(source / "model.safetensors")))
    shutil.copyfile(source / "config.json", target / "config.json")
    return file


def measure(source: Path, file: Path) -> tuple[float, float]:
    """Held-out bits per byte of a folder in fp32, and of its weights in 8 bits."""
    _, held_out = read_corpora()
    before = load(source, dtype=torch.float32)
    after = from_tensors(before.config, dequantise(safetensors.read_all(file)))
    return tuple(bits_per_byte(model, held_out, SIZES["full"]) for model in (before, after))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="a folder that train_lm.py wrote")
    parser.add_argument("target", type=Path)
    parser.add_argument("--measure", action="store_true", help="held-out bits per byte of both")
    args = parser.parse_args()
    file = convert(args.source, args.target)
    print(f"{file}: {file.stat().st_size:,} bytes")
    if args.measure:
        before, after = measure(args.source, file)
        print(f"held out: {before:.4f} bits per byte in bf16, {after:.4f} in 8 bits")


if __name__ == "__main__":
    main()
