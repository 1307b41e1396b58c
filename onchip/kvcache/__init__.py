"""A key/value cache with the manners of virtual memory: pages, forks that copy on write, prefixes
found again, speculation rolled back, sequences swapped to the host.
"""

from .cache import KVCache, Sequence
from .paged_batch import PagedBatch, Shape
from .pages import Spec
from .pool import NoRoom, Pool, Table
from .prefix import Chain, Hit, PrefixIndex
from .swap import Family, HostTier

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
