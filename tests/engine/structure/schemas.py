"""Random JSON schemas that have short instances, for hypothesis."""

from hypothesis import strategies as st

NAMES = st.text("abcdeé_ \"'\\", min_size=1, max_size=5)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), NAMES)


def bounds(low, high, names):
    """An object with two numbers in order, under these names."""
    pairs = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    return pairs.map(lambda pair: dict(zip(names, pair, strict=True)))


def typed(name, extra=None):
    return (st.just({}) if extra is None else extra).map(lambda more: {"type": name} | more)


LEAVES = st.one_of(
    typed("null"),
    typed("boolean"),
    typed("integer", bounds(-500, 500, ("minimum", "maximum"))),
    typed("number", bounds(-50, 50, ("minimum", "maximum"))),
    typed("string", bounds(0, 6, ("minLength", "maxLength"))),
    typed("string", st.sampled_from(["^[a-c]{1,4}$", r"^\d{2}-\d{2}$", "^(on|off)$"]).map(
        lambda pattern: {"pattern": pattern})),
    typed("string", st.sampled_from(["ipv4", "uuid"]).map(
        lambda form: {"format": form})),
    st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
)  # fmt: skip


@st.composite
def objects(draw, inner):
    properties = draw(st.dictionaries(NAMES, inner, max_size=4))
    required = (
        draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    )
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


@st.composite
def arrays(draw, inner):
    size = draw(bounds(0, 3, ("minItems", "maxItems")))
    if draw(st.booleans()):
        first = draw(st.lists(inner, min_size=1, max_size=2))
        return {"type": "array", "prefixItems": first, "items": draw(inner)} | size
    return {"type": "array", "items": draw(inner)} | size


def compound(inner):
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        objects(inner),
        arrays(inner),
        several.map(lambda schemas: {"anyOf": schemas}),
        several.map(lambda schemas: {"anyOf": [*schemas, {"type": "null"}]}),
    )


SCHEMAS = st.recursive(LEAVES, compound, max_leaves=6)


@st.composite
def with_definitions(draw):
    """A schema that may refer to definitions, one of them recursive."""
    shared, schema = draw(LEAVES), draw(SCHEMAS)
    chain = {"type": "array", "items": {"$ref": "#/$defs/chain"}, "maxItems": 1}
    properties = {"s": {"$ref": "#/$defs/shared"}, "c": {"$ref": "#/$defs/chain"}, "v": schema}
    return {
        "$defs": {"shared": shared, "chain": chain},
        "type": "object",
        "properties": properties,
        "required": draw(st.lists(st.sampled_from("scv"), unique=True)),
        "additionalProperties": False,
    }


EVERY = st.one_of(SCHEMAS, with_definitions())


# Wide schemas have combinations that may contradict each other, or that are not served.
PATTERNS = st.sampled_from(
    ["^[a-c]{1,4}$", r"^\d{2}-\d{2}$", "b", r"^\w+$", "a.c", r"^\S\s?$", "é"]
)
FORMATS = st.sampled_from(
    ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"]
)
COUNTS, QUARTERS = st.integers(0, 4), st.integers(-80, 80).map(lambda n: n / 4)
NUMBER_WORDS = {
    "minimum": QUARTERS,
    "maximum": QUARTERS,
    "exclusiveMinimum": QUARTERS,
    "exclusiveMaximum": QUARTERS,
    "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.25, 7]),
}
STRING_WORDS = {"minLength": COUNTS, "maxLength": COUNTS, "pattern": PATTERNS, "format": FORMATS}
TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")


def some_of(words, most=2):
    """An object with some of these keywords."""
    names = st.lists(st.sampled_from(sorted(words)), unique=True, max_size=most)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({n: words[n] for n in chosen}))


def object_words(inner):
    names = st.lists(NAMES, max_size=2, unique=True)
    return {
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "required": names,
        "additionalProperties": st.one_of(st.booleans(), inner),
        "patternProperties": st.dictionaries(PATTERNS, inner, min_size=1, max_size=1),
        "minProperties": COUNTS,
        "maxProperties": COUNTS,
    }


def array_words(inner):
    return {
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "minItems": COUNTS,
        "maxItems": COUNTS,
    }


def wide(inner):
    several, types = st.lists(inner, min_size=1, max_size=3), st.sampled_from(TYPES)
    type_word = st.one_of(types, st.lists(types, min_size=1, max_size=2, unique=True))
    words = [NUMBER_WORDS, STRING_WORDS, object_words(inner), array_words(inner)]
    words.append({word: several for word in ("allOf", "anyOf", "oneOf")})
    return st.builds(
        lambda kind, *parts: {k: v for part in (kind, *parts) for k, v in part.items()},
        st.one_of(st.just({}), type_word.map(lambda kind: {"type": kind})),
        *[some_of(group, 1 if group is NUMBER_WORDS else 2) for group in words],
    )


WIDE = st.recursive(st.one_of(LEAVES, st.booleans()), wide, max_leaves=5)
