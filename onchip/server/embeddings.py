"""POST /v1/embeddings: vectors of prompts, from the hidden states of the decoder."""

import asyncio
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic_core import to_json

from onchip.engine.request import RequestOutput

from .metrics import Metrics
from .protocol import CallFields, Tokens
from .streaming import INLINE_ENTRIES, AcceptedCall, WholeResponse

MAX_INPUTS = 2048  # as at OpenAI
MAX_NUMBERS = 1 << 21  # of one response: 43 MB of JSON at most

Text = Annotated[str, Field(min_length=1)]


class EmbeddingRequest(CallFields):
    """POST /v1/embeddings. pooling: "last", the hidden state of the last token, or "mean", of all
    tokens. priority, deadline_s, cache_salt and add_special_tokens as for completions.
    """

    input: Annotated[
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)],
        Field(description="a text, a list of token ids, or a list of up to 2048 of either"),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    pooling: Literal["last", "mean"] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        several = not isinstance(self.input, str) and not isinstance(self.input[0], int)
        return list(self.input) if several else [self.input]  # pyright: ignore

    def check(self, size: int | None) -> None:
        """size: of the model's embeddings, None if it has none. ValueError: not served."""
        if size is None:
            raise ValueError(
                "this model has no embeddings: it runs through transformers, which returns its"
                " logits and no hidden states"
            )
        if self.dimensions not in (None, size):
            raise ValueError(
                f"dimensions={self.dimensions} is not served: the embeddings of this model have"
                f" {size} numbers, and nothing says that fewer of them mean the same"
            )
        if len(self.prompts) * size > MAX_NUMBERS:
            raise ValueError(
                f"{len(self.prompts)} embeddings of {size} numbers exceed {MAX_NUMBERS} numbers:"
                f" send at most {MAX_NUMBERS // size} inputs"
            )


class Embedding(BaseModel):
    """embedding: numbers, or the base64 of little-endian fp32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class EmbeddingResponse(WholeResponse):
    """All embeddings of a call, each encoded by itself: in one piece, millions of numbers would
    block all threads.
    """

    def __init__(self, call: AcceptedCall, metrics: Metrics, model: str, in_base64: bool):
        super().__init__(call, metrics)
        self._model, self._in_base64 = model, in_base64

    async def encode_all(self) -> Sequence[bytes]:
        outputs = [output for output in self.call.pending.outputs if output is not None]
        if sum(len(output.embedding or ()) for output in outputs) < INLINE_ENTRIES:
            return list(self._encode(outputs))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.call.workers, list, self._encode(outputs))

    def _encode(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        tokens = self.call.usage.prompt_tokens
        usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
        empty = EmbeddingList(data=[], model=self._model, usage=usage).model_dump_json().encode()
        head, opening, tail = empty.partition(b'"data":[')
        yield head + opening
        for index, output in enumerate(outputs):
            numbers = output.embedding or array("f")
            value = encode_base64(numbers) if self._in_base64 else numbers.tolist()
            entry = Embedding.model_construct(index=index, embedding=value)
            yield (b"," if index else b"") + to_json(entry)
        yield tail


def encode_base64(numbers: array) -> str:
    """fp32 in little-endian order, as OpenAI's clients read it."""
    if sys.byteorder == "big":
        numbers = array("f", numbers)
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode("ascii")
