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
