"""The quickstart's reward. Any function of the answer's text works; grpo.yaml names this one by its dotted path."""


def right(completion: str, answer: str) -> float:
    """1.0 if the completion is exactly the expected digits, else 0.0."""
    return float(completion == answer)
