"""The functions of sgl_kernel by their signatures, request by request and node by node, sums in float64."""

import numpy as np
import torch


def _walk(b, nodes, depth, next_token, next_sibling, accepts):
    """Path of nodes, and the nodes that were tested without success, as (parent, node)."""
    path, refused = [0], []
    while len(path) < depth:
        node = int(next_token[b, path[-1]])
        while node != -1:
            if accepts(path[-1], node):
                break
            refused.append((path[-1], node))
            node = int(next_sibling[b, node])
        if node == -1:
            break
        path.append(node)
    return path, refused


def _commit(b, path, tokens, predicts, accept_index, accept_token_num, retrive_index):
    for i, node in enumerate(path):
        slot = int(retrive_index[b, node])
        accept_index[b, i] = slot
        predicts[slot] = tokens[i]
    accept_token_num[b] = len(path) - 1


def verify_tree_greedy(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
    retrive_next_sibling, target_predict,
):  # fmt: skip
    flat = target_predict.flatten()
    for b in range(candidates.shape[0]):

        def behind(node, b=b):
            return int(flat[int(retrive_index[b, node])])

        path, _ = _walk(
            b, candidates.shape[1], accept_index.shape[1], retrive_next_token, retrive_next_sibling,
            lambda up, node, b=b, behind=behind: int(candidates[b, node]) == behind(up),
        )  # fmt: skip
        tokens = [behind(node) for node in path]
        _commit(b, path, tokens, predicts, accept_index, accept_token_num, retrive_index)


def draw(masses, coin):
    """Inverse CDF; an id of mass 0 never."""
    masses = np.asarray(masses, dtype=np.float64)
    cdf = np.cumsum(masses)
    above = np.nonzero((cdf > coin * cdf[-1]) & (masses > 0))[0]
    return int(above[0]) if len(above) else int(np.nonzero(masses > 0)[0][-1])


def tree_speculative_sampling_target_only(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
    retrive_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs,
    draft_probs, threshold_single=1.0, threshold_acc=1.0, deterministic=True,
):  # fmt: skip
    depth, vocab = accept_index.shape[1], target_probs.shape[2]
    single = float(np.float32(threshold_single))
    least = float(np.float32(max(threshold_acc, 1e-9)))
    for b in range(candidates.shape[0]):
        running = {}

        def accepts(up, node, b=b, running=running):
            token = int(candidates[b, node])
            p = float(target_probs[b, up, token]) if 0 <= token < vocab else 0.0
            running[up] = running.get(up, 0.0) + p
            coin = float(uniform_samples[b, up])
            return p > 0 and (coin < running[up] / least or p >= single)

        path, refused = _walk(
            b, candidates.shape[1], depth, retrive_next_token, retrive_next_sibling, accepts
        )
        for up, node in refused:
            token = int(candidates[b, node])
            if 0 <= token < vocab:
                draft_probs[b, up, token] = target_probs[b, up, token]
        rest = p = target_probs[b, path[-1]].numpy()
        if len(path) < depth:
            rest = np.maximum(p - draft_probs[b, path[-1]].numpy(), np.float32(0))
        if rest.sum() == 0:
            rest = p
        token = draw(rest, float(uniform_samples_for_final_sampling[b]))
        tokens = [int(candidates[b, node]) for node in path[1:]] + [token]
        _commit(b, path, tokens, predicts, accept_index, accept_token_num, retrive_index)


def build_tree_kernel_efficient(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index,
    retrive_next_token, retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    nodes, at = draft_token_num, 0
    for b in range(selected_index.shape[0]):
        chosen = selected_index[b].tolist()
        start = int(verified_seq_len[b])
        parents = [-1]
        for candidate in chosen:
            slot = candidate // topk
            parents.append(0 if slot == 0 else chosen.index(int(parent_list[b, slot])) + 1)
        paths = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
            children = [c for c, p in enumerate(parents) if p == node]
            siblings = [c for c, p in enumerate(parents) if p == parent and c > node]
            retrive_index[b, node] = b * nodes + node
            retrive_next_token[b, node] = children[0] if children else -1
            retrive_next_sibling[b, node] = siblings[0] if siblings else -1
            positions[b * nodes + node] = start + len(paths[node]) - 1
            row = [node2 in paths[node] for node2 in range(nodes)]
            if tree_mask_mode == 2:
                size = 4 if nodes > 16 else 2 if nodes > 8 else 1
                word = sum(1 << j for j, seen in enumerate(row) if seen)
                code = torch.tensor(list(word.to_bytes(size, "little")), dtype=torch.uint8)
                tree_mask.view(torch.uint8)[at : at + size] = code
                at += size
                continue
            if tree_mask_mode == 0:
                at += start
            tree_mask[at : at + nodes] = torch.tensor(row)
            at += nodes


def reconstruct_indices_from_tree_mask(
    tree_mask, verified_seq_len, positions, retrive_index, retrive_next_token,
    retrive_next_sibling, batch_size, draft_token_num,
):  # fmt: skip
    nodes = draft_token_num
    for b in range(batch_size):
        mask = tree_mask[b * nodes * nodes :][: nodes * nodes].view(nodes, nodes).tolist()
        ancestors = [[j for j in range(i) if mask[i][j]] for i in range(nodes)]
        for i in range(nodes):
            parent = max(ancestors[i], default=-1)
            below = [k for k in range(i + 1, nodes) if i in ancestors[k]]
            siblings = [k for k in range(i + 1, nodes) if max(ancestors[k], default=-1) == parent]
            positions[b * nodes + i] = int(verified_seq_len[b]) + len(ancestors[i])
            retrive_index[b, i] = b * nodes + i
            retrive_next_token[b, i] = below[0] if below else -1
            retrive_next_sibling[b, i] = siblings[0] if siblings and parent >= 0 else -1


def segment_packbits(x, input_indptr, output_indptr, y, batch_size):
    for b in range(batch_size):
        flags = (x[int(input_indptr[b]) : int(input_indptr[b + 1])] != 0).numpy()
        code = torch.from_numpy(np.packbits(flags, bitorder="little"))
        y[int(output_indptr[b]) : int(output_indptr[b]) + len(code)] = code
