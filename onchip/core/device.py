"""Devices: what dispatch knows of one, and which ones this machine has."""

from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch


class DeviceInfo(NamedTuple):
    """The device that a problem runs on. capability is CUDA's (major, minor), None elsewhere. name
    is the architecture on AMD (gfx942).
    """

    type: str
    name: str = ""
    capability: tuple[int, int] | None = None
    has_triton: bool = True


@lru_cache(maxsize=64)
def device_info(device: torch.device) -> DeviceInfo:
    has_triton = find_spec("triton") is not None
    if device.type != "cuda":
        return DeviceInfo(device.type, has_triton=has_triton)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return DeviceInfo("hip", properties.gcnArchName.split(":")[0], None, has_triton)
    capability = properties.major, properties.minor
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
