"""The keywords of JSON Schema draft 2020-12, a few schemas each, written from the specification:
its core and validation vocabularies, and the combinations that are easily misread.

Texts must follow a schema of SERVED. A schema of REFUSED is answered with a sentence.
"""


def under(keyword, *values):
    return [{keyword: value} for value in values]


def closed(**properties):
    return {"type": "object", "properties": properties, "additionalProperties": False}


INTEGER, STRING, POINT = {"type": "integer"}, {"type": "string"}, closed(x={"type": "integer"})
NAMES = ["with space", 'quote"', "back\\slash", "new\nline", "tab\t", "é", "😀", "$ref", "~/"]
TREE = {
    "$defs": {"node": {
        "type": "object",
        "properties": {"v": INTEGER, "next": {"type": "array", "maxItems": 1,
                                              "items": {"$ref": "#/$defs/node"}}},
        "required": ["v"],
    }},
    "$ref": "#/$defs/node",
}  # fmt: skip

TYPES = [
    *under("type", "integer", "number", "string", "object", "array", "boolean", "null"),
    *under("type", ["integer", "string"], ["array", "object", "null"], ["string"]),
    True,
    {},
]
VALUES = [
    *under("const", 2, -2.0, "a", "", None, True, False, 0, 1, [], {}, [{"a": None}]),
    *under("const", {"b": [1, {"c": "é"}], "a": False}, {"$ref": "#/x"}, [False], [0], "\0", 2**53),
    *under("enum", [1, 2], ["a", 1, None, [], {}], [[0]], [{"a": True}], ["one\ntwo"], [False]),
    {"type": "string", "enum": ["a", "b", 3]},
    {"properties": {"k": {"enum": ["x"]}, "j": {"enum": ["y"]}}, "required": ["j"]},
    *under("enum", NAMES),
]  # fmt: skip
NUMBERS = [
    {"type": "number", "minimum": 1.1, "maximum": 2.5},
    {"type": "number", "exclusiveMinimum": 1.1, "exclusiveMaximum": 3.0},
    {"type": "number", "minimum": -2, "exclusiveMaximum": 0},
    {"type": "integer", "minimum": -2.5, "maximum": 300.0},
    {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 101},
    {"type": "integer", "multipleOf": 7, "maximum": 1000, "minimum": -50},
    {"type": "integer", "multipleOf": 0.5, "minimum": 0, "maximum": 20},
    {"type": "number", "multipleOf": 1.5, "minimum": 0, "maximum": 90},
    {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 2},
    *under("minimum", 1.1, -2, 0),
    *under("maximum", 3.0, 300, -1),
    *under("exclusiveMinimum", 1.1, 0),
    *under("exclusiveMaximum", 3.0, -5),
    {"multipleOf": 2},
]
STRINGS = [
    *under("minLength", 2, 2.0, 0),
    *under("maxLength", 2, 2.0, 0),
    {"type": "string", "minLength": 3, "maxLength": 3},
    *under("pattern", "^a*$", "a+", "^é$", "a$", "^(a|bc)?$", "", r"^\d+$", r"^\w$", r"^\W$"),
    *under("pattern", r"^\s$", r"^\S{2}$", r"^[\s\d]$", r"^[^\S]$", "^[[:a]$", "^[a&&b]$"),
    *under("pattern", r"^\u00e9$", r"^\/$", r"^[.]$", "^.$", r"^\p{L}$", r"^\x41$", "^[a-c--b]$"),
    {"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "b", "allOf": [{"pattern": "^a"}, {"maxLength": 5}]},
    *under("format", "date", "time", "date-time", "duration", "email", "hostname", "ipv4"),
    *under("format", "ipv6", "uri", "uuid"),
    {"type": "string", "format": "email", "maxLength": 12},
    {"type": "string", "format": "date", "pattern": "^2"},
    {"type": "string", "contentEncoding": "base64", "contentMediaType": "application/json"},
]
ARRAYS = [
    *under("items", INTEGER, True, False, {"type": "array", "items": {"type": "array"}}),
    *under("prefixItems", [INTEGER, STRING], [True, False]),
    {"prefixItems": [INTEGER], "items": STRING},
    {"prefixItems": [INTEGER, {"type": "null"}], "items": False},
    {"type": "array", "prefixItems": [{}, {}, {}], "items": INTEGER, "minItems": 4},
    {"type": "array", "prefixItems": [INTEGER, INTEGER], "maxItems": 1},
    *under("minItems", 1, 1.0),
    *under("maxItems", 2, 2.0, 0),
    {"type": "array", "minItems": 2, "maxItems": 3, "items": {"type": "boolean"}},
]
OBJECTS = [
    {"properties": {"a": INTEGER, "b": STRING}},
    {"properties": {"a": True, "b": False}},
    {"properties": {"a": {"type": "array", "maxItems": 3}, "b": {"type": "array"}},
     "patternProperties": {"^f.o$": {"minItems": 2}}, "additionalProperties": INTEGER},
    {"type": "object", "properties": {name: INTEGER for name in NAMES}, "required": NAMES[:3]},
    {"properties": {"__proto__": INTEGER, "toString": {"properties": {"length": STRING}},
                    "constructor": {"type": "number"}}},
    {"properties": {"a": {}}, "required": ["a"]},
    {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a", "c"]},
    {"required": NAMES[3:]},
    {"properties": {"a": {}}, "required": []},
    {"properties": {"a": {}, "b": {}}, "additionalProperties": False},
    {"properties": {"a": {}}, "additionalProperties": {"type": "boolean"}},
    {"additionalProperties": {"type": "boolean"}},
    {"additionalProperties": False, "patternProperties": {"^á": {}}},
    {"patternProperties": {"f.*o": INTEGER}},
    {"type": "object", "patternProperties": {r"^\d{2}$": INTEGER, "^[a-c]+$": STRING}},
    {"patternProperties": {"^a": True, "^b": False}},
    {"type": "object", "minProperties": 1},
    {"type": "object", "maxProperties": 2.0},
    {"type": "object", "maxProperties": 0},
    {"type": "object", "properties": {}, "minProperties": 1, "maxProperties": 2},
    {"properties": {"a": {"type": "null", "default": []}, "b": {"default": "no", "minLength": 4}}},
]  # fmt: skip
COMBINED = [
    {"allOf": [{"properties": {"b": INTEGER}, "required": ["b"]},
               {"properties": {"a": STRING}, "required": ["a"]}]},
    {"allOf": [{"maximum": 30}, {"minimum": 20}], "type": "integer"},
    {"allOf": [{}, {"type": "number"}, True]},
    {"allOf": [{"allOf": [{"type": "null"}]}]},
    {"properties": {"a": INTEGER}, "required": ["a"],
     "allOf": [{"properties": {"b": {"type": "null"}}, "required": ["b"]}]},
    {"anyOf": [INTEGER, {"minimum": 2}], "type": "number"},
    {"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]},
    {"anyOf": [{"properties": {"b": INTEGER}, "required": ["b"]},
               {"properties": {"a": STRING}, "required": ["a"]}], "type": "object"},
    {"anyOf": [True, False]},
    {"anyOf": [{"type": "number"}, {}]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"oneOf": [{"const": 1}, {"const": "b"}]},
    {"oneOf": [closed(k={"const": "x"}) | {"required": ["k"]},
               closed(k={"const": "y"}) | {"required": ["k"]}]},
]  # fmt: skip
REFERENCES = [
    TREE,
    {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    {"properties": {"a": INTEGER, "b": {"$ref": "#/properties/a"}}},
    {"prefixItems": [INTEGER, {"$ref": "#/prefixItems/0"}]},
    {"$defs": {"til~de": INTEGER, "sla/sh": INTEGER, "per%cent": INTEGER},
     "properties": {"t": {"$ref": "#/$defs/til~0de"}, "s": {"$ref": "#/$defs/sla~1sh"},
                    "p": {"$ref": "#/$defs/per%25cent"}}},
    {"$defs": {"a": INTEGER, "b": {"$ref": "#/$defs/a"}, "c": {"$ref": "#/$defs/b"}},
     "$ref": "#/$defs/c"},
    {"$defs": {"a": {"type": "array"}}, "properties": {"a": {"$ref": "#/$defs/a", "maxItems": 2}}},
    {"properties": {"$ref": STRING}},
    {"properties": {"$ref": {"$ref": "#/$defs/s"}}, "$defs": {"s": STRING}},
    {"$defs": {"bool": True}, "$ref": "#/$defs/bool"},
    {"definitions": {"old": POINT}, "$ref": "#/definitions/old"},
    {"$defs": {"": INTEGER}, "allOf": [{"$ref": "#/$defs/"}]},
    {"$id": "https://example.org/root", "$schema": "https://json-schema.org/draft/2020-12/schema",
     "$comment": "a comment", "title": "t", "description": "d", "examples": [{"pattern": "["}],
     "deprecated": True, "readOnly": True, "type": "object"},
    {"x-vendor": {"any": [1]}, "type": "null"},
]  # fmt: skip
SERVED = [*TYPES, *VALUES, *NUMBERS, *STRINGS, *ARRAYS, *OBJECTS, *COMBINED, *REFERENCES]

REFUSED = [
    False,
    {"anyOf": [False, False]},
    {"type": "frob"},
    {"enum": []},
    {"$ref": "#"},
    {"$ref": "#/$defs/none"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"$ref": "https://example.org/elsewhere"},
    {"$dynamicRef": "#node", "$defs": {"n": {"$dynamicAnchor": "node"}}},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
    {"type": "string", "minLength": 3, "maxLength": 2},
    {"minItems": 2, "maxItems": 1, "type": "array"},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"allOf": [{"type": "string"}, {"type": "null"}]},
    {"oneOf": [INTEGER, {"type": "number", "minimum": 2}]},
    {"not": INTEGER},
    {"if": INTEGER, "then": {"minimum": 0}, "else": STRING},
    {"contains": INTEGER},
    {"contains": INTEGER, "minContains": 2, "maxContains": 3},
    {"uniqueItems": True},
    {"propertyNames": {"maxLength": 3}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"unevaluatedItems": False},
    {"unevaluatedProperties": False},
    {"pattern": "(?=a)"},
    {"pattern": r"(a)\1"},
    {"pattern": r"a\b"},
    {"pattern": "[]"},
    {"pattern": "[^]"},
    {"pattern": "(a"},
    {"patternProperties": {"^a": INTEGER, "b$": STRING}},
    *under("format", "iri", "idn-email", "regex", "json-pointer", "uri-template"),
]  # fmt: skip
