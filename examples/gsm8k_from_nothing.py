"""Make a model that can begin to learn GSM8K: tokenizer and random weights here, then a warm-up by `meshrl sft`.

    python examples/data_preprocess/gsm8k.py                                    # runs/gsm8k/{train,test}.jsonl
    python examples/gsm8k_from_nothing.py                                       # runs/gsm8k/start
    meshrl sft examples/grpo_trainer/config/gsm8k_sft_from_nothing.yaml         # runs/gsm8k/sft/checkpoints/...
    meshrl train examples/grpo_trainer/config/gsm8k_tiny_cpu.yaml

This script writes a folder that Transformers' `from_pretrained` loads. The folder also contains

    warmup.jsonl    {"messages": [user, assistant]}     the training split's questions with their worked solutions

The model is a Qwen2 of 5.2 M parameters with a byte-level BPE of 2,048 entries, trained on the training split. It is
too small for good arithmetic, but trains on two CPU cores, and its answers have the length and the form of real ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 2048
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/gsm8k"), help="folder with train.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k/start"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    args = parser.parse_args()
    build(args.data, args.out, args.seed)


def build(data: Path, out: Path, seed: int = 0, vocab_size: int = VOCAB_SIZE, **shape: int) -> None:
    """Write tokenizer, model and warmup.jsonl into `out`. shape: fields of Qwen2Config that override SHAPE."""
    with (data / "train.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer((row[key] for row in rows for key in ("question", "answer")), vocab_size)
    tokenizer.save_pretrained(out)
    model = build_model(tokenizer, seed, {**SHAPE, **shape})
    model.save_pretrained(out)
    with (out / "warmup.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            roles = {"user": row["question"], "assistant": row["answer"]}
            messages = [{"role": role, "content": text} for role, text in roles.items()]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    print(f"{out}: Qwen2 of {model.num_parameters():,} parameters, vocabulary of {len(tokenizer):,}")
    print(f"{out}/warmup.jsonl: {len(rows):,} rows")


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A Qwen2Tokenizer with a byte-level BPE that is trained on `texts`. Each digit is a separate token.

    For every model of type qwen2, AutoTokenizer uses Qwen2's normalizer and pre-tokenizer and ignores those of
    tokenizer.json. So the merges are learned with these, and the tokenizer is a Qwen2Tokenizer with a new vocabulary.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer
    from transformers import Qwen2Tokenizer

    qwen2 = Qwen2Tokenizer().backend_tokenizer
    core = Tokenizer(BPE())
    core.normalizer, core.pre_tokenizer = qwen2.normalizer, qwen2.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    learned = json.loads(core.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
        model_max_length=SHAPE["max_position_embeddings"],
    )


def build_model(tokenizer: Any, seed: int, shape: dict[str, int]) -> Any:
    """A randomly initialised Qwen2 that fits the tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **shape,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,  # a separate output matrix would be a tenth of the model
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config)


if __name__ == "__main__":
    main()
