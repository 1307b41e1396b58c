"""The overloads of the public functions name the same options as the functions themselves."""

import inspect
from typing import get_args, get_overloads

import pytest

import onchip
from onchip import parallel

FUNCTIONS = [
    *(onchip.attention, onchip.varlen_attention, onchip.paged_attention),
    *(onchip.cascade_attention, onchip.offload_attention),
    *(parallel.context_parallel_attention, parallel.tree_attention, parallel.tree_paged_attention),
]
# tree_attention and tree_paged_attention pass these on.
PASSED_ON = {"softmax_scale", "softcap", "deterministic", "kernel"}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_overloads_have_every_option(function):
    implementation = inspect.signature(function).parameters
    by_name = [p.name for p in implementation.values() if p.kind is p.KEYWORD_ONLY]
    wanted = {*by_name, *(PASSED_ON if function.__name__.startswith("tree") else ())}
    overloads = get_overloads(inspect.unwrap(function))
    assert len(overloads) >= 3
    for overload in overloads:
        parameters = inspect.signature(overload).parameters
        *others, options = parameters.values()
        (typed,) = get_args(options.annotation)
        flags = {p.name for p in others if p.kind is p.KEYWORD_ONLY}
        assert flags | typed.__optional_keys__ == wanted
        positional = [p.name for p in others if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == list(implementation)[: len(positional)]
