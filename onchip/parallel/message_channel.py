"""Messages from rank 0 to all other ranks: bytes in host memory, over gloo.

    frame    8 bytes: length of the message | its first 4,088 bytes
    rest     the other bytes, if there are more

Most messages take one broadcast. Nothing is unpickled: a receiver gets bytes of a bounded size.
"""

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from onchip.parallel.comm_base import ParallelError
from onchip.parallel.group_comm import group_of

MAX_MESSAGE_BYTES = 64 << 20
_FRAME_BYTES = 4096
_LENGTH_BYTES = 8
# Receivers wait for as long as a server may be idle. If the other process ends, its connection
# closes, and the wait ends at once.
_IDLE = timedelta(days=365)
_SEND = timedelta(minutes=10)  # for a receiver that does not read; as long as a collective may take


class MessageChannel:
    """All ranks of the job make it together. Rank 0 sends, the others receive."""

    rank: int

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        # An operation outlives the wait for it, and Python does not end before the operation does.
        timeout = _SEND if self.rank == 0 else _IDLE
        self._group = group_of(
            dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportArgumentType]
        )

    def send(self, message: bytes) -> None:
        """Return when the message has left, not when it was read. ParallelError: a rank is lost."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message of {len(message)} bytes: at most {MAX_MESSAGE_BYTES} are sent"
            )
        head = len(message).to_bytes(_LENGTH_BYTES, "little")
        inline = _FRAME_BYTES - _LENGTH_BYTES
        self._broadcast(_as_tensor((head + message[:inline]).ljust(_FRAME_BYTES, b"\0")))
        if len(message) > inline:
            self._broadcast(_as_tensor(message[inline:]))

    def receive(self) -> bytes:
        """Wait for the next message, however long. ParallelError: rank 0 is lost."""
        frame = bytes(self._broadcast(torch.empty(_FRAME_BYTES, dtype=torch.uint8)).numpy())
        length, inline = int.from_bytes(frame[:_LENGTH_BYTES], "little"), frame[_LENGTH_BYTES:]
        if length > MAX_MESSAGE_BYTES:
            raise ParallelError(f"rank 0 announced a message of {length} bytes", 0)
        if length <= len(inline):
            return inline[:length]
        rest = self._broadcast(torch.empty(length - len(inline), dtype=torch.uint8))
        return inline + bytes(rest.numpy())

    def _broadcast(self, data: Tensor) -> Tensor:
        try:
            # None would mean that this rank is not in the group.
            work = cast("dist.Work", dist.broadcast(data, 0, group=self._group, async_op=True))
            work.wait(_SEND if self.rank == 0 else _IDLE)
        except RuntimeError as error:
            lost = "another rank" if self.rank == 0 else "rank 0"
            reason = str(error).partition("\n")[0]
            raise ParallelError(
                f"{lost} is lost: {reason}", None if self.rank == 0 else 0
            ) from error
        return data


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
