"""Chat templates for models whose tokenizer has none, or none with tools: data.chat_template names them."""

BUILT_IN = {  # name in data.chat_template -> template
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "chatml_tools": """\
{%- set first = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools -%}
<|im_start|>system
{{ first + '\n\n' if first }}You may call these functions, each given as a JSON schema:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>

For each call, write a JSON object with the function's name and its arguments between these tags:
<tool_call>
{"name": "FUNCTION", "arguments": {"ARGUMENT": VALUE}}
</tool_call><|im_end|>
{% endif -%}
{%- for message in (messages[1:] if tools and first else messages) -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson -%}
{{ '\n' if message.content or not loop.first }}<tool_call>
{"name": {{ call.name | tojson }}, "arguments": {{ arguments }}}
</tool_call>
{%- endfor -%}{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}""",
}
