"""``python -m tests.families_table``: writes the table of `jaxinfer/models/families/README.md` from what the code says.

A family's published models and what differs are the first line of its module; a GGUF architecture names its family.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

from jaxinfer.models.families.registry import FAMILIES, family_of
from tests.models.variants import VARIANTS
from tests.models.variants.variant import Variant

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "jaxinfer" / "models" / "families"
README, REGISTRY = FOLDER / "README.md", FOLDER / "registry.py"
_ARCHITECTURES = ROOT / "jaxinfer" / "checkpoint" / "gguf" / "architectures"
_TABLE = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of table -->)", re.DOTALL)
_HEAD = ("`model_type`", "published", "what differs", "GGUF", "not live", "variants")


def module_of_each() -> dict[str, str]:
    """Return the module that the registry imports each family's constant from, by its ``model_type``."""
    tree, found = ast.parse(REGISTRY.read_text()), {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and ".families." in node.module:
            namespace = __import__(node.module, fromlist=["_"])
            for name in node.names:
                value = getattr(namespace, name.name)
                each = value if isinstance(value, tuple) else (value,)
                found |= {one.model_type: node.module for one in each if hasattr(one, "model_type")}
    return found


def families_in_gguf() -> set[str]:
    """Return the families that some GGUF architecture gives."""
    # The text model of Gemma 3 is the architecture gemma3, those of Mistral 3.1 and Ministral 3 are mistral3.
    sources = (path.read_text() for path in _ARCHITECTURES.glob("*.py"))
    words = {word for source in sources for word in re.findall(r'"(\w+)"', source)}
    return (words & FAMILIES.keys()) - {"gemma3", "mistral3"}


def written() -> str:
    """Return the table."""
    modules, in_gguf = defaultdict(list), families_in_gguf()
    for model_type, module in module_of_each().items():
        modules[module].append(model_type)
    rows = []
    for module in sorted(modules):
        types = [name for name in FAMILIES if name in modules[module]]
        path = ROOT / (module.replace(".", "/") + ".py")
        said = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].rstrip(".")
        published, _, differs = said.partition(": ")
        gguf = [f"`{name}`" for name in types if name in in_gguf]
        variants = [variant for variant in VARIANTS.values() if variant.model_type in types]
        cells = (", ".join(f"`{name}`" for name in types), published, differs)
        rows.append((*cells, ", ".join(gguf), ", ".join(_not_live(variants)), str(len(variants))))
    lines = (_HEAD, ("---",) * len(_HEAD), *rows)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _not_live(variants: list[Variant]) -> list[str]:
    """Return what adapters beside these models cannot change."""
    found = []
    for variant in variants:
        stored = {"model_type": variant.model_type, **variant.sizes, **variant.config}
        config = family_of(stored).translate(stored)
        found += ["positions"] if config.learned_positions is not None else []
        # Their parameters have two axes, which PEFT takes for one matrix.
        found += ["experts by `target_parameters`"] if variant.model_type == "dbrx" else []
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    README.write_text(_TABLE.sub(lambda _: written(), README.read_text()))
