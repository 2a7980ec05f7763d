"""The quickstart's world: three-digit sums, a byte-level tokenizer, and a Qwen2 model of 92,000 parameters.

    python examples/quickstart/task.py --out runs/quickstart --seed 0

writes a folder that Transformers' `from_pretrained` loads (model and tokenizer) and three disjoint sets of problems:

    warmup.jsonl    {"messages": [user, assistant]}     demonstrations for supervised fine-tuning
    train.jsonl     {"question": ..., "answer": ...}    prompts for RL, whose answers only the reward sees
    heldout.jsonl   {"question": ..., "answer": ...}    prompts that no training ever sees

Answers are written units first, the way one adds on paper: 347 + 586 = 933 is asked as "347+586" and answered "339".
A model that writes left to right can then carry from the digit it has just written.

The demonstrations are sloppy on purpose, as text from the web is: three in five need no carry, and of the others more
than half forget every carry. A model that imitates them has seen how to carry, and mostly doesn't. The reward is what
tells right from wrong.
"""

import argparse
import json
import random
from pathlib import Path

NUM_HELDOUT, NUM_TRAIN, NUM_WARMUP = 400, 12_800, 32_000
SHARE_OF_CARRY_PROBLEMS_KEPT = 0.1  # in warm-up only: two in five of the demonstrations have a carry, not 87 in 100
SHARE_OF_CARRIES_DONE_RIGHT = 0.37  # below one half, so that greedy decoding imitates the mistake
PROBLEM_SEED = 0  # fixes which problem lies in which set, for all training seeds alike

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["user", "assistant", "system"]  # the only ones with a token of their own; all else is bytes
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '\\n' if not loop.first }}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)  # ChatML, but nothing follows the last <|im_end|>: it ends an answer, and is the last token to be learned


def build_tokenizer(folder):
    """Save Qwen2's tokenizer (byte-level BPE) with hardly any merges: "347+586" is seven tokens. Return it.

    AutoTokenizer builds Qwen2's pre-tokenizer for every model of type qwen2, whatever tokenizer.json says; so this is
    a Qwen2Tokenizer too, with another vocabulary.
    """
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    merges = [(word[:i], word[i]) for word in WORDS for i in range(1, len(word))]
    tokens = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=64,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_model(folder, seed):
    """Save a randomly initialised Qwen2 model that fits the tokenizer in `folder`; return it."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.08,  # the usual 0.02 is for widths in the thousands; at width 64 it learns markedly slower
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return model


def make_data(folder, seed):
    """Write the three sets. Problems are split once and for all; `seed` sets the mistakes and the order of rows."""
    folder, rng = Path(folder), random.Random(seed)
    heldout, train, warmup = split_problems()
    rng.shuffle(train)
    rng.shuffle(warmup)
    for name, problems in ("heldout", heldout), ("train", train):
        rows = [{"question": f"{a}+{b}", "answer": units_first(a + b)} for a, b in problems]
        write_rows(folder / f"{name}.jsonl", rows)
    demonstrations = []
    for a, b in warmup:
        answer = a + b if rng.random() < SHARE_OF_CARRIES_DONE_RIGHT else sum_without_carry(a, b)
        user, assistant = {"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": units_first(answer)}
        demonstrations.append({"messages": [user, assistant]})
    write_rows(folder / "warmup.jsonl", demonstrations)


def split_problems():
    """Return disjoint lists of (a, b) for held-out, training and warm-up; a+b and b+a count as one problem."""
    rng, seen = random.Random(PROBLEM_SEED), set()
    heldout, train, warmup = [], [], []
    while len(warmup) < NUM_WARMUP:
        problem = rng.randint(100, 999), rng.randint(100, 999)
        if tuple(sorted(problem)) in seen:
            continue
        seen.add(tuple(sorted(problem)))
        if len(heldout) < NUM_HELDOUT:
            heldout.append(problem)
        elif len(train) < NUM_TRAIN:
            train.append(problem)
        elif not has_carry(*problem) or rng.random() < SHARE_OF_CARRY_PROBLEMS_KEPT:
            warmup.append(problem)
    return heldout, train, warmup


def has_carry(a, b):
    return sum_without_carry(a, b) != a + b


def sum_without_carry(a, b):
    """Add column by column and forget every carry: 347 + 586 = 823, and 500 + 700 = 200."""
    return sum((a // place % 10 + b // place % 10) % 10 * place for place in (1, 10, 100))


def units_first(number):
    """Write a sum units first and with all its columns: 933 is "339", and 500 + 700 without its carry is "002"."""
    return f"{number:03d}"[::-1]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights, the mistakes and the row order")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    build_tokenizer(args.out)
    build_model(args.out, args.seed)
    make_data(args.out, args.seed)
    print(f"model, tokenizer and data are in {args.out}")


if __name__ == "__main__":
    main()
