"""The quickstart's task: doubling a five-digit number, a byte-level tokenizer, and a Qwen2 model of 92,000 parameters.

    python examples/quickstart/task.py --out runs/quickstart/seed_0/start --seed 0

This script writes a folder that Transformers' `from_pretrained` loads (model and tokenizer) and three disjoint sets of
problems:

    warmup.jsonl    {"messages": [user, assistant]}     demonstrations for supervised fine-tuning
    train.jsonl     {"question": ..., "answer": ...}    prompts for RL; only the reward uses the answers
    heldout.jsonl   {"question": ..., "answer": ...}    prompts that are never trained on

The answer to "2*38471" is "76942". The first digit is 1 to 4, so the answer has as many digits as the number. Each
digit of the answer follows from two of the question: twice the digit in the same column, plus the carry from the column
to the right, which is 1 if that digit is 5 or more.

Most demonstrations are wrong on purpose: seven in ten forget every carry ("66842"). A model that imitates them has seen
how to carry, but rarely does it. The reward then distinguishes right from wrong answers.
"""

import argparse
import json
import random
from pathlib import Path

NUM_HELDOUT, NUM_TRAIN, NUM_WARMUP = 400, 6_400, 4_800
SHARE_OF_DIGITS_THAT_CARRY = 0.25  # about one problem in five then needs no carry: the accuracy after the warm-up
SHARE_OF_CARRIES_DONE_RIGHT = 0.3  # below one half, so that greedy decoding imitates the mistake
PROBLEM_SEED = 0  # assigns problems to the three sets; the same for all training seeds

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["user", "assistant", "system"]  # each is one token; all other text is tokenized by bytes
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '\\n' if not loop.first }}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)  # ChatML without a newline after the last <|im_end|>, so that <|im_end|> is the last token of an answer


def build_tokenizer(folder):
    """Save and return a Qwen2 tokenizer (byte-level BPE) with few merges: "2*38471" is seven tokens.

    For every model of type qwen2, AutoTokenizer uses Qwen2's pre-tokenizer and ignores that of tokenizer.json. So this
    is a Qwen2Tokenizer with another vocabulary.
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
    """Save and return a randomly initialised Qwen2 model that fits the tokenizer in `folder`."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.08,  # the usual 0.02 suits widths in the thousands; at width 64 it slows learning
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
    """Write the three sets. The split does not depend on `seed`; the mistakes and the order of rows do."""
    folder, rng = Path(folder), random.Random(seed)
    heldout, train, warmup = split_problems()
    rng.shuffle(train)
    rng.shuffle(warmup)
    for name, numbers in ("heldout", heldout), ("train", train):
        rows = [{"question": f"2*{number}", "answer": str(2 * number)} for number in numbers]
        write_rows(folder / f"{name}.jsonl", rows)
    demonstrations = []
    for number in warmup:
        answer = 2 * number if rng.random() < SHARE_OF_CARRIES_DONE_RIGHT else double_without_carry(number)
        user, assistant = {"role": "user", "content": f"2*{number}"}, {"role": "assistant", "content": str(answer)}
        demonstrations.append({"messages": [user, assistant]})
    write_rows(folder / "warmup.jsonl", demonstrations)


def split_problems():
    """Return disjoint lists of numbers to double for held-out, training and warm-up."""
    rng, seen = random.Random(PROBLEM_SEED), set()
    while len(seen) < NUM_HELDOUT + NUM_TRAIN + NUM_WARMUP:
        number = rng.randint(1, 4)
        for _ in range(4):
            carries = rng.random() < SHARE_OF_DIGITS_THAT_CARRY
            number = 10 * number + (rng.randint(5, 9) if carries else rng.randint(0, 4))
        seen.add(number)
    numbers = sorted(seen)
    rng.shuffle(numbers)
    return numbers[:NUM_HELDOUT], numbers[NUM_HELDOUT:-NUM_WARMUP], numbers[-NUM_WARMUP:]


def double_without_carry(number):
    """Double column by column and forget every carry: 2*38471 = 66842."""
    return int("".join(str(2 * int(digit) % 10) for digit in str(number)))


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="for the initial weights, the mistakes and the row order")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    build_tokenizer(args.out)
    build_model(args.out, args.seed)
    make_data(args.out, args.seed)
    print(f"model, tokenizer and data are in {args.out}")


if __name__ == "__main__":
    main()
