"""A byte-level BPE tokenizer of a few hundred tokens with a chat template, built in memory.

It is byte level, so that decoding is exact. It has a few merges, so that one text has several encodings, and a
post-processor that adds BOS to every plain call, as Llama's does.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing

SPECIALS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
MERGES = [("a", "b"), ("1", "2"), ("Ċ", "Ċ")]  # Ċ is byte level's newline

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHOWS_TOOLS = "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}" + CHATML
# Drops the thinking of every assistant message but the last message, as Qwen3 and DeepSeek-R1 do.
DROPS_THINKING = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in m.content %}{{ m.content.split('</think>')[1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes an empty thinking block if thinking is switched off, as Qwen3 does.
THINKING = (
    "{% set block = '' if enable_thinking | default(true) else '<think></think>' %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ block if m.role == 'assistant' else '' }}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ block }}{% endif %}"
)


def tiny_tokenizer(template: str | None = CHATML, eos: str = "<|im_end|>", pad: str = "<|endoftext|>") -> Any:
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *letters, *(a + b for a, b in MERGES)])}
    core = Tokenizer(BPE(vocab=vocab, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    core.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", vocab["<|bos|>"])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|bos|>",
        eos_token=eos,
        pad_token=pad,
        additional_special_tokens=[t for t in SPECIALS if t not in ("<|bos|>", eos, pad)],
    )
    tokenizer.chat_template = template
    return tokenizer


def numbered_tokenizer(num_ids: int) -> Any:
    """The text of id 7 is "<7>", and so on: a text shows its ids, and most tokens have several characters."""
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({f"<{i}>": i for i in range(num_ids)}, unk_token="<0>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def sentencepiece_tokenizer() -> Any:
    """Like Llama 2's: a space belongs to the word after it and is dropped at the start of a text. Characters that the
    vocabulary lacks, such as a newline, are encoded byte by byte."""
    from transformers import PreTrainedTokenizerFast

    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b", "ab", "▁the", "▁▁"]
    core = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)
