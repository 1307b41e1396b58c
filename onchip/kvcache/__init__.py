"""A key/value cache with the manners of virtual memory: pages, forks that copy on write, prefixes
found again, speculation rolled back, sequences swapped to the host.
"""

from .batch import PagedBatch, Shape
from .cache import KVCache, Sequence
from .host import Family, HostTier
from .pages import Spec
from .pool import NoRoom, Pool, Table
from .prefix import Chain, Hit, PrefixIndex

__all__ = [
    "Chain",
    "Family",
    "Hit",
    "HostTier",
    "KVCache",
    "NoRoom",
    "PagedBatch",
    "Pool",
    "PrefixIndex",
    "Sequence",
    "Shape",
    "Spec",
    "Table",
]
