"""1 for `<think>...</think><answer>...</answer>` and nothing else, else 0."""


def score(response: str, *, in_thought: bool = False, opened: bool = False) -> float:
    """Whether thought and answer are there, once each, in this order, and neither is empty.

    Args:
        in_thought: the prompt opened a thought, with which the response begins.
        opened: the same, if the prompt's last characters do not show it.
    """
    text = f"<think>{response}" if opened or in_thought else response
    outside, inside = list[str](), list[str]()
    for tag in ("think", "answer"):
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return 0.0
    for tag in ("think", "answer"):
        before, _, text = text.partition(f"<{tag}>")
        content, _, text = text.partition(f"</{tag}>")
        outside.append(before)
        inside.append(content)
    return float(all(map(str.strip, inside)) and not any(map(str.strip, [*outside, text])))
