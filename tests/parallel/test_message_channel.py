"""Messages from rank 0 to all others, on gloo."""

import os

import pytest

from onchip.parallel import message_channel
from onchip.parallel.comm_base import ParallelError
from onchip.parallel.message_channel import MessageChannel
from tests.parallel.pool import Pool

SIZES = (0, 1, 4088, 4089, 300_000)


def content(size):
    return bytes(i * 31 % 256 for i in range(size))


def pass_messages(comm):
    channel = MessageChannel()
    if comm.rank:
        return [channel.receive() for _ in SIZES]
    for size in SIZES:
        channel.send(content(size))
    message_channel.MAX_MESSAGE_BYTES = 100
    with pytest.raises(ValueError, match="a message of 101 bytes: at most 100 are sent"):
        channel.send(bytes(101))
    return None


def run(size, *job, **options):
    """A pool of its own: all processes of a job make a channel together."""
    pool = Pool(size)
    try:
        return pool.run(size, *job, **options)
    finally:
        pool.close()


def test_messages_of_any_size_reach_all_ranks():
    first, *others = run(3, pass_messages)
    assert first is None
    assert others == [[content(size) for size in SIZES]] * 2


def lose_a_rank(comm, lost):
    channel = MessageChannel()
    if comm.rank == lost:
        os._exit(1)
    with pytest.raises(ParallelError) as error:
        for _ in range(100):
            channel.send(bytes(100)) if comm.rank == 0 else channel.receive()
    return str(error.value), error.value.rank


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_ends_the_wait_at_once(lost):
    sentence, rank = run(2, lose_a_rank, lost, lost=[lost])[1 - lost]
    assert ("rank 0 is lost" if lost == 0 else "another rank is lost") in sentence
    assert rank == (0 if lost == 0 else None)
