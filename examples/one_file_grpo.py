"""GRPO in one file: a language model learns to carry, only from a reward for right answers.

    python examples/one_file_grpo.py            # one CPU core, about half a minute

The task is to double a five-digit number (the answer to "2*38471" is "76942"); the model is a Qwen2 of two layers;
quickstart/task.py makes both. The script runs the two stages of post-training one after the other, in a single process
of plain PyTorch:

1. Warm-up: supervised fine-tuning on demonstrations; most of them forget to carry. The model learns the chat format,
   the digits and the mistake: it answers about one held-out problem in five correctly.
2. GRPO (group relative policy optimization; DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1). For each
   prompt the model samples a group of answers, and a rule grades each as right or wrong. Answers that are better than
   their group's average become more likely, worse ones less likely. There is no teacher and no value network: the
   group is the baseline. Afterwards more than nine held-out problems in ten are answered correctly.

`--shuffle-rewards` is the control: the same run with randomly permuted rewards learns nothing.

Shapes, at the end of names or in comments:
    P prompts of a step   G answers of a prompt (the group)   B rows, P * G of them in GRPO, group by group
    L tokens of a prompt  T tokens of an answer               V vocabulary
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent / "quickstart"))
import task

SFT_STEPS, SFT_ROWS, SFT_LR = 300, 64, 4e-3
GRPO_STEPS, PROMPTS_PER_STEP, GROUP, GRPO_LR = 60, 64, 8, 1e-3
WARMUP_STEPS, FINAL_LR_SHARE = 10, 0.1
MAX_NEW_TOKENS = 6  # an answer is five digits and the end-of-turn token
CLIP = 0.2


# ---------------------------------------------------------------------------------------------------------------------
# Text to tokens


def encode_prompts(tokenizer, questions):
    """Return the chat-formatted questions as token ids [B, L].

    All questions of this task have the same number of tokens, so there is no padding. Prompts of different lengths must
    be padded on the left for sampling, with an attention mask and position ids that skip the padding.
    """
    chats = [[{"role": "user", "content": question}] for question in questions]
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return torch.tensor(ids)


def encode_answers(tokenizer, answers):
    """Return answers as token ids [B, T], padded on the right, and a mask [B, T] of the tokens to learn.

    The mask comes from lengths. A comparison with the pad id would also mask the end-of-turn token if the tokenizer
    uses one id for both, and the model would never learn to stop.
    """
    rows = [[*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id] for answer in answers]
    width = max(len(row) for row in rows)
    ids_BT = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    mask_BT = torch.tensor([[1.0] * len(row) + [0.0] * (width - len(row)) for row in rows])
    return ids_BT, mask_BT


# ---------------------------------------------------------------------------------------------------------------------
# The model is used in two ways: to sample an answer, and to score one


@torch.no_grad()
def sample(model, prompt_ids_BL, eos_id, pad_id, greedy=False):
    """Sample answers. Return ids [B, T], their log-probabilities [B, T] and a mask [B, T] of real tokens.

    Temperature 1 and no top-p or top-k: the trained distribution must be the one that is sampled from, and a filter
    would change the latter. The end-of-turn token is part of the answer; tokens after it are not.
    """
    cache, next_input = None, prompt_ids_BL
    alive_B = torch.ones(len(prompt_ids_BL), dtype=torch.bool)
    ids, logprobs, mask = [], [], []
    for _ in range(MAX_NEW_TOKENS):
        # The first call processes the full prompt, each later call one token: the KV cache has the keys and values of
        # all tokens before.
        out = model(input_ids=next_input, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logprobs_BV = out.logits[:, -1].float().log_softmax(-1)
        chosen_B = logprobs_BV.argmax(-1) if greedy else torch.multinomial(logprobs_BV.exp(), 1).squeeze(-1)
        chosen_B = torch.where(alive_B, chosen_B, pad_id)  # finished rows are padded until the last row has stopped
        ids.append(chosen_B)
        logprobs.append(logprobs_BV.gather(-1, chosen_B[:, None]).squeeze(-1))
        mask.append(alive_B)
        alive_B = alive_B & (chosen_B != eos_id)
        next_input = chosen_B[:, None]
        if not alive_B.any():
            break
    return torch.stack(ids, 1), torch.stack(logprobs, 1), torch.stack(mask, 1).float()


def score(model, prompt_ids_BL, answer_ids_BT):
    """Return log-probabilities [B, T] of given answers, with gradient, by one forward pass over prompt and answer."""
    ids = torch.cat([prompt_ids_BL, answer_ids_BT], dim=1)
    length = answer_ids_BT.shape[1]
    # The logits at position i predict token i + 1. So those at the last position predict a token after the answer, and
    # those at the T positions before it predict the answer.
    logits_BTV = model(input_ids=ids, use_cache=False, logits_to_keep=length + 1).logits[:, :-1]
    return logits_BTV.float().log_softmax(-1).gather(-1, answer_ids_BT[..., None]).squeeze(-1)


# ---------------------------------------------------------------------------------------------------------------------
# GRPO: three short functions


def grade(tokenizer, answer_ids_BT, mask_BT, right_answers_B):
    """Return rewards [B]: 1.0 for a right answer that has ended, else 0.0. Only this function knows the solutions."""
    rewards = []
    for ids, length, right_answer in zip(answer_ids_BT.tolist(), mask_BT.sum(1).int().tolist(), right_answers_B):
        *answer, last = ids[:length]
        # A truncated answer counts as wrong, even if its digits are right so far.
        rewards.append(float(last == tokenizer.eos_token_id and tokenizer.decode(answer) == right_answer))
    return torch.tensor(rewards)


def group_advantages(rewards_B):
    """Return how much better than its group's mean each answer is [B], in units of the group's standard deviation.

    In a group of only right or only wrong answers all advantages are 0, so it contributes no gradient. The epsilon
    prevents 0 / 0, and is large enough not to amplify rounding differences.
    """
    rewards_PG = rewards_B.view(-1, GROUP)
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return (centred_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)).view(-1)


def grpo_loss(logprobs_BT, old_logprobs_BT, advantages_B, mask_BT):
    """Return the clipped policy loss, averaged over the answers' tokens.

    With a single update for each batch of answers the old policy is the current one: the ratio is exactly 1, nothing
    is clipped, and the gradient is the plain policy gradient, advantage * grad log p. The ratio and its clip matter if
    a batch is split into several updates: they keep the later ones close to the old policy.
    """
    ratio_BT = (logprobs_BT - old_logprobs_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - CLIP, 1 + CLIP)
    gain_BT = torch.minimum(ratio_BT * advantages_B[:, None], clipped_BT * advantages_B[:, None])
    # One denominator for the entire batch. With a mean of each answer's mean, tokens of short answers would weigh more.
    return -(gain_BT * mask_BT).sum() / mask_BT.sum()


# ---------------------------------------------------------------------------------------------------------------------
# The two stages, and the evaluation


def make_optimizer(model, lr, weight_decay, num_steps):
    """Return AdamW and a schedule: a short linear warm-up, then a cosine decay to a tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)

    def share_of_lr(step):
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
        return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)


