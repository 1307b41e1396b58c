"""Models from a folder: config.json and safetensors, as Hugging Face stores them.

A checkpoint is untrusted data. Nothing in it is executed. Names, types, shapes and sizes are
checked against the config before a parameter is allocated, so the files bound the memory.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onchip.core.files import read_regular
from onchip.core.hub_cache import resolve_folder
from onchip.models import mxfp4_weights, safetensors
from onchip.models.config import ModelConfig
from onchip.models.decoder import Decoder
from onchip.models.multimodal import text_entries
from onchip.models.safetensors import TensorEntry
from onchip.models.weight_names import (
    DERIVED,
    NAMES,
    STACKED_UP,
    Shard,
    Target,
    WeightSlice,
    expected,
    targets,
)

MAX_JSON_BYTES = 100_000_000
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class Checkpoint:
    """A checked folder. entries: its tensors; targets: the parameters that they fill."""

    folder: Path
    config: ModelConfig
    entries: dict[str, TensorEntry]
    targets: tuple[Target, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype of the embedding."""
        return safetensors.DTYPES[self.entries[self.targets[0].pieces[0].name].dtype]

    @property
    def tokenizer_file(self) -> Path | None:
        file = self.folder / "tokenizer.json"
        return file if file.is_file() else None


def inspect(folder: str | Path, ignore: Collection[str] = ()) -> Checkpoint:
    """The checkpoint in a folder, or of a Hub id in the local cache; a ValueError with the reason
    why it is invalid. Reads config.json and headers only. ignore: fields of config.json that change
    nothing.
    """
    folder = Path(resolve_folder(folder))
    data = read_json(folder / "config.json")
    config = ModelConfig.from_hf(data, ignore)
    entries = text_entries(data, entries_of(folder))
    names = NAMES[config.model_type]
    prefixed = names.prefix + names.embed in entries
    stacked = any(name.endswith(STACKED_UP) for name in entries)
    is_mxfp4 = any(name.endswith(mxfp4_weights.SUFFIXES) for name in entries)
    wanted = tuple(targets(config, prefixed, stacked, is_mxfp4))
    prefix = (names.prefix if prefixed else "") + names.layer
    entries = _without_unused(entries, config, prefix)
    _check_entries(entries, expected(wanted), names.head if config.tied else None)
    return Checkpoint(folder, config, entries, wanted)


