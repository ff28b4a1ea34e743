"""Ways to spoil a checkpoint on disk: bytes of any file, values of JSON files and headers, tensors and their names.

Each takes a random source, hypothesis' or Python's own, so that a failing example can be made again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from nvfp4prep.header import DTYPE_BITS


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = (0, 1, -1, 2, 8, 16, 2**31, 2**63, 2**64 - 1, 10**18, 10**30, 10**40, 10**4000, 0.0, -0.0, 1.5, 1e308)
NOT_JSON = (float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "a",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "\\",
    "\0",
    "\x1b[2J",
    "\n",
    "\ud800",
    "\U0001f600",
    "x" * 5000,
    "[bold]x[/bold]",
    "[/]",
    "{}",
    "%s",
    "٣",
    "²",
    "*",
    "re:.*",
    "re:(a+)+$",
    "re:[",
    "*" * 50,
)
WORDS = ("modelopt", "nvfp4prep", "NVFP4", "FP8", "MIXED_PRECISION", "W4A16_NVFP4", "NVFP4_AWQ", "float", "llama4")
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    *NUMBERS,
    *NOT_JSON,
    *TEXTS,
    *WORDS,
    *([text] for text in TEXTS),
    [],
    {},
    [[]],
    [{}],
    [0],
    [8, 8],
    {"a": {}},
    {"": {}},
    {"quant_algo": 1},
    ["Llama4ForCausalLM"],
    ["NemotronHForCausalLM"],
    nested(50),
    nested(99),
    nested(150),
    nested(900),
)
KEYS = (
    *("quantization_config", "quantization", "quant_algo", "quant_method", "ignore", "exclude_modules", "producer"),
    *("kv_cache_scheme", "kv_cache_quant_algo", "group_size", "config_groups", "quantized_layers", "text_config"),
    *("architectures", "model_type", "num_hidden_layers", "num_experts", "n_routed_experts", "num_local_experts"),
    *("hidden_size", "moe_intermediate_size", "intermediate_size", "moe_latent_size", "vocab_size", "name", "weights"),
    *("tie_word_embeddings", "num_nextn_predict_layers", "num_experts_per_tok", "weight_map", "metadata"),
    *("total_size", "num_bits", "type", "targets", "input_activations", "runs", "source", "format", "outputs"),
    *TEXTS,
)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _places(child, (*place, key))


def _at(value: Any, place: Sequence[Any]) -> Any:
    for key in place:
        value = value[key]
    return value


def spoil_value(value: Any, random: Random) -> Any:
    """A JSON value with one thing in it replaced, removed or added."""
    places = list(_places(value))
    action = random.randrange(4)
    if action == 0:
        place = random.choice([place for place in places if isinstance(_at(value, place), dict)] or [()])
        if isinstance(_at(value, place), dict):
            _at(value, place)[random.choice(KEYS)] = random.choice(VALUES)
        return value
    *outer, last = random.choice(places) or (None,)
    if last is None:
        return random.choice(VALUES)
    if action == 1:
        del _at(value, outer)[last]
    else:
        _at(value, outer)[last] = random.choice(VALUES)
    return value


def spoil_json(path: Path, random: Random) -> None:
    """A JSON file with up to three things changed."""
    value = json.loads(path.read_text())
    for _ in range(random.choice((1, 1, 2, 3))):
        value = spoil_value(value, random)
    text = json.dumps(value, ensure_ascii=random.randrange(3) > 0)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def spoil_bytes(path: Path, random: Random, start: int = 0, end: int | None = None) -> None:
    """A file with bytes between `start` and `end` flipped, replaced, cut off, put in, or there twice."""
    raw = bytearray(path.read_bytes())
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        stop = len(raw) if end is None else min(end, len(raw))
        if stop <= start:
            break
        at = random.randrange(start, stop)
        match random.randrange(6):
            case 0 | 1:
                raw[at] ^= 1 << random.randrange(8)
            case 2:
                raw[at] = random.choice(b'{}[]",:0129eE.-\\\0\xff')
            case 3:
                del raw[at:]
            case 4:
                raw[at:at] = bytes(random.randrange(256) for _ in range(random.choice((1, 8))))
            case 5:
                raw[at:at] = raw[at : at + random.choice((1, 20, 200))]
    path.write_bytes(raw)


# --- shards ----------------------------------------------------------------------------------------------------------


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """A shard's header and its data."""
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: object, data: bytes = b"") -> bytes:
    """A shard of a header, JSON bytes or what they are made from, and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def header_bytes(path: Path) -> int:
    """Where a shard's data begin."""
    return 8 + int(struct.unpack("<Q", path.read_bytes()[:8])[0])


def spoil_header(path: Path, random: Random) -> None:
    """A shard whose header has hostile values in it; its data stay."""
    table, data = split(path.read_bytes())
    name = random.choice(sorted(table))
    entry = table[name]
    match random.randrange(5):
        case 0:
            table[name] = random.choice(VALUES)
        case 1:
            entry[random.choice(("dtype", "shape", "data_offsets", "more"))] = random.choice(VALUES)
        case 2:
            entry["shape"] = [random.choice((*NUMBERS, None, "1")) for _ in range(random.randrange(20))]
        case 3:
            entry["data_offsets"] = [random.choice(NUMBERS) for _ in range(random.choice((1, 2, 2, 2, 3)))]
        case 4:
            table[random.choice(("__metadata__", *TEXTS))] = table.pop(name)
    path.write_bytes(joined(table, data))


