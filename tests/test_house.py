"""The rules of the house: what the structure of the code must obey. import-linter checks the floors; this checks the rest."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import banyan

ROOT = Path(banyan.__file__).parent
FLOORS = ("lang", "srt", "managers", "model_executor", "layers", "mem_cache")
OUTSIDE = ("tests", "benchmarks", "docs", "examples", "build", "dist", "deploy")

MAX_FILE_LINES = 450
MAX_CLASS_ATTRIBUTES = 15
LONG_FILES = {"srt/server_args.py", "srt/openai/protocol.py"}  # the options table and the protocol models
WIDE_CLASSES = {  # plain descriptions of something outside: an options table, wire models, a model's config, a request
    "ServerArgs",
    "ModelConfig",
    "SamplingParams",
    "SchedulerConfig",
    "GenerateInput",
    "RequestPlan",
    "GenerateReq",
    "TokenizerManagerConfig",
    "RunnerConfig",
    "LiveTable",
    "Req",
}
TORCH_FILES = re.compile(
    r"layers/(?!rng\.py|sampling_input\.py|late_mask\.py|rank_spec\.py|logprob_input\.py|__init__\.py)|mem_cache/kv_pool\.py|model_executor/"
)
TORCH_FREE_MODEL_EXECUTOR = {
    "step",
    "worker",
    "factory",
    "oracle",
    "model_config",
    "gguf_file",
    "gguf_config",
    "gguf_quants",
}


def sources() -> list[Path]:
    files = [path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")]
    return sorted(files + list(ROOT.glob("*.py")))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Fields declared in the body and attributes assigned to self anywhere in the class; class constants do not count."""
    declared = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and "ClassVar" not in ast.unparse(item.annotation)
    }
    stores = (item for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store))
    return declared | {item.attr for item in stores if isinstance(item.value, ast.Name) and item.value.id == "self"}


def test_packages_are_the_folders() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"banyan"} | {
        "banyan." + path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for floor in FLOORS
        for path in (ROOT / floor).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(found)


def test_top_level_is_fixed() -> None:
    found = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith((".", "_")) and not path.name.endswith(".egg-info")
    }
    assert found <= {*FLOORS, *OUTSIDE}


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_file_obeys_the_house(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert name_of(path) in LONG_FILES or text.count("\n") <= MAX_FILE_LINES
    assert ast.get_docstring(tree), "a module says what it is for"
    assert not {"pickle", "cloudpickle", "dill", "shelve", "marshal"} & set(imports_of(tree))
    assert "trust_remote_code=True" not in text
    if not TORCH_FILES.match(name_of(path)):
        assert not {"torch", "transformers"} & {module.split(".")[0] for module in imports_of(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name not in WIDE_CLASSES and "protocol" not in path.name:
            assert len(attributes_of(node)) <= MAX_CLASS_ATTRIBUTES, node.name
    if path.name == "__init__.py" and path.parent != ROOT:
        assert all(isinstance(node, ast.Expr) for node in tree.body), "folders' __init__ hold a docstring at most"
    assert not {"utils", "common", "helpers"} & {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}


def test_scheduler_has_no_base_class() -> None:
    tree = ast.parse((ROOT / "managers" / "scheduler.py").read_text())
    (scheduler,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Scheduler"]
    assert not scheduler.bases


def test_the_loops_are_small_enough_to_read_aloud() -> None:
    tree = ast.parse((ROOT / "managers" / "event_loop.py").read_text())
    turns = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "turn"]
    assert len(turns) >= 2
    assert all((node.end_lineno or 0) - node.lineno < 15 for node in turns)


def test_torch_is_never_loaded_where_it_must_not_be() -> None:
    """Every module of the torch-free floors imports in a process in which torch and transformers cannot be imported."""
    modules = []
    for path in sources():
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] in ("__main__", "__init__") or parts[0] in ("conftest", "version"):
            continue
        free = parts[0] in ("mem_cache", "managers", "srt", "lang") and parts[-1] != "kv_pool"
        free |= parts[0] == "model_executor" and parts[-1] in TORCH_FREE_MODEL_EXECUTOR
        free |= parts[0] == "layers" and parts[-1] in ("rng", "sampling_input", "late_mask", "logprob_input")
        free &= not parts[-1].startswith("ray_") or find_spec("ray") is not None  # Ray is an extra
        if free:
            modules.append("banyan." + ".".join(parts))
    code = (
        "import importlib, sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"for module in {modules!r}: importlib.import_module(module)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_public_names_exist() -> None:
    for name in banyan.__all__:
        assert getattr(banyan, name) is not None
    with pytest.raises(AttributeError):
        banyan.no_such_name  # noqa: B018


def test_version_is_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[?{re.escape(banyan.__version__)}\]?", changelog, re.MULTILINE)
    assert importlib.import_module("banyan.version").__version__ == banyan.__version__


def test_one_command_each() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("dev", "serve", "check", "test", "bench"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
