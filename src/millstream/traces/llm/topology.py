"""Attention of the answer -> how far it is from the prompt: the topological divergence of TOHA (arXiv 2504.10063).

The prompt is one node of a graph, every answer token another, and the distance of two is one minus their attention.
The divergence of a head is the length of the minimum spanning tree per answer token.
"""

from dataclasses import dataclass

import torch

# G graphs (samples x heads), R answer tokens of a pass, A answer tokens so far, N = 1 + A nodes, K keys, E edges


@dataclass
class Tree:
    """The minimum spanning trees of the answer tokens so far, one per sample and head; the prompt is node 0."""

    ends_2GE: torch.Tensor
    length_GE: torch.Tensor


def grown(tree: Tree | None, weights_BHRK: torch.Tensor, real_BR: torch.Tensor, *, prompt: int) -> Tree:
    """The trees with the answer tokens of one more pass, given their attention to all tokens before them.

    Only edges of the trees before and of the new tokens can be in the new trees: long answers may come in passes.
    """
    num_rows, heads = weights_BHRK.shape[2], weights_BHRK.shape[1]
    far_GRK = 1 - weights_BHRK.float().clamp(0, 1).flatten(0, 1)
    device, before = far_GRK.device, weights_BHRK.shape[3] - prompt - num_rows
    far_GRN = torch.cat([far_GRK[..., :prompt].amin(-1, keepdim=True), far_GRK[..., prompt:]], dim=-1)
    row_R, node_N = torch.arange(num_rows, device=device), torch.arange(far_GRN.shape[2], device=device)
    padding_GR1 = ~real_BR.repeat_interleave(heads, 0)[..., None]
    # Padding is at the prompt: it adds no length and connects nothing.
    far_GRN = far_GRN.masked_fill(padding_GR1, 2.0)
    far_GRN[..., 0].masked_fill_(padding_GR1[..., 0], 0.0)
    is_edge_RN = node_N < 1 + before + row_R[:, None]
    row_E, source_E = is_edge_RN.nonzero().T
    ends_2GE = torch.stack([source_E, 1 + before + row_E])[:, None].expand(-1, len(far_GRN), -1)
    length_GE = far_GRN[:, is_edge_RN]
    if tree is not None:
        ends_2GE = torch.cat([tree.ends_2GE, ends_2GE], dim=2)
        length_GE = torch.cat([tree.length_GE, length_GE], dim=1)
    return _spanning(ends_2GE, length_GE, num_nodes=far_GRN.shape[2])


def divergence(tree: Tree, real_BA: torch.Tensor) -> torch.Tensor:
    """[B, H]: the length of the trees per answer token; 0 without an answer."""
    count_B = real_BA.sum(1)
    return tree.length_GE.sum(1).view(len(count_B), -1) / count_B.clamp(min=1)[:, None]


def _spanning(ends_2GE: torch.Tensor, length_GE: torch.Tensor, *, num_nodes: int) -> Tree:
    """Boruvka's algorithm on connected graphs: every component takes its shortest edge, until one is left.

    Edges of the same length are told apart by their order, as the algorithm requires.
    """
    graphs, num_edges = length_GE.shape
    order_GE = length_GE.argsort(dim=1, stable=True)
    a_GE, b_GE = (ends.gather(1, order_GE) for ends in ends_2GE)
    sorted_GE, device = length_GE.gather(1, order_GE), length_GE.device
    rank_GE = torch.arange(num_edges, device=device).expand(graphs, -1)
    component_GN = torch.arange(num_nodes, device=device).repeat(graphs, 1)
    taken_GE = torch.zeros((graphs, num_edges + 1), dtype=torch.bool, device=device)
    for _ in range((num_nodes - 1).bit_length()):
        from_GE, to_GE = component_GN.gather(1, a_GE), component_GN.gather(1, b_GE)
        open_GE = rank_GE.masked_fill(from_GE == to_GE, num_edges)
        best_GN = torch.full((graphs, num_nodes), num_edges, device=device)
        best_GN.scatter_reduce_(1, from_GE, open_GE, "amin").scatter_reduce_(1, to_GE, open_GE, "amin")
        taken_GE.scatter_(1, best_GN, True)
        # A component joins the one at the other end of its edge; of two that chose the same edge the lower one stays.
        edge_GN, itself_GN = best_GN.clamp(max=num_edges - 1), torch.arange(num_nodes, device=device)
        other_GN = from_GE.gather(1, edge_GN) + to_GE.gather(1, edge_GN) - itself_GN
        other_GN = torch.where(best_GN < num_edges, other_GN, itself_GN)
        is_mutual_GN = (other_GN.gather(1, other_GN) == itself_GN) & (itself_GN < other_GN)
        joined_GN = torch.where(is_mutual_GN, itself_GN, other_GN)
        for _ in range((num_nodes - 1).bit_length()):
            joined_GN = joined_GN.gather(1, joined_GN)
        component_GN = joined_GN.gather(1, component_GN)
    kept_GE = taken_GE[:, :-1].nonzero()[:, 1].view(graphs, num_nodes - 1)
    ends = torch.stack([a_GE.gather(1, kept_GE), b_GE.gather(1, kept_GE)])
    return Tree(ends, sorted_GE.gather(1, kept_GE))
