"""Devices: what dispatch knows of one, and which ones this machine has."""

from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

KB = 1024
# The most shared memory of one program. NVIDIA, by compute capability: CUDA C++ programming guide,
# technical specifications. AMD (LDS): the ISA guides of CDNA3 and CDNA4. Of other devices, the
# least of each vendor is assumed.
SHARED_BYTES = {(8, 0): 163 * KB, (8, 7): 163 * KB, (9, 0): 227 * KB, (10, 0): 227 * KB}
SHARED_BYTES |= {(10, 3): 227 * KB}
LDS_BYTES = {"gfx942": 64 * KB, "gfx950": 160 * KB}
MIN_CAPABILITY = (8, 0)  # of the Triton kernels: bf16 tensor cores and asynchronous copies


class DeviceInfo(NamedTuple):
    """The device that a problem runs on. capability is CUDA's (major, minor), None elsewhere. name
    is the architecture on AMD (gfx942). has_triton: Triton's kernels can run there.
    """

    type: str
    name: str = ""
    capability: tuple[int, int] | None = None
    has_triton: bool = True

    @property
    def shared_bytes(self) -> int:
        """The most shared memory that one program may have on this GPU."""
        if self.capability is None:
            return LDS_BYTES.get(self.name, 64 * KB)
        return SHARED_BYTES.get(self.capability, 99 * KB)


@lru_cache(maxsize=64)
def device_info(device: torch.device) -> DeviceInfo:
    has_triton = find_spec("triton") is not None
    if device.type != "cuda":
        return DeviceInfo(device.type, has_triton=has_triton)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return DeviceInfo("hip", properties.gcnArchName.split(":")[0], None, has_triton)
    capability = properties.major, properties.minor
    has_triton = has_triton and capability >= MIN_CAPABILITY
    return DeviceInfo("cuda", properties.name, capability, has_triton)


def find_device(name: str | torch.device) -> torch.device:
    """Return the device of this name, or raise ValueError if this machine has none."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"there is no device {str(name)!r} here: {reason}") from error
    return device
