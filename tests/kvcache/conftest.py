"""A stand-in for streams: copies of the host tier that happen as late as they may."""

import pytest


class LateMover:
    """Copies that happen as late as a stream may delay them: at `run`, or when somebody waits."""

    def __init__(self, plain):
        self.plain = plain
        self.queue = []

    def move_out(self, pages, chunks):
        return self._later(self.plain.move_out, list(pages), list(chunks))

    def move_in(self, pages, chunks):
        return self._later(self.plain.move_in, list(pages), list(chunks))

    def _later(self, *copy):
        self.queue.append(LateTransfer(self, copy))
        return self.queue[-1]

    def run(self, last=None):
        while self.queue:
            transfer = self.queue.pop(0)
            transfer.copy[0](*transfer.copy[1:])
            transfer.finished = True
            if transfer is last:
                return


class LateTransfer:
    def __init__(self, mover, copy):
        self.mover, self.copy, self.finished = mover, copy, False

    def done(self):
        return self.finished

    def wait(self):
        if not self.finished:
            self.mover.run(self)

    synchronize = wait


@pytest.fixture
def late():
    """late(tier): its copies happen at the last moment from now on."""

    def delay(tier):
        tier._mover = LateMover(tier._mover)

    return delay