def scale_ranges(path: Path) -> list[tuple[int, int]]:
    """Where the bytes of scalar scales lie in a shard."""
    table, _ = split(path.read_bytes())
    base = header_bytes(path)
    found = [entry["data_offsets"] for name, entry in table.items() if name.endswith(("weight_scale_2", "input_scale"))]
    return [(base + start, base + end) for start, end in found]


_FLOATS = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45, 1e-38, 3.4e38, 1e-30, 1e30)
_RENAMES = (
    ("gate_proj", "up_proj"),
    ("gate_proj", "w1"),
    ("experts.0", "experts.1"),
    ("experts.0", "experts.999999999"),
    ("experts.1", "experts.²"),
    ("experts.", "exp."),
    ("layers.0", "layers.1"),
    ("layers.0", "layers.00"),
    ("layers.1", "layers.999999999"),
    ("weight_scale_2", "input_scale"),
    ("weight_scale", "weight"),
    ("model.", ""),
    ("q_proj", "v_proj"),
    ("mlp", "mlp.experts.0.up_proj"),
    (".weight", ".k_scale"),
    (".weight_scale", ".pre_quant_scale"),
)
_NAMES = (
    *TEXTS,
    "weight",
    ".weight",
    "weight_scale",
    "x.weight_scale_2",
    ".experts.0.up_proj.weight",
    "x.experts.0.up_proj.weight",
    "x.experts.00.up_proj.weight",
    "x.experts.gate_up_proj",
    "model.layers.0.self_attn.k_scale",
    "a." * 500 + "weight",
)


class _Tensor:
    def __init__(self, name: str, dtype: str, shape: list[int], data: bytes) -> None:
        self.name, self.dtype, self.shape, self.data = name, dtype, shape, data

    def resize(self, random: Random, dtype: str, shape: list[int]) -> None:
        """Another dtype or shape, with data to match: as before, zeros, or ones."""
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        if bits % 8 or bits > 8_000_000:
            return
        filling = random.choice((self.data or b"\0", b"\0", b"\xff"))
        self.dtype, self.shape = dtype, shape
        self.data = (filling * (bits // 8 // len(filling) + 1))[: bits // 8]


def spoil_tensors(path: Path, random: Random) -> None:
    """A shard that is valid, but whose tensors have other names, dtypes, shapes or values, or are not all there."""
    table, data = split(path.read_bytes())
    metadata = table.pop("__metadata__", None)
    tensors = [
        _Tensor(name, entry["dtype"], entry["shape"], data[entry["data_offsets"][0] : entry["data_offsets"][1]])
        for name, entry in table.items()
    ]
    for _ in range(random.choice((1, 1, 2, 3, 6))):
        if tensors:
            tensors = _spoiled(tensors, random)
    table = {} if metadata is None else {"__metadata__": metadata}
    position, parts = 0, []
    for tensor in tensors:
        if tensor.name not in table:
            end = position + len(tensor.data)
            table[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [position, end]}
            parts.append(tensor.data)
            position = end
    path.write_bytes(joined(table, b"".join(parts)))


def _spoiled(tensors: list[_Tensor], random: Random) -> list[_Tensor]:
    scales = [tensor for tensor in tensors if "scale" in tensor.name]
    one = random.choice(scales if scales and random.randrange(2) else tensors)
    match random.randrange(9):
        case 0:
            one.resize(
                random, one.dtype, [random.choice((0, 1, 2, 3, 8, 16, 17, 64)) for _ in range(random.randrange(5))]
            )
        case 1:
            one.resize(random, random.choice(sorted(DTYPE_BITS)), one.shape)
        case 2:
            one.shape = random.choice(([*one.shape, 1], [1, *one.shape], one.shape[::-1]))
        case 3 if one.dtype == "F32":
            one.data = b"".join(struct.pack("<f", random.choice(_FLOATS)) for _ in range(len(one.data) // 4))
        case 3:
            one.data = random.choice((b"\0", b"\x7f", b"\x80", b"\xff", b"\x01")) * len(one.data)
        case 4:
            one.name = random.choice(_NAMES)
        case 5:
            old, new = random.choice(_RENAMES)
            for tensor in tensors if random.randrange(2) else [one]:
                tensor.name = tensor.name.replace(old, new)
        case 6:
            part = random.choice(
                ("input_scale", "weight_scale_2", "experts.1.", "gate_proj", "layers.0", "lm_head", one.name)
            )
            return [tensor for tensor in tensors if part not in tensor.name]
        case 7:
            name = one.name.replace("layers.0", "layers.7") + random.choice(("", "_x", ".y"))
            tensors.append(_Tensor(name, one.dtype, one.shape, one.data))
        case 8:
            shape = random.choice(([], [1], [1, 1], [8], [8, 1], [8, 2], [0], [2]))
            dtype = random.choice(("F32", "BF16", "F16"))
            part = random.choice(("weight_scale_2", "input_scale"))
            for tensor in tensors:
                if tensor.name.endswith(part):
                    tensor.resize(random, dtype, shape)
    return tensors