def update(model, optimizer, schedule, loss):
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return norm.item()


def cycle(rows, size):
    """Yield batches of rows for ever: each epoch has every row once, in a new order."""
    pool = []
    while True:
        while len(pool) < size:
            pool += random.sample(rows, len(rows))
        yield pool[:size]
        pool = pool[size:]


def warm_up(model, tokenizer, demonstrations, num_steps):
    """Supervised fine-tuning: maximize the likelihood of the demonstrated answers."""
    optimizer, schedule = make_optimizer(model, SFT_LR, 0.01, num_steps)
    batches = cycle(demonstrations, SFT_ROWS)
    for step in range(1, num_steps + 1):
        chats_B = [row["messages"] for row in next(batches)]
        prompt_ids_BL = encode_prompts(tokenizer, [user["content"] for user, _ in chats_B])
        answer_ids_BT, mask_BT = encode_answers(tokenizer, [assistant["content"] for _, assistant in chats_B])
        loss = -(score(model, prompt_ids_BL, answer_ids_BT) * mask_BT).sum() / mask_BT.sum()
        update(model, optimizer, schedule, loss)
        if step % 100 == 0:
            print(f"warm-up {step:4d}/{num_steps}   loss {loss.item():.3f}")


def grpo(model, tokenizer, problems, num_steps, shuffle_rewards=False):
    """In each step: sample, grade, compare within the group, update."""
    optimizer, schedule = make_optimizer(model, GRPO_LR, 0.0, num_steps)
    batches = cycle(problems, PROMPTS_PER_STEP)
    for step in range(1, num_steps + 1):
        problems_P = next(batches)
        prompt_ids_PL = encode_prompts(tokenizer, [problem["question"] for problem in problems_P])
        prompt_ids_BL = prompt_ids_PL.repeat_interleave(GROUP, dim=0)
        answer_ids_BT, sampled_logprobs_BT, mask_BT = sample(
            model, prompt_ids_BL, tokenizer.eos_token_id, tokenizer.pad_token_id
        )
        right_answers_B = [problem["answer"] for problem in problems_P for _ in range(GROUP)]
        rewards_B = grade(tokenizer, answer_ids_BT, mask_BT, right_answers_B)
        mean_reward = rewards_B.mean().item()
        if shuffle_rewards:
            rewards_B = rewards_B[torch.randperm(len(rewards_B))]
        advantages_B = group_advantages(rewards_B)

        logprobs_BT = score(model, prompt_ids_BL, answer_ids_BT)
        loss = grpo_loss(logprobs_BT, logprobs_BT.detach(), advantages_B, mask_BT)
        norm = update(model, optimizer, schedule, loss)

        # Sampler and trainer compute with the same weights in different ways (one token at a time with a KV cache, and
        # all tokens at once). If they differed, the trained policy would not be the one that was sampled, and the
        # reward would still look plausible for a while: always monitor this number.
        disagreement = ((logprobs_BT.detach() - sampled_logprobs_BT) * mask_BT).abs().max().item()
        if step % 10 == 0 or step == 1:
            useful = (advantages_B.view(-1, GROUP) != 0).any(dim=1).float().mean().item()
            print(
                f"grpo {step:4d}/{num_steps}   reward {mean_reward:.3f}   groups that teach {useful:.2f}   "
                f"grad norm {norm:.2f}   sampler vs trainer {disagreement:.0e}"
            )


