"""Steps of one size: how a TPU or a GPU gives the bits of plain decoding to every strategy that drafts a chain.

There XLA multiplies and adds, and the order of its additions may depend on the shapes of what it works on. So with
``exact="bits"`` shapes do not vary:

* every step of the target, plain decoding's too, is filled up to `Backend.step_rows` nodes a sequence, or a multiple of
  them. Nodes that fill are never taken;
* prompts run in chunks of one size, `jaxinfer.decoding.programs.FIXED_CHUNK`, that begin at multiples of it;
* kernels attend in blocks of one size that begin at multiples of it, whatever the cache's length. Blocks that hold
  nothing visible change nothing: they add zero times a weight of zero, and scale by one;
* a row of a product, of a norm or of attention does not see the other rows. So a node's number does not matter.

With the same operations on the same shapes, a token's logits depend on the weights and the tokens before it. This holds
on one type of device, one version of this library and of JAX, one mesh and one batch size, and

* between steps of the same size: a tree of more than 16 nodes runs in steps of 32, which equal other steps of 32;
* along chains. A node stands in the cache slot of its number. On a branch behind the first one that is not the slot of
  its position, and a sum over slots rounds by where its terms stand;
* for a prompt and its output as they are cut: a token of a prompt is computed in a chunk, a drawn one in a step. The
  engine, which cuts prompts where it has room, promises no bits here;
* where XLA attends (on a GPU, and where no kernel suits the cache), for caches of one length: its sums span the cache.

Nothing here has been compared on a chip yet. ``colab/validate_on_tpu.ipynb`` does so, and names every bit that differs.
"""

import jax
import jax.numpy as jnp

from jaxinfer.decoding.strategy import Strategy, Verified
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.notation import Array, Int
from jaxinfer.ops.backend import Backend


def step_nodes(strategy: Strategy, num_nodes: int, backend: Backend) -> int:
    """Return how many nodes the target verifies where a strategy proposes ``num_nodes``."""
    rows = backend.fixed_rows if strategy.fills_steps else 1
    return -(-num_nodes // rows) * rows


def step_headroom(strategy: Strategy, backend: Backend) -> int:
    """Return the cache slots that a step writes past a row's last committed token, with those of nodes that fill it."""
    return step_nodes(strategy, strategy.headroom, backend)


def filled(tree: DraftTree, num_nodes: int) -> DraftTree:
    """Fill a tree up to ``num_nodes`` with children of the root that are not valid, and so never taken."""
    missing = num_nodes - tree.tokens_BM.shape[1]
    return DraftTree(*(jnp.pad(field, ((0, 0), (0, missing))) for field in tree)) if missing else tree


def first_nodes(verified: Verified, num_nodes: int) -> Verified:
    """Return the answers at the nodes that a strategy proposed, without those that filled the step."""
    if verified.logits_BMV.shape[1] == num_nodes:
        return verified
    answers = verified.logits_BMV, verified.hidden_BMD, verified.aux
    logits_BMV, hidden_BMD, aux = jax.tree.map(lambda answer: answer[:, :num_nodes], answers)
    return verified._replace(logits_BMV=logits_BMV, hidden_BMD=hidden_BMD, aux=aux)


def widened(values_BJ: Int[Array, "B J"], num_nodes: int) -> Int[Array, "B M"]:
    """Repeat the last column, so that what is computed along a path has as many rows as a step has nodes."""
    missing = num_nodes - values_BJ.shape[1]
    return jnp.pad(values_BJ, ((0, 0), (0, missing)), mode="edge") if missing > 0 else values_BJ
