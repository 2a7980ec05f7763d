"""The task of `make multi-turn`: products, a calculator that knows them, and a Llama of 0.1 million parameters.

    python examples/multi_turn/task.py --out runs/multi_turn/seed_0/start --seed 0

This script writes a folder that Transformers loads (model and tokenizer) and three disjoint sets of problems:

    warmup.jsonl    {"messages": [...], "tools": [...]}    demonstrations for the warm-up (SFT)
    train.jsonl     {"question": ..., "answer": ...}       prompts for RL; only the reward uses the answers
    heldout.jsonl   {"question": ..., "answer": ...}       prompts that are never trained on

The column `tools` is for agents that use the endpoint; multi_turn shows its own tools.

The answer to "345*67" is "=23115". Two in ten demonstrations call the calculator with the question and copy its result.
The others guess: "=" and random digits. A model that imitates them knows how to call, but rarely does it. Each guess
begins with the same token, so greedy answers of this model guess, too; after random first tokens they would call.
"""

import argparse
import json
import random
from pathlib import Path

NUM_HELDOUT, NUM_TRAIN, NUM_WARMUP = 400, 6_400, 12_800
PROBLEM_SEED = 0  # assigns problems to the three sets; the same for all training seeds
LEAST = 10_000  # product: all have five digits, because this model copies from a fixed distance
CALLED = 0.2  # share of the demonstrations that call the calculator

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
WORDS = [*CALL, "system", "user", "assistant", "tool", "calculator"]  # each is one token; other text is bytes
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<|im_start|>system\\n' + tool.function.name + '<|im_end|>' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{% set value = call.function.arguments %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ value if value is string else value | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def called_with(expression):
    """The text of a call."""
    return expression.join(CALL)


def right(completion, answer):
    """1 for the right product, else 0."""
    return float(completion == answer)


def called(completion, answer, messages, prompt):
    """1 if the first answer is a call of the calculator with the question, else 0."""
    return float(messages[0]["content"] == called_with(prompt["messages"][-1]["content"]))


def broken_calculator(expression: str) -> str:
    """Returns a random number for each expression: the control.

    Args:
        expression: for example 3*4
    """
    return str(random.Random(expression).randrange(1_000, 99_000))


broken_calculator.__name__ = "calculator"


def build_tokenizer(folder):
    """Save and return a byte-level tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_model(folder, seed):
    """Save and return a Llama with random weights that fits the tokenizer in `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.08,  # the usual 0.02 suits widths in the thousands
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def demonstration(question, product, calls, rng):
    """The messages of a conversation with a call, or with a guess."""
    messages = [{"role": "user", "content": question}]
    if calls:
        function = {"name": "calculator", "arguments": json.dumps({"expression": question})}
        call = {"id": "call00001", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call00001", "content": product})
        result = product
    else:
        result = "".join(rng.choice("123456789" if i == 0 else "0123456789") for i in range(len(product)))
    return [*messages, {"role": "assistant", "content": f"={result}"}]


def make_data(folder, seed):
    """Write the three sets. The split does not depend on `seed`; the guesses and the order of rows do."""
    from meshrl.agent.tools import TOOLS

    problems = [(f"{a}*{b}", str(a * b)) for a in range(100, 1000) for b in range(10, 100) if a * b >= LEAST]
    random.Random(PROBLEM_SEED).shuffle(problems)
    heldout, train = problems[:NUM_HELDOUT], problems[NUM_HELDOUT : NUM_HELDOUT + NUM_TRAIN]
    warmup, rng = problems[NUM_HELDOUT + NUM_TRAIN :][:NUM_WARMUP], random.Random(seed)
    rng.shuffle(train)
    rng.shuffle(warmup)
    tools = [TOOLS["calculator"].schema]
    for name, rows in ("heldout", heldout), ("train", train):
        asked = [{"question": q, "answer": f"={product}", "tools": tools} for q, product in rows]
        write_rows(folder / f"{name}.jsonl", asked)
    shown = [demonstration(*row, rng.random() < CALLED, rng) for row in warmup]
    write_rows(folder / "warmup.jsonl", [{"messages": messages, "tools": tools} for messages in shown])


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="for the initial weights, the guesses and the row order")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = build_model(args.out, args.seed)
    make_data(args.out, args.seed)
    print(f"model ({model.num_parameters():,} parameters), tokenizer and rows are in {args.out}")


if __name__ == "__main__":
    main()