def accuracy(model, tokenizer, problems):
    """Return the share of problems that greedy answers solve."""
    prompt_ids_BL = encode_prompts(tokenizer, [problem["question"] for problem in problems])
    ids_BT, _, mask_BT = sample(model, prompt_ids_BL, tokenizer.eos_token_id, tokenizer.pad_token_id, greedy=True)
    return grade(tokenizer, ids_BT, mask_BT, [problem["answer"] for problem in problems]).mean().item()


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="for the initial weights, the data order and the sampling")
    parser.add_argument("--steps", type=int, default=GRPO_STEPS, help="GRPO updates")
    parser.add_argument("--sft-steps", type=int, default=SFT_STEPS, help="warm-up updates")
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: randomly permuted rewards")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the matrices are too small for several threads
    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        task.build_tokenizer(folder)
        task.build_model(folder, args.seed)
        task.make_data(folder, args.seed)
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        demonstrations, problems, heldout = (read_rows(folder / f"{n}.jsonl") for n in ("warmup", "train", "heldout"))
    torch.manual_seed(args.seed)

    start = time.process_time()
    warm_up(model, tokenizer, demonstrations, args.sft_steps)
    sft_done = time.process_time()
    before = accuracy(model, tokenizer, heldout)
    print(f"held-out accuracy after warm-up: {before:.3f} ({len(heldout)} problems)")
    grpo(model, tokenizer, problems, args.steps, args.shuffle_rewards)
    after = accuracy(model, tokenizer, heldout)
    print(f"held-out accuracy after GRPO:    {after:.3f}")
    end = time.process_time()
    print(
        f"seed {args.seed}{' shuffled rewards' if args.shuffle_rewards else ''}: {before:.3f} -> {after:.3f}, "
        f"CPU seconds: warm-up {sft_done - start:.0f}, GRPO {end - sft_done:.0f}"
    )


if __name__ == "__main__":
    main()
