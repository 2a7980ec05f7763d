"""The task of `make vlm`: counting the red figures in a drawing, and a LLaVA model of 0.3 million parameters.

    python examples/vlm/task.py --out runs/vlm/seed_0/start --seed 0

This script writes a folder that Transformers loads (model, tokenizer and image processor), drawings of 32 x 32 pixels
as PNG files, and rows of questions about them:

    warmup.jsonl    {"messages": [user, assistant], "images": [...]}    for the warm-up (SFT); most answers are wrong
    train.jsonl     {"question": ..., "answer": ..., "images": [...]}   prompts for RL; only the reward uses the answers
    heldout.jsonl   as train.jsonl: drawings that are never trained on
    blank.jsonl     the questions of heldout.jsonl with one black image, which no model can answer

A drawing has 4 x 4 cells, each as large as a patch of the vision tower. A cell is empty or has a figure (a square or a
disc) in red, green or blue. The question "red?" asks for the number of red figures, 0 to 4, each of which is
the answer to a fifth of the questions.
"""

import argparse
import json
import random
from pathlib import Path

NUM_HELDOUT, NUM_TRAIN, NUM_WARMUP = 400, 6_400, 1_920
DRAWING_SEED = 0  # of the drawings and their split into sets; the same for all training seeds
CELL, CELLS = 8, 4  # pixels of a cell's side, cells of a drawing's side
COLOURS = {"green": (40, 200, 60), "blue": (50, 80, 240), "red": (230, 40, 40)}  # merges of "red" come after "green"
MOST, MOST_OTHERS = 4, 2  # red figures, and figures of each other colour
GUESSED = 0.7  # share of the warm-up's answers that are random numbers; a fifth of these are right
SHAPES = ("rectangle", "ellipse")

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]
WORDS = ["user", "assistant", *COLOURS]  # each is one token; all other text is tokenized by bytes
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_processor(folder):
    """Save a byte-level tokenizer and an image processor; returns the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlavaImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    merges = [(word[:i], word[i]) for word in WORDS for i in range(1, len(word))]
    tokens = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<image>"],
        chat_template=CHAT_TEMPLATE,
    )
    side = {"height": CELL * CELLS, "width": CELL * CELLS}
    images = LlavaImageProcessorPil(
        size=side, crop_size=side, do_convert_rgb=False, image_mean=[0.5] * 3, image_std=[0.25] * 3
    )
    processor = LlavaProcessor(
        images, tokenizer, patch_size=CELL, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    processor.save_pretrained(folder)
    return tokenizer


def build_model(folder, seed):
    """Save a model with random weights that fits the tokenizer and the image processor in `folder`."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    tokenizer = build_processor(folder)
    usual = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.06}  # 0.02 learns half as fast
    vision = {"hidden_size": 64, "intermediate_size": 128, "image_size": CELL * CELLS, "patch_size": CELL}
    text = {"hidden_size": 96, "intermediate_size": 192, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **usual, **vision},
        text_config={"model_type": "qwen2", "num_key_value_heads": 4, **usual, **text},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.06,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = config.eos_token_id, 0
    model.save_pretrained(folder)
    return model


def drawing(counts, rng):
    """A drawing with so many figures of each colour."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), (20, 20, 20))
    draw = ImageDraw.Draw(image)
    colours = [COLOURS[name] for name, count in counts.items() for _ in range(count)]
    for place, colour in zip(rng.sample(range(CELLS**2), len(colours)), colours, strict=True):
        x, y = CELL * (place % CELLS), CELL * (place // CELLS)
        getattr(draw, rng.choice(SHAPES))((x + 1, y + 1, x + CELL - 2, y + CELL - 2), fill=colour)
    return image


def make_data(folder, seed):
    """Write the drawings and the rows. `seed`: of the order of the rows."""
    from PIL import Image

    images, rng, rows = folder / "images", random.Random(DRAWING_SEED), []
    images.mkdir()
    Image.new("RGB", (CELL * CELLS, CELL * CELLS), "black").save(images / "black.png")
    seen = set()
    while len(rows) < NUM_HELDOUT + NUM_TRAIN + NUM_WARMUP:
        counts = {name: rng.randint(0, MOST if name == "red" else MOST_OTHERS) for name in COLOURS}
        image, name = drawing(counts, rng), f"images/{len(rows):05}.png"
        if image.tobytes() in seen:  # no drawing is in two sets
            continue
        seen.add(image.tobytes())
        image.save(folder / name)
        rows.append({"question": "red?", "answer": str(counts["red"]), "images": [name]})
    heldout, train, warmup = rows[:NUM_HELDOUT], rows[NUM_HELDOUT:-NUM_WARMUP], rows[-NUM_WARMUP:]
    for order in (train, warmup):
        random.Random(seed).shuffle(order)
    write_rows(folder / "heldout.jsonl", heldout)
    write_rows(folder / "blank.jsonl", [{**row, "images": ["images/black.png"]} for row in heldout])
    write_rows(folder / "train.jsonl", train)
    for row in warmup:
        right, guess = row.pop("answer"), str(rng.randint(0, MOST))
        answer = guess if rng.random() < GUESSED else right
        user, assistant = (("user", row.pop("question")), ("assistant", answer))
        row["messages"] = [{"role": role, "content": content} for role, content in (user, assistant)]
    write_rows(folder / "warmup.jsonl", warmup)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="for the initial weights and the row order")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = build_model(args.out, args.seed)
    make_data(args.out, args.seed)
    print(f"model ({model.num_parameters():,} parameters), drawings and rows are in {args.out}")


if __name__ == "__main__":
    main()
