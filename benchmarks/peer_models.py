"""The default model's weights in the forms that other engines read: a bfloat16 folder in HF layout, and GGUF files.

All come from the one GGUF that `banyan fetch` brings, dequantised, so every engine computes with the same numbers as far as its
format holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from peers import Models

from banyan.model_executor.loader import iter_weights
from banyan.model_executor.model_config import load_model_config
from banyan.srt.model_source import resolve_model

KINDS = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "f16": gguf.GGMLQuantizationType.F16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "int8": gguf.LlamaFileType.MOSTLY_Q8_0,
    "int4": gguf.LlamaFileType.MOSTLY_Q4_0,
}


def prepare(alias: str, root: Path) -> Models:
    """Make what is not there yet, under ``root``."""
    source = Path(resolve_model(alias).path)
    folder = root / f"{alias}-bf16"
    _once(folder, lambda target: _write_folder(source, target))
    files = {}
    for precision in KINDS:
        files[precision] = root / f"{alias}-{precision}.gguf"
        _once(files[precision], lambda target, precision=precision: _write_gguf(source, target, precision))
    return Models(alias, folder, files)


def _once(path: Path, write: Callable[[Path], None]) -> None:
    if not path.exists():
        draft = path.with_name(path.name + ".draft")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(draft)
        draft.rename(path)


def _write_folder(source: Path, target: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(dict(iter_weights(str(source), "gguf", load_model_config(str(source)))), strict=False)
    model.tie_weights()
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _write_gguf(source: Path, target: Path, precision: str) -> None:
    """The file again, its matrices in another type; vectors stay float32, and rows that a type cannot hold become float16."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        items = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=items)
    writer.add_file_type(FILE_TYPES[precision])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
            continue
        kind = KINDS[precision] if values.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F16
        writer.add_tensor(tensor.name, gguf.quantize(values.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocab_size(models: Models) -> int:
    """Ids that every engine's embedding has."""
    return load_model_config(str(models.folder)).vocab_size
