"""What fewer bits cost in quality: the perplexity of a text for each form of the weights.

    python benchmarks/perplexity.py
    python benchmarks/perplexity.py --model-path DIR --text FILE --forms bfloat16,int8

The text is cut into pieces of --window tokens, each scored on its own from its second token on. Perplexity is exp of the mean
negative log-probability of a token; the form "gguf" needs a GGUF file. Numbers are comparable only for the same
text, window and model.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from report import environment, number, publish

import banyan
from banyan.managers.errors import BanyanError

PROSE = Path(__file__).parent / "data" / "prose.txt"
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "gguf": {"dtype": "bfloat16", "quantization": "gguf"},
}


def main() -> int:
    args = _arguments()
    facts = environment()
    results: list[dict[str, Any]] = []
    for form in args.forms:
        try:
            results.append({"weights": form} | score(args, FORMS[form]))
        except BanyanError as error:
            print(f"perplexity: error: {form}: {error}", file=sys.stderr)
            return 1
    base = results[0]["perplexity"]
    rows = [[r["weights"], str(r["tokens"]), f"{r['perplexity']:.3f}", f"{r['perplexity'] / base - 1:+.2%}"] for r in results]
    head = ("weights", "tokens", "perplexity", f"against {results[0]['weights']}")
    setting = {"model": args.model_path, "text": args.text.name, "window": number(args.window)}
    publish({"benchmark": "perplexity", "environment": facts, "setting": setting, "results": results}, head, rows, args.json)
    return 0


def score(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Perplexity of the text under one form of the weights."""
    with banyan.Engine(model_path=args.model_path, disable_radix_cache=True, log_level="error", **options) as engine:
        ids = engine.tokenizer_manager.tokenizer.encode(args.text.read_text())
        pieces = [ids[start : start + args.window] for start in range(0, len(ids), args.window)]
        total, count = 0.0, 0
        for piece in (piece for piece in pieces if len(piece) > 1):
            reply: Any = engine.generate(
                input_ids=piece, sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
            )
            logprobs = [entry[0] for entry in reply["meta_info"]["input_token_logprobs"] if entry[0] is not None]
            total, count = total - sum(logprobs), count + len(logprobs)
    return {"tokens": count, "perplexity": math.exp(total / count)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--text", type=Path, default=PROSE)
    parser.add_argument("--window", type=int, default=512, help="tokens that are scored in one piece")
    parser.add_argument("--forms", type=_forms, default=list(FORMS), help=f"of {','.join(FORMS)}")
    parser.add_argument("--json", help="file for everything that was measured")
    return parser.parse_args()


def _forms(text: str) -> list[str]:
    forms = text.split(",")
    if unknown := set(forms) - set(FORMS):
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; known are {', '.join(FORMS)}")
    return forms


if __name__ == "__main__":
    sys.exit(main())
