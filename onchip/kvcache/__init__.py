"""A paged key/value cache: forks copy pages on write, prefixes are shared between requests,
speculative tokens roll back, and sequences swap out to host memory.
"""

from .cache import KVCache, Sequence
from .page_tensors import Spec
from .paged_batch import BatchShape, PagedBatch
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
