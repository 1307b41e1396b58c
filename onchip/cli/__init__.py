"""The command line: `onchip demo | bench | tune | explain | generate | doctor | serve | lab`."""

from .commands import main

__all__ = ["main"]
