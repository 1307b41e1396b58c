"""Options of speculative decoding."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from onchip.engine.speculation.tree import TreeShape

METHODS = ("ngram", "draft")
MAX_DRAFTS = 64
_DEFAULT_LOOKUP = 5  # tokens, as in vLLM


@dataclass(frozen=True)
class SpeculativeConfig:
    """Names are vLLM's. num_speculative_tokens: most drafts of a sample in one step. method:
    "ngram" looks the last tokens up in the prompt and the continuation so far, and proposes the
    tokens that followed them there; "draft" asks a smaller model, `model`, which `LLM` takes as it
    takes its own. prompt_lookup_max, prompt_lookup_min: the most and the fewest tokens to look up;
    if one is None it is the other, 5 if both are. disable_by_batch_size: no drafts while more
    samples than this are decoded; None: only the device's roofline decides. enforce_eager: no CUDA
    graphs of the draft model, nor for the sizes of steps with drafts. speculative_token_tree: the
    paths of a tree of drafts, "[(0,), (1,), (0, 0)]"; num_speculative_tokens is their number, and
    may be left out of a dict. None: a chain.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    model: Any = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    disable_by_batch_size: int | None = None
    enforce_eager: bool = False
    speculative_token_tree: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(
                f"method={self.method!r:.60} of speculative_config is not one of"
                f" {', '.join(METHODS)}"
            )
        if (self.method == "draft") != (self.model is not None):
            raise ValueError('speculative_config needs a model for method="draft", and only for it')
        if not isinstance(self.enforce_eager, bool):
            eager = self.enforce_eager
            raise ValueError(f"enforce_eager={eager!r:.60} of speculative_config must be a bool")
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, MAX_DRAFTS)
        if len(self.shape.paths) != self.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} of speculative_config, but"
                f" speculative_token_tree has {len(self.shape.paths)} paths"
            )
        for name in ("prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name))
        if self.lookup_lengths.start < self.lookup_lengths.stop + 1:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} exceeds"
                f" prompt_lookup_max={self.prompt_lookup_max}"
            )

    @classmethod
    def parse(
        cls, value: "SpeculativeConfig | Mapping[str, Any] | None"
    ) -> "SpeculativeConfig | None":
        """From a dict with these names."""
        if value is None or isinstance(value, SpeculativeConfig):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"speculative_config={value!r:.60} must be a dict")
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in value if name not in names]:
            raise ValueError(
                f"speculative_config has no option {unknown[0]!r:.60}; it has {', '.join(names)}"
            )
        tree = value.get("speculative_token_tree")
        if tree is not None and "num_speculative_tokens" not in value:
            value = {**value, "num_speculative_tokens": len(TreeShape.parse(tree).paths)}
        if "num_speculative_tokens" not in value:
            raise ValueError("speculative_config needs num_speculative_tokens")
        return cls(**value)

    @classmethod
    def parse_json(cls, text: str | None) -> "SpeculativeConfig | None":
        """From the option of a command, as for vLLM's server."""
        if text is None:
            return None
        try:
            return cls.parse(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"--speculative-config {text!r:.60} is not JSON: {error}") from None

    @cached_property
    def shape(self) -> TreeShape:
        """All drafts of a sample in one step."""
        if self.speculative_token_tree is None:
            return TreeShape.chain(self.num_speculative_tokens)
        return TreeShape.parse(self.speculative_token_tree)

    @property
    def lookup_lengths(self) -> range:
        """Numbers of tokens to look up, the largest first."""
        most = self.prompt_lookup_max or self.prompt_lookup_min or _DEFAULT_LOOKUP
        return range(most, (self.prompt_lookup_min or most) - 1, -1)


def _check_integer(name: str, value: Any, most: int | None = None) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < 1 or (most is not None and value > most):
        bounds = "from 1 on" if most is None else f"from 1 to {most}"
        raise ValueError(f"{name}={value!r:.60} of speculative_config must be a number {bounds}")
