"""One rank of a test: python ranks.py FOLDER RANK WORLD_SIZE. Writes its logits into the folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from onchip import models
from onchip.kvcache import KVCache
from onchip.models import positions_of
from onchip.parallel.tensor_parallel import TensorParallelGroup


@torch.no_grad()
def logits(decoder, chunks):
    """Logits of whole sequences, and of the same in chunks over pages."""
    text = torch.cat(chunks)
    whole = decoder.logits(decoder.full(text[None])[0])
    cache, parts = KVCache(decoder.cache_spec(4), 32), []
    sequence = cache.open()
    for chunk in chunks:
        cache.append(sequence, chunk.tolist())
        batch = cache.view([sequence])
        parts.append(decoder.logits(decoder(chunk, positions_of(batch), batch, cache)))
        cache.commit(sequence)
    return whole, torch.cat(parts)


def main(folder, rank, world_size):
    folder = Path(folder)
    where = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    for family in sorted(path for path in folder.iterdir() if path.is_dir()):
        part = models.load(family, rank=rank, world_size=world_size)
        group = TensorParallelGroup(init_device_mesh("cpu", (world_size,)))
        decoder = group.connect(part)
        chunks = torch.arange(41).mul(29).remainder(130).split((17, 1, 1, 22))
        torch.save(logits(decoder, chunks), family / f"{rank}.pt")
        group.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
