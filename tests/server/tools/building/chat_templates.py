# ruff: noqa: E501 - templates stand as their authors wrote them
"""Chat templates as models bring them, written out from their cards, and what transformers makes of them.

`expected.json` holds what transformers 5.24.0 renders and encodes. To write it anew, in an environment with
`transformers`:

    python -m tests.server.tools.building.chat_templates
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EXPECTED = Path(__file__).with_name("chats") / "expected.json"
SPECIAL = (
    *(
        "<|endoftext|>",
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<bos>",
        "<start_of_turn>",
        "<end_of_turn>",
    ),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
)

_CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
    "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}"
    "{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + "
    "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_LLAMA_31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == "
    "'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles "
    "are supported!') }}{% endif %}{% endfor %}"
)
_ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
    "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
_PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + "
    "'<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TULU = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + "
    "message['content'] + '\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + "
    "eos_token + '\n' }}{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
_MARKED = (
    "{%- for message in messages %}{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}{%- else %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_TOOLS = """{%- set ns = namespace(turns=0) %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant\\n' }}
        {% generation %}
        {%- for tool_call in message.tool_calls %}
            {{- '<tool_call>\\n' + tool_call.function | tojson + '\\n</tool_call>' }}
            {%- if loop.last %}{% break %}{% endif %}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {% endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set ns.turns = ns.turns + 1 %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{- message.content ~ ' (' ~ ns.turns ~ ')<|im_end|>' }}
        {% endgeneration %}{{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""

# Of each template the tokens that its tokenizer_config.json names.
_S = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES: dict[str, tuple[str, dict[str, str]]] = {
    "ChatML": (_CHATML, {"eos_token": "<|im_end|>"}),
    "Llama 2": (_LLAMA_2, _S),
    "Llama 3": (_LLAMA_3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "Llama 3.1": (_LLAMA_31, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "Mistral": (_MISTRAL, _S),
    "Zephyr": (_ZEPHYR, _S),
    "Gemma": (_GEMMA, {"bos_token": "<bos>", "eos_token": "</s>"}),
    "Phi 3": (_PHI_3, {"bos_token": "<s>", "eos_token": "<|endoftext|>"}),
    "SmolLM": (_SMOL, {"eos_token": "<|im_end|>"}),
    "Tulu": (_TULU, {"bos_token": "<s>", "eos_token": "</s>"}),
    "marked": (_MARKED, {"eos_token": "<|im_end|>"}),
    "tools": (_TOOLS, {"eos_token": "<|im_end|>"}),
}
_USER = {"role": "user", "content": "What is 2 + 2?"}
_RESPONSE = {"role": "assistant", "content": "It is 4.\n\n  Grüße \U0001f986 <b>&\"'"}
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "ü <"}}}
CHATS: list[list[dict[str, Any]]] = [
    [_USER, _RESPONSE],
    [_USER, _RESPONSE, {"role": "user", "content": " And 世界? "}, {"role": "assistant", "content": "42 "}],
    [{"role": "system", "content": "Be brief."}, _USER, _RESPONSE],
    [_USER],
    [
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "content": "4"},
        _RESPONSE,
    ],
    [_RESPONSE, _USER],
]


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer without merges, which no training can change."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: number for number, each in enumerate(letters)}, [("I", "t")][:0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def by_transformers(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the texts, ids and masks that transformers makes of all templates and chats."""
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found,unused-ignore]

    found: dict[str, list[dict[str, Any]]] = {}
    for name, (template, tokens) in TEMPLATES.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(write_tokenizer(folder)), **tokens)
        tokenizer.chat_template = template
        found[name] = []
        for chat in CHATS:
            try:
                marked = "{% generation %}" in template
                its = tokenizer.apply_chat_template(
                    chat, return_dict=True, return_assistant_tokens_mask=marked
                )
                text = tokenizer.apply_chat_template(chat, tokenize=False)
                found[name].append(
                    {"text": text, "ids": its["input_ids"], "mask": its.get("assistant_masks")}
                )
            except Exception as error:  # noqa: BLE001 - a template may fail in any way
                found[name].append({"error": str(error)})
    return found


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        EXPECTED.write_text(json.dumps(by_transformers(Path(made)), indent=1) + "\n")
