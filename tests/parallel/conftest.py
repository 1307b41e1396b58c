"""One pool of ranks for all tests of this folder, started at its first use."""

import pytest

from tests.parallel.pool import Pool


@pytest.fixture(scope="session")
def pool():
    """pool.run(P, fn, *args) -> [fn(comm, *args) of each rank], for P up to 8, on gloo."""
    ranks = Pool(8)
    yield ranks
    ranks.close()
