"""The options that drafters with trained parameters share: where these come from, and the tree that they draft."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from jaxinfer.checkpoint.drafters.shipped import shipped_folder, tree_beside
from jaxinfer.checkpoint.named_path import named_path
from jaxinfer.decoding.strategy import Strategy, Target
from jaxinfer.decoding.trees.static import OWN_TREE, Paths, check_tree, is_product, paths_for, read_tree, tree_depth
from jaxinfer.notation import Params


@dataclass(frozen=True)
class TreeDrafter(Strategy):
    """Draft along a tree of ranks with trained parameters.

    ``heads`` is the folder of the parameters, by default the one that comes with the package for the target's weights.
    ``tree`` is a tree as `jaxinfer.decoding.trees.static` reads it, or ``own``: the one beside the parameters or, where
    none is, ``default_tree``. By default it is that one too, but where its nodes are listed as they gain, its first
    nodes alone: on a CPU, where more cost more than they gain, and in a sum of bounded size, whose nodes are
    ``sum_nodes``. ``paths`` and ``params`` are tree and parameters themselves, for those who have them at hand.
    """

    folder_kind: ClassVar[str]
    trainer: ClassVar[str]
    default_tree: ClassVar[str]

    heads: str = ""
    tree: str = ""
    paths: Paths = field(default=(), repr=False)
    sum_nodes: int = field(default=0, repr=False)
    params: Params | None = field(default=None, compare=False, repr=False)

    @property
    def parameters(self) -> Any:
        return () if self.params is None else self.params

    @property
    def max_depth(self) -> int:
        return tree_depth(self.paths)

    @property
    def tree_name(self) -> str:
        """The tree, as errors name it."""
        return "of paths" if self.paths else self.tree

    def bounded(self, nodes: int) -> "TreeDrafter":
        return replace(self, sum_nodes=nodes)

    def narrowed(self, nodes: int) -> "TreeDrafter":
        """Return what, resolved as this is and with its memory, drafts for a sum of fewer nodes: by default this."""
        return self

    def folder_for(self, target: Target) -> Path:
        """Return the folder to read parameters from; raises InvalidOption where there is none."""
        given = named_path(self.heads) if self.heads else None
        return given or shipped_folder(self.folder_kind, target.fingerprint, f"python -m {self.trainer}")

    def read_paths(self, folder: Path | None = None, most: int | None = None) -> Paths:
        """Return the tree that the options name beside the parameters of a folder.

        Where they name none, it has at most ``most`` nodes, the root included, or what suits the sum.
        """
        if self.paths:
            return check_tree(self.paths, "of paths")
        if self.tree not in ("", OWN_TREE):
            return read_tree(self.tree)
        beside = tree_beside(folder)
        paths = read_tree(self.default_tree if beside is None else str(beside))
        if self.tree or (beside is None and is_product(self.default_tree)):
            return paths
        return paths_for(paths, self.sum_nodes or most, self.sum_nodes > 0)
