"""How models mark their thinking, by the names of --reasoning-parser."""

from __future__ import annotations

from typing import NamedTuple


class ReasoningMarks(NamedTuple):
    """The texts around the thinking part of an output. Each may be several tokens.

    template_opens: the chat template, or the model's training, opens the thinking part, so that an output begins inside it without
    a start mark. Where it is False, a prompt that ends with the start mark still has opened it.
    """

    start: str
    end: str
    template_opens: bool = False


_THINK = ReasoningMarks("<think>", "</think>")
_OPEN = ReasoningMarks("<think>", "</think>", template_opens=True)

REASONING_MARKS: dict[str, ReasoningMarks] = {
    "deepseek-r1": _OPEN,
    "apertus2509": ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere_command4": ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    "deepseek-v3": _THINK,
    "deepseek-v4": _THINK,
    "gemma4": ReasoningMarks("<|channel>thought\n", "<channel|>"),
    "glm45": _THINK,
    "gpt-oss": ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>", template_opens=True),
    "hunyuan": _THINK,
    "interns1": _THINK,
    "kimi": ReasoningMarks("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    "kimi_k2": _THINK,
    "kimi_k3": ReasoningMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "mimo": _THINK,
    "minimax": _OPEN,
    "minimax-m3": ReasoningMarks("<mm:think>", "</mm:think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "nemotron_3": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _OPEN,
    "step3": _OPEN,
    "step3p5": _OPEN,
}
