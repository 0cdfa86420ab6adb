"""Block-quantised GGUF tensors to float32, by numpy.

Each type is a record dtype as the GGUF specification lays the block out; a decoder turns n records into (n, block) floats. The
order of the multiplications is that of ggml's reference C code, so results agree bit for bit. Rarer types go through the gguf
package.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Records = npt.NDArray[np.void]

# id in the file -> (name, weights per block, bytes per block). Ids missing here are looked up in the gguf package.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
CHUNK = 1 << 18  # weights decoded at a time: the temporaries stay in cache


class GGUFError(ValueError):
    """A GGUF file that is damaged, or uses something that is not supported. The message is one line and names the file."""


def tensor_type(type_id: int) -> tuple[str, int, int]:
    """(name, weights per block, bytes per block) of a type id. Raises GGUFError where no one knows it."""
    if type_id in TYPES:
        return TYPES[type_id]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_id)
        block, nbytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise GGUFError(f"unknown tensor type {type_id}") from None
    return str(kind.name), int(block), int(nbytes)


def block_size(type_name: str) -> int:
    """Weights per block of a type."""
    for name, block, _ in TYPES.values():
        if name == type_name:
            return block
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return int(GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][0])


def dequantize(data: npt.NDArray[np.uint8], type_name: str) -> Floats:
    """Decode the bytes of a tensor (1-D, whole blocks) to a flat float32 array of its own memory."""
    if type_name == "F32":
        return data.view("<f4").astype(np.float32)
    if type_name == "F16":
        return data.view("<f2").astype(np.float32)
    if type_name == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if type_name not in _DECODERS:
        return _rare(data, type_name)
    layout, decode = _DECODERS[type_name]
    blocks = data.view(layout)
    size = QK if layout.itemsize > 100 else 32
    out = np.empty((len(blocks), size), np.float32)
    step = CHUNK // size
    for start in range(0, len(blocks), step):
        decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(-1)


def _rare(data: npt.NDArray[np.uint8], type_name: str) -> Floats:
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    try:
        out: Floats = np.asarray(quants.dequantize(data, GGMLQuantizationType[type_name]), np.float32)
    except (KeyError, NotImplementedError):
        raise GGUFError(f"tensors of type {type_name} are not supported") from None
    return out.reshape(-1)


QK = 256  # weights in a super-block of the K types


def _scale(field: npt.NDArray[np.float16]) -> Floats:
    return field.astype(np.float32)[:, None]


def _nibbles(qs: npt.NDArray[np.uint8], group: int) -> npt.NDArray[np.uint8]:
    """Bytes [n, k * group] to 4-bit values [n, k, 2, group]: a group's low halves, then its high halves."""
    grouped = qs.reshape(len(qs), -1, 1, group)
    return np.concatenate((grouped & 15, grouped >> 4), axis=2)


def _fifth_bits(qh: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Bytes [n, 4], bit j belonging to weight j, to 0 or 16 as [n, 32]."""
    return np.unpackbits(np.ascontiguousarray(qh), axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: Records, out: Floats) -> None:
    np.multiply(_nibbles(b["qs"], 16).reshape(out.shape).astype(np.float32) - 8, _scale(b["d"]), out=out)


def _q4_1(b: Records, out: Floats) -> None:
    np.multiply(_nibbles(b["qs"], 16).reshape(out.shape), _scale(b["d"]), out=out)
    out += _scale(b["m"])


def _q5_0(b: Records, out: Floats) -> None:
    q = _nibbles(b["qs"], 16).reshape(out.shape) | _fifth_bits(b["qh"])
    np.multiply(q.astype(np.float32) - 16, _scale(b["d"]), out=out)


def _q5_1(b: Records, out: Floats) -> None:
    np.multiply(_nibbles(b["qs"], 16).reshape(out.shape) | _fifth_bits(b["qh"]), _scale(b["d"]), out=out)
    out += _scale(b["m"])


def _q8_0(b: Records, out: Floats) -> None:
    np.multiply(b["qs"], _scale(b["d"]), out=out)


def _k_scales(b: Records) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 sub-blocks, [n, 8, 1] each, from 12 bytes of packed 6-bit numbers.

    The first four sub-blocks have theirs in the low 6 bits of bytes 0-3 (scales) and 4-7 (minima); those of the last four are
    split: 4 bits in bytes 8-11, the upper 2 in the top bits of bytes 0-7.
    """
    p = b["scales"]
    first, mins, rest = p[:, 0:4], p[:, 4:8], p[:, 8:12]
    sc = np.concatenate((first & 63, rest & 15 | first >> 6 << 4), axis=1)
    mn = np.concatenate((mins & 63, rest >> 4 | mins >> 6 << 4), axis=1)
    return (_scale(b["d"]) * sc)[:, :, None], (_scale(b["dmin"]) * mn)[:, :, None]


def _q4_k(b: Records, out: Floats) -> None:
    scales, mins = _k_scales(b)
    view = out.reshape(len(b), 8, 32)
    np.multiply(_nibbles(b["qs"], 32).reshape(view.shape), scales, out=view)
    view -= mins


def _q5_k(b: Records, out: Floats) -> None:
    scales, mins = _k_scales(b)
    view = out.reshape(len(b), 8, 32)
    bits = np.arange(8, dtype=np.uint8)[None, :, None]  # bit s of byte j belongs to weight j of sub-block s
    q = _nibbles(b["qs"], 32).reshape(view.shape) | (b["qh"][:, None, :] >> bits & 1) << 4
    np.multiply(q, scales, out=view)
    view -= mins


def _q6_k(b: Records, out: Floats) -> None:
    pairs = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]  # upper 2 bits: four weights to a byte
    high = b["qh"].reshape(len(b), 2, 1, 32) >> pairs & 3
    q = _nibbles(b["ql"], 64).reshape(len(b), 2, 4, 32) | high << 4
    view = out.reshape(len(b), 16, 16)
    scales = _scale(b["d"]) * b["scales"]
    np.multiply(q.reshape(view.shape).astype(np.float32) - 32, scales[:, :, None], out=view)


_HALF, _BYTE = "<f2", "u1"
_K_HEAD = [("d", _HALF), ("dmin", _HALF), ("scales", _BYTE, 12)]
_DECODERS: dict[str, tuple[np.dtype[np.void], Callable[[Records, Floats], None]]] = {
    "Q4_0": (np.dtype([("d", _HALF), ("qs", _BYTE, 16)]), _q4_0),
    "Q4_1": (np.dtype([("d", _HALF), ("m", _HALF), ("qs", _BYTE, 16)]), _q4_1),
    "Q5_0": (np.dtype([("d", _HALF), ("qh", _BYTE, 4), ("qs", _BYTE, 16)]), _q5_0),
    "Q5_1": (np.dtype([("d", _HALF), ("m", _HALF), ("qh", _BYTE, 4), ("qs", _BYTE, 16)]), _q5_1),
    "Q8_0": (np.dtype([("d", _HALF), ("qs", "i1", 32)]), _q8_0),
    "Q4_K": (np.dtype([*_K_HEAD, ("qs", _BYTE, 128)]), _q4_k),
    "Q5_K": (np.dtype([*_K_HEAD, ("qh", _BYTE, 32), ("qs", _BYTE, 128)]), _q5_k),
    "Q6_K": (np.dtype([("ql", _BYTE, 128), ("qh", _BYTE, 64), ("scales", "i1", 16), ("d", _HALF)]), _q6_k),
}
