"""Score functions for tests: named ones, and random ones made of every operation that is served.

A named function is a pair (make, tensors): make(*tensors) is the score function, and tensors(heads,
seqlen_q, seqlen_k, draw) the tensors that it captures. Called with tensors of indices that
broadcast instead of symbols, a function is its own dense formula.
"""

import random
from collections.abc import Callable

import torch


def none(heads, seqlen_q, seqlen_k, draw):
    return ()


def make_alibi(slopes):
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


def make_bias(bias):
    return lambda score, b, h, q, k: score + bias[h, q, k]


def make_softcap():
    return lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0)


def make_temperature(temperature):
    return lambda score, b, h, q, k: score * torch.exp(temperature[h])


def make_relative(table):
    """A learned bias of the distance, in buckets as T5 has them."""

    def relative(score, b, h, q, k):
        distance = torch.clamp(q - k, -8, 8)
        far = torch.where(distance.abs() < 4, distance, distance // 2 * 2)
        return score + table[far + 8, h]

    return relative


def make_decomposed(rows, columns):
    """SAM's relative position: keys on a grid of 4 columns."""
    return lambda score, b, h, q, k: score + rows[b, h, q, k // 4] + columns[b, h, q, k % 4]


def make_gate(gate):
    return lambda score, b, h, q, k: score * torch.sigmoid(gate[q]) + gate[k] * 0.5


def make_documents(document):
    return lambda score, b, h, q, k: torch.where(document[q] == document[k], score, -float("inf"))


def make_decay():
    return lambda score, b, h, q, k: score - torch.log(1.0 + (q - k).abs()) * (h + 1)


def make_nested(table, which):
    return lambda score, b, h, q, k: score + table[which[k], h] * (b + 1)


CASES: dict[str, tuple[Callable, Callable]] = {
    "alibi": (make_alibi, lambda h, q, k, draw: (draw(h).abs(),)),
    "bias": (make_bias, lambda h, q, k, draw: (draw(h, q, k),)),
    "softcap": (make_softcap, none),
    "temperature": (make_temperature, lambda h, q, k, draw: (draw(h),)),
    "relative": (make_relative, lambda h, q, k, draw: (draw(17, h),)),
    "decomposed": (make_decomposed, lambda h, q, k, draw: (draw(2, h, q, 7), draw(2, h, q, 4))),
    "gate": (make_gate, lambda h, q, k, draw: (draw(max(q, k)),)),
    "documents": (make_documents, lambda h, q, k, draw: (torch.arange(max(q, k)) // 5,)),
    "decay": (make_decay, none),
    "nested": (make_nested, lambda h, q, k, draw: (draw(3, h), torch.arange(k) % 3)),
}


class RandomFunction:
    """A random score function. Every result is bounded and smooth almost everywhere, so that its
    derivatives are too. `tensors` are captured: floats (heads,), (rows, columns) and integers.
    """

    def __init__(self, seed: int, depth: int = 4):
        self.rng = random.Random(seed)
        self.tensors: tuple[torch.Tensor, ...] = ()
        self.program = self._float(depth)

    def __call__(self, score, b, h, q, k):
        return self.program({"score": score, "b": b, "h": h, "q": q, "k": k}, self.tensors)

    def _float(self, depth):
        if depth == 0 or self.rng.random() < 0.1:
            return self.rng.choice(self._leaves())
        return self.rng.choice([self._unary, self._binary, self._binary, self._choice])(depth - 1)

    def _leaves(self):
        constant = self.rng.choice((0.5, -1.5, 2.0))
        i = self._integer()
        return [
            *[lambda env, t: env["score"]] * 3,
            lambda env, t: t[0][env["h"]],
            lambda env, t: t[1][env["q"], env["k"] % t[1].shape[1]],
            lambda env, t: t[1][env["q"] // 2, t[2][env["k"]]],
            lambda env, t: i(env, t) * 0.25,
            lambda env, t: env["score"] * constant,
        ]

    def _unary(self, depth):
        a = self._float(depth)
        clip = lambda x: torch.clamp(x, -3.0, 3.0)
        positive = lambda x: x * x + 0.5
        functions = [
            torch.tanh,
            torch.sigmoid,
            torch.sin,
            torch.cos,
            torch.erf,
            torch.abs,
            torch.relu,
            torch.square,
            torch.neg,
            lambda x: torch.exp(clip(x)) * 0.1,
            lambda x: torch.exp2(clip(x)) * 0.1,
            lambda x: torch.log(positive(x)),
            lambda x: torch.log2(positive(x)),
            lambda x: torch.sqrt(positive(x)),
            lambda x: torch.rsqrt(positive(x)),
            lambda x: 1 / positive(x),
            lambda x: positive(x) ** 1.7,
            lambda x: 1.3 ** clip(x),
            lambda x: x**3 * 0.05,
            lambda x: torch.floor(x) + x,
            lambda x: torch.round(x) * 0.5 - x,
            lambda x: x % 1.5,
            lambda x: torch.sign(x) * 0.2,
            clip,
        ]
        f = self.rng.choice(functions)
        return lambda env, t: f(a(env, t))

    def _binary(self, depth):
        a, b = self._float(depth), self._float(depth)
        functions = [
            lambda x, y: x + y,
            lambda x, y: x - y,
            lambda x, y: x * torch.tanh(y),
            lambda x, y: x / (1.0 + y * y),
            torch.maximum,
            torch.minimum,
            lambda x, y: torch.add(x, y, alpha=0.5),
        ]
        f = self.rng.choice(functions)
        return lambda env, t: f(a(env, t) + 0 * env["score"], b(env, t))

    def _choice(self, depth):
        condition, a, b = self._condition(), self._float(depth), self._float(depth)
        return lambda env, t: torch.where(condition(env, t), a(env, t), b(env, t))

    def _condition(self):
        i, j = self._integer(), self._integer()
        bound = self.rng.uniform(-1, 1)
        return self.rng.choice(
            [
                lambda env, t: i(env, t) >= j(env, t),
                lambda env, t: (i(env, t) % 3 == 0) | (j(env, t) < 2),
                lambda env, t: (env["q"] != env["k"]) & (i(env, t) <= 4),
                lambda env, t: ~(env["score"] > bound),
                lambda env, t: torch.logical_xor(env["score"] < bound, i(env, t) > 1),
            ]
        )

    def _integer(self):
        n = self.rng.randint(2, 5)
        return self.rng.choice(
            [
                lambda env, t: env["q"] - env["k"],
                lambda env, t: (env["q"] - env["k"]).abs() // n,
                lambda env, t: env["h"] * n - env["k"],
                lambda env, t: (env["q"] ^ env["k"]) & 7,
                lambda env, t: env["b"] + (env["q"] << 1) - (env["k"] >> 1),
                lambda env, t: t[2][env["k"]] * n - env["q"] % n,
                lambda env, t: torch.maximum(env["q"], env["k"]) - n,
            ]
        )
