"""Names of --tool-call-parser and the parser behind each."""

from __future__ import annotations

from .apertus import Apertus2509
from .events import Tools
from .gemma4 import Gemma4
from .harmony import Harmony
from .header_calls import DeepSeekV3, DeepSeekV31, KimiK2
from .json_calls import CohereCommand4, GigaChat3, Hermes, InternS1, Llama3, Mistral, PlainJson
from .minimax_m3 import MiniMaxM3
from .pythonic import Lfm2, Pythonic
from .scan import CallParser
from .xml_calls import DeepSeekV4, DeepSeekV32, Glm45, Hunyuan, MiniCpm5, MiniMaxM2, Qwen3Coder, Step3
from .xtml import KimiK3

TOOL_PARSERS: dict[str, type[CallParser]] = {
    "apertus2509": Apertus2509,
    "cohere_command4": CohereCommand4,
    "deepseekv3": DeepSeekV3,
    "deepseekv31": DeepSeekV31,
    "deepseekv32": DeepSeekV32,
    "deepseekv4": DeepSeekV4,
    "gemma4": Gemma4,
    "gigachat3": GigaChat3,
    "glm": Glm45,
    "glm45": Glm45,
    "glm47": Glm45,
    "gpt-oss": Harmony,
    "hermes": Hermes,
    "hunyuan": Hunyuan,
    "interns1": InternS1,
    "json": PlainJson,
    "kimi_k2": KimiK2,
    "kimi_k3": KimiK3,
    "lfm2": Lfm2,
    "llama3": Llama3,
    "llama4": Pythonic,
    "mimo": Qwen3Coder,
    "minicpm5": MiniCpm5,
    "minimax-m2": MiniMaxM2,
    "minimax-m3": MiniMaxM3,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "qwen": Hermes,
    "qwen25": Hermes,
    "qwen3_coder": Qwen3Coder,
    "step3": Step3,
    "step3p5": Qwen3Coder,
    "trinity": Hermes,
}


def create_parser(name: str, tools: Tools | None = None) -> CallParser:
    """A parser for one answer; tools: those that may be called, None: any. Raises KeyError for an unknown name."""
    return TOOL_PARSERS[name](tools)


_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (  # name -> what a chat template of the format holds; the first that fits
    ("gpt-oss", ("<|channel|>", "<|message|>")),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseekv3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseekv31", ("<｜tool▁call▁begin｜>",)),
    ("deepseekv32", ("<｜DSML｜function_calls>",)),
    ("deepseekv4", ("<｜DSML｜tool_calls>",)),
    ("step3", ("<｜tool_calls_begin｜>", "steptml")),
    ("lfm2", ("<|tool_call_start|>",)),
    ("interns1", ("<|action_start|>", "<|plugin|>")),
    ("cohere_command4", ("<|START_ACTION|>",)),
    ("hunyuan", ("<tool_calls>", "<tool_sep>")),
    ("minicpm5", ("<function name=", "<param name=")),
    ("apertus2509", ("<|tools_prefix|>",)),
    ("gemma4", ("<|tool_call>",)),
    ("minimax-m3", ("]<]minimax[>[",)),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", "parameters")),
)


def parser_for(template: str) -> str | None:
    """The name of the parser for models with this chat template; None if it shows no known format."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)
