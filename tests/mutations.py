"""Changes files at random, as damage, strangers and mistakes do: bytes, numbers of a header, JSON, and text."""

import copy
import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What JSON may hold where something else is expected.
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    2**24,
    2**31,
    2**63,
    10**40,
    1e308,
    0.5,
    "",
    "a\nb\x1b[31m",
    "x" * 5000,
    "9" * 5000,
    "../../etc/passwd",
    [],
    {},
    [[]],
    [[[[[[[[1]]]]]]]],
    {"type": "Sequence"},
    {"": None},
)
ODD_LENGTHS = (0, 1, 2**15, 2**24, 2**31, 2**32 + 1, 2**62, 2**63, 2**64 - 1)


def mutate_bytes(data: bytes, rng: random.Random, head: int) -> bytes:
    """Change a file in one to three places, of which most are in its first ``head`` bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(max(1, min(head, len(changed)) if rng.random() < 0.8 else len(changed)))
        match rng.randrange(6):
            case 0 | 1 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 2:
                length = struct.pack("<Q", rng.choice(ODD_LENGTHS))[: rng.choice((4, 8))]
                changed[at : at + len(length)] = length
            case 3:
                del changed[at : at + rng.choice((1, 8, 100, len(changed)))]
            case 4:
                changed[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
            case 5:
                changed[at:at] = changed[at : at + rng.choice((8, 64, 500))]
    return bytes(changed)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """Change one to three values, keys or lengths somewhere in JSON."""
    changed = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        holder: Any = None
        node, key = changed, None
        while isinstance(node, dict | list) and node and (holder is None or rng.random() < 0.8):
            # Early entries of long lists and tables are as good as late ones.
            keys = list(node)[:40] if isinstance(node, dict) else range(min(len(node), 40))
            holder, key = node, rng.choice(keys)
            node = node[key]
        if holder is None:
            return copy.deepcopy(rng.choice(ODD_VALUES))
        match rng.randrange(5):
            case 0 | 1 | 2:
                holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
            case 3:
                del holder[key]
            case 4 if isinstance(holder, dict):
                holder[rng.choice(("x" * 3000, "9" * 5000, "a\nb", "", str(key) + "0"))] = node
            case _:
                holder[key] = [node, node]
    return changed


def mutate_json_text(data: bytes, rng: random.Random) -> bytes:
    """Change a JSON file: mostly what it says, sometimes its bytes."""
    if rng.random() < 0.15:
        return mutate_bytes(data, rng, len(data))
    return json.dumps(mutate_json(json.loads(data), rng)).encode()


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Change a safetensors file: mostly the table in its header, whose length stays right, sometimes its bytes."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:
        return mutate_bytes(data, rng, 8 + length)
    header = json.dumps(mutate_json(json.loads(data[8 : 8 + length]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def splice_text(texts: Sequence[str], rng: random.Random) -> str:
    """Return a text of random pieces of others, some of them many times."""
    text = rng.choice(texts)
    for _ in range(rng.randint(1, 4)):
        other = rng.choice(texts)
        start = rng.randrange(len(other))
        piece = other[start : start + rng.choice((1, 5, 20, 200))] * rng.choice((1, 1, 1, 2, 500))
        at = rng.randrange(len(text) + 1)
        text = text[:at] + piece + text[at + rng.choice((0, 0, 1, 10)) :]
    return text


def mutate_file(folder: Path, rng: random.Random) -> None:
    """Change a file somewhere in a folder by the kind that it is."""
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    data = path.read_bytes()
    if path.suffix == ".json":
        path.write_bytes(mutate_json_text(data, rng))
    elif path.suffix == ".safetensors":
        path.write_bytes(mutate_safetensors(data, rng))
    else:
        path.write_bytes(mutate_bytes(data, rng, 1000))
