"""The fields of a request that ask for structured output, in the names of OpenAI and vLLM."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from onchip.engine.structure import grammar as bounds

GrammarText = Annotated[str, Field(min_length=1, max_length=bounds.MAX_GRAMMAR_BYTES)]
Schema = Annotated[
    dict[str, Any] | GrammarText | None, Field(description="a JSON schema, an object or a text")
]
Choices = Annotated[
    Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(max_length=bounds.MAX_CHOICES, fail_fast=True),
    ]
    | None,
    Field(description=f"a list of up to {bounds.MAX_CHOICES} texts"),
]


class _StrictModel(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, serialize_by_alias=True
    )


class TextFormat(_StrictModel):
    type: Literal["text"]


class JsonObjectFormat(_StrictModel):
    type: Literal["json_object"]


class JsonSchema(_StrictModel):
    """strict is accepted and has no effect: every schema is enforced."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(_StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(_StrictModel):
    """As `onchip.engine.StructuredOutputsParams`."""

    json_: Annotated[Schema, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Choices = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class StructuredFields(BaseModel):
    """One of these fields makes the text follow a format."""

    response_format: Annotated[
        ResponseFormat | None,
        Field(description="an object of type text, json_object or json_schema"),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Field(description="an object with json, regex, choice, grammar or json_object"),
    ] = None
    guided_json: Schema = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices = None
    guided_grammar: GrammarText | None = None

    def structure(self) -> dict[str, Any]:
        """response_format and structured_outputs of SamplingParams. guided_* are the old names of
        the latter.
        """
        outputs = self.structured_outputs
        asked = outputs.model_dump(exclude_none=True) if outputs is not None else {}
        for name in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{name}")
            if value is not None and value != []:
                if name in asked:
                    raise ValueError(f"guided_{name} is the old name of {name}: give one")
                asked[name] = value
        chosen: dict[str, Any] = {"structured_outputs": asked} if asked else {}
        if self.response_format is not None:
            chosen["response_format"] = self.response_format.model_dump(exclude_none=True)
        return chosen


def has_structure(chosen: Mapping[str, Any]) -> bool:
    kind = (chosen.get("response_format") or {}).get("type")
    return "structured_outputs" in chosen or kind not in (None, "text")
