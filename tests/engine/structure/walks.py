"""Random texts of a grammar, without a model: every byte is one that the grammar allows."""

import json
import math
import random
import sys
from decimal import Decimal

from onchip.engine.structure.automaton import build_matcher, byte_vocabulary
from onchip.engine.structure.grammar import parse_grammar

EOS, LONGEST = 256, 400
LIKELY = b'"}],:{[0123456789truefalsnabc-. '
ENDING = b'"}]'


class RandomTexts:
    """Texts of schemas, over bytes."""

    def __init__(self):
        self.index = byte_vocabulary().build()

    def build(self, schema):
        """A matcher; ValueError: the schema is not served."""
        return build_matcher(self.index, parse_grammar(None, {"json": json.dumps(schema)}))

    def walk(self, matcher, draw):
        """A text, or None if it does not end soon."""
        matcher, text = matcher.deep_copy(), bytearray()
        while len(text) < LONGEST:
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            assert not matcher.is_error(), (bytes(text), matcher.get_error())
            allowed = [token for token in range(EOS) if bits >> token & 1]
            if bits >> EOS and (not allowed or draw.random() < 0.5 or len(text) > 60):
                return text.decode()
            assert allowed, bytes(text)
            weights = [_weight(token, len(text)) for token in allowed]
            (token,) = draw.choices(allowed, weights)
            assert matcher.consume_token(token), bytes(text)
            text.append(token)
        return None

    def check(self, schema, validator, seed, count=8):
        """Walk a schema some times, and return how many texts ended. All of them must be valid."""
        matcher, draw, ended = self.build(schema), random.Random(seed), 0
        for _ in range(count):
            text = self.walk(matcher, draw)
            if text is not None:
                ended += 1
                assert validator.is_valid(parse_json(text)), (schema, text)
        return ended


def parse_json(text):
    """A JSON text, with exact fractions. A number of any exponent is JSON; validators take numbers
    up to the largest.
    """
    return json.loads(text, parse_float=_parse_float)


def _parse_float(digits):
    value = float(digits)
    if math.isinf(value):
        return math.copysign(sys.float_info.max, value)
    return Decimal(digits) if value else 0.0


def _weight(token, length):
    weight = 8.0 if token in LIKELY else 0.3
    if token in ENDING and length > 30:
        weight *= 6
    return weight * (0.1 if token in b" \n" else 0.2 if token == ord("\\") else 1.0)
