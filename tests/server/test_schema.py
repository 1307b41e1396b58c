"""Requests that the OpenAPI schema allows or forbids get the responses that it describes."""

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi import checks  # noqa: E402

OPERATIONS = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/embeddings", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    *((path, "GET") for path in ("/health", "/ready", "/stats", "/metrics")),
]
# A schema cannot express that a prompt fits into the model: allowed bodies may still be rejected.
UNSAID = (checks.positive_data_acceptance,)


@pytest.fixture(scope="module")
def schema(shared):
    return schemathesis.openapi.from_url(f"{shared}/openapi.json")


def test_every_operation_is_covered(schema):
    listed = {(o.ok().path, o.ok().method.upper()) for o in schema.get_all_operations()}
    assert listed == set(OPERATIONS)


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_the_schema_is_kept(schema, path, method, mode):
    operation = schema[path][method]
    if mode is schemathesis.GenerationMode.NEGATIVE and method == "GET":
        return  # nothing about it can be wrong

    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(excluded_checks=UNSAID)

    check()
