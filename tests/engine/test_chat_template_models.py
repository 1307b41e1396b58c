"""Templates in the style of well-known models render as in transformers."""

from datetime import datetime
from pathlib import Path

import pytest

from onchip.engine.chat_template import render_template

reference = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template

FOLDER = Path(__file__).parent / "templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter & <Klima>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TALK = [
    {"role": "system", "content": "Be brief.  "},
    {"role": "user", "content": "  Hi <b> & 'you' — 日本\n"},
    {"role": "assistant", "content": "Yes? "},
    {"role": "user", "content": "Go on"},
]
CALLS = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "a tool knows",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Köln"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "7 °C"},
]
TEMPLATES = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.jinja"))}
CONVERSATIONS = {"talk": TALK, "calls": CALLS, "one": TALK[1:2]}


def both(name, messages, **options):
    (theirs,), _ = reference([messages], chat_template=TEMPLATES[name], **options, **SPECIAL)
    ours = render_template(TEMPLATES[name], messages, SPECIAL, **options)
    return ours, theirs


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("talk", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_what_transformers_writes(name, talk, tools, prompted):
    ours, theirs = both(
        name, CONVERSATIONS[talk], tools=tools, add_generation_prompt=prompted, mood="!"
    )
    assert ours == theirs and ours


CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("name", ["chatml", "header", "instruct", "turns", "thinking"])
@pytest.mark.parametrize("content", ["Well, I", "Well, I "])
def test_the_last_message_can_be_continued(name, content):
    messages = [*TALK[:2], {"role": "assistant", "content": content}]
    ours, theirs = both(name, messages, **CONTINUED)
    assert ours == theirs and "Well, I" in ours[-8:]
    assert messages[-1]["content"] == content  # the caller's messages are not written to


def test_parts_can_be_continued():
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "Well"}]}]
    template = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
    (theirs,), _ = reference([messages], chat_template=template, **CONTINUED)
    assert render_template(template, messages, {}, **CONTINUED) == theirs == "[Well"
    with pytest.raises(ValueError, match="leaves the last message out"):
        render_template("{{ messages[0].role }}", messages, {}, **CONTINUED)


def test_a_continued_message_excludes_a_new_one():
    with pytest.raises(ValueError, match="excludes continue_final_message"):
        render_template("x", TALK, {}, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(ValueError, match="no text to continue"):
        render_template("x", [{"role": "user"}], {}, continue_final_message=True)


def test_thinking_can_be_switched_off():
    ours, theirs = both("thinking", TALK, enable_thinking=False, add_generation_prompt=True)
    assert ours == theirs and ours.endswith("</think>\n\n")


def test_strftime_now_gives_the_current_date():
    ours, _ = both("header", TALK)
    assert datetime.now().strftime("%Y") in ours


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_three_names(name):
    template = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    message = {"role": "assistant", "content": "", name: "hm"}
    (theirs,), _ = reference([[message]], chat_template=template)
    assert render_template(template, [message], {}) == theirs == "hmhm"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__init__ = 1 %}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% include '/etc/passwd' %}",
        "{% generation %}no end",
        "{% break %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_reaches_only_its_variables(template):
    with pytest.raises(Exception):  # noqa: B017  it has many types of its own
        reference([TALK], chat_template=template)
    with pytest.raises(ValueError, match="the chat template failed: ."):
        render_template(template, TALK, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ ('%s' | attr('format')).__self__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ strftime_now.__code__ }}",
    ],
)
def test_private_attributes_are_undefined(template):
    assert reference([TALK], chat_template=template)[0] == [""]
    assert render_template(template, TALK, {}) == ""