def load(
    checkpoint: Checkpoint | str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> Decoder:
    """The decoder of a checkpoint, by default in the stored dtype. Files are memory-mapped, and
    parameters are filled one by one in their final memory. With world_size > 1 the shard of one
    rank, to be connected by `onchip.parallel.tensor_parallel.TensorParallelGroup.connect`.
    """
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else inspect(checkpoint)
    shard = Shard(rank, world_size)
    read = _reader(checkpoint)
    _check_tied(checkpoint, read)
    decoder = Decoder(checkpoint.config, device, dtype or checkpoint.dtype, shard)
    _fill(decoder, checkpoint.targets, read, shard)
    return decoder


def from_tensors(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """The decoder with these weights, under the names that `save` gives them."""
    decoder = Decoder(config, device, dtype)
    _fill(decoder, targets(config), tensors.__getitem__, Shard())
    return decoder


def random_model(
    config: ModelConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """A decoder with random weights; its hidden states and logits are of order one."""
    decoder = Decoder(config, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        _randomise(name, parameter, config, generator)
    return decoder


def save(decoder: Decoder, folder: str | Path) -> None:
    """Write config.json and model.safetensors, as transformers reads them. Weights are stored in
    the dtype of the decoder, also those that were in MXFP4.
    """
    source = json.loads(decoder.config.source or "{}")
    source.pop("quantization_config", None)
    if not source or ModelConfig.from_hf(source, ignore=source) != decoder.config:
        raise ValueError("only a whole model with a config from ModelConfig.from_hf can be saved")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source, indent=2))
    safetensors.write(folder / _SINGLE, _checkpoint_tensors(decoder))


def _without_unused(
    entries: dict[str, TensorEntry], config: ModelConfig, layer: str
) -> dict[str, TensorEntry]:
    """All tensors but those of the layers that are not loaded. layer: the names of one."""
    first = config.num_layers
    prefixes = tuple(layer.format(first + i) for i in range(config.unused_layers))
    return {name: entry for name, entry in entries.items() if not name.startswith(prefixes)}


def read_json(file: Path) -> Any:
    try:
        content = read_regular(file, MAX_JSON_BYTES)
    except FileNotFoundError:
        raise ValueError(f"{file.parent} has no {file.name}") from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not JSON: {error}") from None


def entries_of(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of a folder, by its index if it has one."""
    if (folder / _INDEX).exists():
        return _indexed(folder, read_json(folder / _INDEX))
    files = [folder / _SINGLE] if (folder / _SINGLE).exists() else [*folder.glob("*.safetensors")]
    if len(files) == 1:
        return safetensors.header(files[0])
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if not files and pickles:
        raise ValueError(
            f"{folder} has no safetensors, but {pickles[0]}: a pickle can run code, so it is not"
            " read; convert it with the program that wrote it"
        )
    raise ValueError(f"{folder} has {len(files)} safetensors files and no {_INDEX}")


def _indexed(folder: Path, index: Any) -> dict[str, TensorEntry]:
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
        raise ValueError(f"{_INDEX} has no weight_map from names to files")
    headers = {
        file: safetensors.header(_file_in_folder(folder, file)) for file in set(where.values())
    }
    for name, file in where.items():
        if name not in headers[file]:
            raise ValueError(f"{_INDEX} lists {name} in {file}, which does not have it")
    return {name: headers[file][name] for name, file in where.items()}


def _file_in_folder(folder: Path, name: str) -> Path:
    """A file that the index names: only files of the folder itself are accepted."""
    if "/" in name or "\\" in name or not name.endswith(".safetensors"):
        raise ValueError(f"{_INDEX} names {name!r}, which is not a .safetensors file of the folder")
    if not (folder / name).exists():
        raise ValueError(f"{_INDEX} names {name}, which is missing")
    return folder / name


def _check_entries(entries: dict[str, TensorEntry], shapes: dict, tied_head: str | None) -> None:
    missing = sorted(shapes.keys() - entries.keys())
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing: {_first_few(missing)}")
    extra = [n for n in entries.keys() - shapes.keys() if not n.endswith(DERIVED)]
    extra = sorted(n for n in extra if n != tied_head)
    if extra:
        raise ValueError(f"{len(extra)} tensors are not part of the model: {_first_few(extra)}")
    for name, shape in shapes.items():
        entry = entries[name]
        if entry.shape != shape:
            raise ValueError(f"{name} has shape {entry.shape}, the config implies {shape}")
        is_mxfp4 = name.endswith(mxfp4_weights.SUFFIXES)
        stored = (mxfp4_weights.DTYPE,) if is_mxfp4 else tuple(safetensors.DTYPES)
        if entry.dtype not in stored:
            kinds = ", ".join(stored)
            raise ValueError(f"{name} is stored as {entry.dtype}; weights are one of {kinds}")


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _reader(checkpoint: Checkpoint) -> Callable[[str], Tensor]:
    """A function that reads a tensor by name; each file is mapped once."""
    files = {entry.file for entry in checkpoint.entries.values()}
    mapped = {file: safetensors.map_file(file) for file in files}

    def read(name: str) -> Tensor:
        entry = checkpoint.entries[name]
        return safetensors.read(entry, mapped[entry.file])

    return read


def _check_tied(checkpoint: Checkpoint, read: Callable[[str], Tensor]) -> None:
    """A stored head of a tied model must equal the embedding."""
    head = NAMES[checkpoint.config.model_type].head
    if not checkpoint.config.tied or head not in checkpoint.entries:
        return
    embed = checkpoint.targets[0].pieces[0].name
    kinds = [(checkpoint.entries[n].dtype, checkpoint.entries[n].shape) for n in (head, embed)]
    if kinds[0] != kinds[1] or not torch.equal(read(head), read(embed)):
        raise ValueError(f"tie_word_embeddings is true, but {head} and {embed} differ")


def _fill(
    decoder: Decoder, wanted: Iterable[Target], read: Callable[[str], Tensor], shard: Shard
) -> None:
    parameters = dict(decoder.named_parameters())
    for target in wanted:
        _fill_one(parameters[target.name], target, read, shard)


@torch.no_grad()
def _fill_one(
    parameter: nn.Parameter, target: Target, read: Callable[[str], Tensor], shard: Shard
) -> None:
    at = 0
    for piece in target.pieces:
        cut = None if piece.is_whole else target.cut
        share = shard.of(_read_piece(piece, target, read, parameter.device), cut)
        parameter[at : at + len(share)].copy_(share)
        at += len(share)


def _read_piece(
    piece: WeightSlice, target: Target, read: Callable[[str], Tensor], device: torch.device
) -> Tensor:
    """The rows of a slice; those in MXFP4 are dequantised on the device, in fp32."""
    if not target.is_mxfp4:
        return target.select(read(piece.name), piece)
    stored = (read(piece.name + suffix) for suffix in mxfp4_weights.SUFFIXES)
    blocks, scales = (target.select(source, piece).to(device) for source in stored)
    return mxfp4_weights.dequantise(blocks, scales, target.shape[1])


@torch.no_grad()
def _randomise(name: str, parameter: nn.Parameter, config: ModelConfig, generator: torch.Generator):
    if parameter.dim() == 2:
        parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        return
    centre = 1.0 - config.norm_offset if name.endswith("norm.weight") else 0.0
    parameter.normal_(mean=centre, std=0.1, generator=generator)


def _checkpoint_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Parameters under the names of the checkpoint; fused ones are cut into their slices."""
    parameters = dict(decoder.named_parameters())
    stored: dict[str, Tensor] = {}
    for target in targets(decoder.config):
        parameter = parameters[target.name].detach()
        stored |= {name: parameter.new_empty(shape) for name, shape in target.sources.items()}
        rows = parameter.split([piece.rows for piece in target.pieces])
        for piece, share in zip(target.pieces, rows, strict=True):
            target.select(stored[piece.name], piece).copy_(share)
    return stored
