"""Texts of JSON schemas are valid: every keyword of draft 2020-12, and random combinations of them,
followed byte by byte without a model. What is not served is refused in a sentence.
"""

import datetime
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

from onchip.engine.structure.json_schema import translate_pattern, translate_schema  # noqa: E402
from tests.engine.structure import keywords  # noqa: E402
from tests.engine.structure.schemas import WIDE  # noqa: E402
from tests.engine.structure.walks import RandomTexts  # noqa: E402

SUITE = "JSON_SCHEMA_TEST_SUITE"  # a clone of github.com/json-schema-org/JSON-Schema-Test-Suite
REFUSAL = "^the JSON schema is not served: ."
QUICK = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}


@pytest.fixture(scope="module")
def texts():
    return RandomTexts()


def validator_of(schema):
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True)


def check_or_refuse(texts, schema, seed, count=8):
    """The number of texts that ended, all of them valid; None if the schema is refused."""
    try:
        texts.build(schema)
    except ValueError as error:
        assert str(error).startswith("the JSON schema is not served: "), error
        return None
    return texts.check(schema, validator_of(schema), seed, count)


def is_allowed(matcher, text):
    """Whether the matcher allows this string."""
    tokens = list(json.dumps(text).encode())
    return matcher.validate_tokens(tokens) == len(tokens)


def test_texts_of_every_keyword_are_valid(texts):
    for seed, schema in enumerate(keywords.SERVED):
        assert texts.check(schema, validator_of(schema), seed, 4), schema


@pytest.mark.parametrize("schema", keywords.REFUSED, ids=json.dumps)
def test_keywords_that_are_not_served_are_refused_in_a_sentence(texts, schema):
    with pytest.raises(ValueError, match=REFUSAL):
        texts.build(schema)


@settings(max_examples=30, **QUICK)
@given(WIDE, st.integers(0, 99))
def test_random_combinations(texts, schema, seed):
    check_or_refuse(texts, schema, seed, 3)


@pytest.mark.slow
@settings(max_examples=1000, **QUICK)
@given(WIDE, st.integers(0, 99))
def test_a_thousand_random_combinations(texts, schema, seed):
    check_or_refuse(texts, schema, seed)


@pytest.mark.slow
@pytest.mark.skipif(SUITE not in os.environ, reason=f"{SUITE} names no clone of the suite")
def test_the_schemas_of_the_test_suite(texts):
    files = sorted((Path(os.environ.get(SUITE, "")) / "tests" / "draft2020-12").rglob("*.json"))
    schemas = [case["schema"] for file in files for case in json.loads(file.read_text())]
    ended = [check_or_refuse(texts, s, i, 24) for i, s in enumerate(schemas)]
    served = [number for number in ended if number is not None]
    print(f"{len(schemas)} schemas: {len(served)} served, {sum(served)} texts, all valid")
    assert len(served) > 200 and all(served)


def test_dates_have_the_days_of_their_month(texts):
    matcher = texts.build({"type": "string", "format": "date"})
    for year in (1900, 2000, 2023, 2024):
        for month, day in ((1, 31), (2, 28), (2, 29), (2, 30), (4, 30), (4, 31), (12, 31), (13, 1)):
            text = f"{year}-{month:02}-{day:02}"
            try:
                is_date = bool(datetime.date.fromisoformat(text))
            except ValueError:
                is_date = False
            assert is_allowed(matcher, text) is is_date, text


def test_patterns_are_those_of_ecma_262():
    for pattern in (r"^[a-c]\d+$", r"\\s", r"\[\s", "é|(?:b){2}"):
        assert translate_pattern(pattern) == pattern.replace(
            r"\[\s", r"\[" + translate_pattern(r"\s")
        )
    assert translate_pattern("[.]") == "[.]" and translate_pattern(".") != "."


@pytest.mark.parametrize(
    ("pattern", "characters"),
    [
        ("[[:a]", "[:a"),
        ("[a&&b~~]", "a&b~"),
        ("[+--]", "+,-"),
        ("[+--/]", "+,-/"),
        ("[--0]", "-./0"),
        ("[---]", "-"),
        ("[a-c-e]", "abc-e"),
        ("[+-/--1]", "+,-./01"),
        (r"[+-\d]", "+-0123456789"),
        (r"[\s-.]", " -."),
        ("[^#-~]", ' !"'),
        (r"[^ !#-\[\]-~]", '"\\'),
    ],
)
def test_classes_have_the_characters_of_ecma_262(texts, pattern, characters):
    matcher = texts.build({"type": "string", "pattern": f"^{pattern}$"})
    printable = map(chr, range(32, 127))
    assert {c for c in printable if is_allowed(matcher, c)} == set(characters)


@pytest.mark.parametrize("pattern", ["[b--c]", "[a", "[]", "[^]", r"[a\]", "[[[["])
def test_classes_that_are_none_are_refused(texts, pattern):
    with pytest.raises(ValueError, match=REFUSAL):
        texts.build({"type": "string", "pattern": pattern})


def test_addresses_have_the_bounds_of_their_rfc(texts):
    matcher = texts.build({"type": "string", "format": "email"})
    domain = ".".join(["b" * 62] * 4)
    for local in ("a" * 64, "a." * 31 + "ab", "a"):
        assert is_allowed(matcher, f"{local}@{domain}") and is_allowed(matcher, f"{local}@b.c")
    for local in ("a" * 65, "a." * 32 + "a", "a..b", ".a", "a."):
        assert not is_allowed(matcher, f"{local}@b.c"), local


def test_values_and_names_are_no_keywords():
    """A `pattern` in a constant, and a property of that name, stay as they are."""
    schema = {
        "const": {"pattern": "."},
        "enum": [{"pattern": ".", "maxItems": 2.0}],
        "properties": {"pattern": {"const": 1}, "format": {"type": "null"}, "email": True},
        "default": {"format": "email"},
    }
    assert translate_schema(schema) == schema
