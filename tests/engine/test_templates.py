"""Templates in the style of well-known models write what transformers writes from them."""

from datetime import datetime

import pytest

from onchip.engine.chat import render_template

reference = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template

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
TEMPLATES = {
    "chatml": """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "header": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n" + system_message + "<|eot|>" }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception("one call only") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ "}" }}
    {%- elif message.role in ("tool", "ipython") %}
        {{- "<|start|>ipython<|end|>" }}
        {%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
        {%- else %}{{ message.content }}{% endif %}
    {%- else %}
        {{- '<|start|>' + message.role + '<|end|>\\n' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}""",
    "instruct": """{%- set ns = namespace(index=0, system='') %}
{%- if messages[0]["role"] == "system" %}{% set ns.system = messages[0]["content"] %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and ns.system %}{{ "[INST]" + ns.system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{ "[INST]" + message["content"] + "[/INST]" }}{% endif %}
    {%- elif message["role"] == "assistant" %}
        {%- generation %}{{ " " + message["content"] | trim + eos_token }}{% endgeneration %}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}{{ ns.index }}""",
    "turns": """{{ bos_token }}{% for message in messages %}
{% if message.role == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message.role %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "thinking": """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}{{ "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and thought %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
        {{- content.lstrip('\\n') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ tool_call.arguments | tojson ~ '}\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "loops": """{% for message in messages %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% generation %}{% set seen = message.content %}{{ seen }}{% endgeneration %}
  [{{ seen is defined }}]{{ loop.index }}
  {% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}{{ dict(a=1) | tojson }}{{ tools is none }}{{ documents is none }}{{ mood }}""",
    "tojson": "{{ messages | tojson(indent=2, sort_keys=true) }}{{ messages | tojson(ensure_ascii=true) }}"
    "{{ messages | tojson(separators=(',', ':')) }}{{ messages[0].items() | list }}",
}
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
    with pytest.raises(ValueError, match="not with continue_final_message"):
        render_template("x", TALK, {}, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(ValueError, match="no text to continue"):
        render_template("x", [{"role": "user"}], {}, continue_final_message=True)


def test_thinking_can_be_switched_off():
    ours, theirs = both("thinking", TALK, enable_thinking=False, add_generation_prompt=True)
    assert ours == theirs and ours.endswith("</think>\n\n")


def test_the_date_is_todays():
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
def test_neither_gives_a_template_more_than_its_variables(template):
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
def test_what_python_hides_is_undefined(template):
    assert reference([TALK], chat_template=template)[0] == [""]
    assert render_template(template, TALK, {}) == ""
