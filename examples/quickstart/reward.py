"""The quickstart's reward. Any function of the answer's text will do: grpo.yaml names this one by its dotted path."""


def right(completion: str, answer: str) -> float:
    """1.0 for exactly the expected digits, else 0.0."""
    return float(completion == answer)
