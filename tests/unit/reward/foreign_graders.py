"""Reward functions as TRL, verl and OpenRLHF call them; loaded by dotted path."""


def trl(prompts, completions, **kwargs):
    return [1.0 for _ in completions]


def trl_with_column(completions, answer, **kwargs):
    return [1.0 for _ in completions]


def openrlhf(queries, prompts, labels):
    return [1.0 for _ in queries]


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos=None):
    return [1.0 for _ in solution_strs]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float((data_source, solution_str, ground_truth, extra_info["index"]) == ("math", "5", "4", 7))}


def verl_number(solution_str, ground_truth, method="strict", num_tokens=0):
    return float(solution_str == ground_truth) if method == "flexible" else float(num_tokens)


async def verl_async(data_source, solution_str, ground_truth, extra_info=None, **rest):
    return {"score": len(rest) + (data_source == "mixture"), "extra_info": extra_info}


def verl_without_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"accuracy": 1.0}
