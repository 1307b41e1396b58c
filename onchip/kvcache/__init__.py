"""A key/value cache with the manners of virtual memory: pages, forks that copy on write, prefixes
found again, speculation rolled back, sequences swapped to the host.
"""

from .cache import KVCache, Sequence
from .paged_batch import BatchShape, PagedBatch
from .pages import Spec
from .pool import NoRoom, PageTable, Pool
from .prefix import Chain, Hit, PrefixIndex
from .swap import HostTier, SequenceGroup

__all__ = [
    "Chain",
    "SequenceGroup",
    "Hit",
    "HostTier",
    "KVCache",
    "NoRoom",
    "PagedBatch",
    "Pool",
    "PrefixIndex",
    "Sequence",
    "BatchShape",
    "Spec",
    "PageTable",
]
