"""The switch of value checks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import onchip
from onchip.core.values import MAX_SWITCHES, checks


def test_checks_is_a_switch_and_a_context():
    with onchip.checks(True):
        assert checks.enabled
    assert not checks.enabled
    onchip.checks(True)
    assert checks.enabled
    onchip.checks(False)
    assert not checks.enabled


class TestChecks:
    """Several threads may open and close contexts in any order."""

    @pytest.fixture(autouse=True)
    def restored(self, monkeypatch):
        monkeypatch.setattr(checks, "_open", ())
        monkeypatch.setattr(checks, "enabled", False)

    @pytest.mark.parametrize("first", [0, 1])
    def test_overlapping_contexts_restore_the_setting(self, first):
        one, two = checks(True), checks(True)
        contexts = [one.__enter__(), two.__enter__()]
        contexts[first].__exit__()
        assert checks.enabled
        contexts[1 - first].__exit__()
        assert not checks.enabled

    def test_contexts_of_threads(self):
        barrier = threading.Barrier(8)

        def work():
            barrier.wait()
            for _ in range(200):
                with checks(True):
                    assert checks.enabled

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work) for _ in range(8)]:
                done.result()
        assert not checks.enabled

    def test_a_context_restores_the_switch_around_it(self):
        checks(True)
        with checks(False):
            assert not checks.enabled
            with checks(True):
                assert checks.enabled
            assert not checks.enabled
        assert checks.enabled
        for _ in range(500):
            checks(False)
        assert not checks.enabled and len(checks._open) <= MAX_SWITCHES

    def test_the_switch_takes_a_bool(self):
        with pytest.raises(ValueError, match="enabled='False'"):
            checks("False")
