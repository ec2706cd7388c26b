"""Seeded bugs of the tree ops: (id, file, old text, new text, build, says, tests), see mutations.py."""

LINKS = "csrc/kernels/tree_links/cuda.cu"
FROM_MASK = "csrc/kernels/tree_from_mask/cuda.cu"
MASK_WORD = "csrc/kernels/tree_from_mask/params.h"
STEPS = "csrc/kernels/common/tree.cuh"
ROWS = "csrc/kernels/common/rows.h"
TREE = "csrc/kernels/common/tree.h"
LINK_TESTS = "python_tests/test_tree_links.py"
MASK_TESTS = "python_tests/test_tree_from_mask.py"
RACE = "race on global memory"
BOUNDS = "out of bounds"

BUGS = [
    # Walking up.
    ("tree-node-past-max-nodes", STEPS, "    if (node >= num_nodes) return outside;\n", "", "plain", "",
     LINK_TESTS),
    ("tree-outside-keeps-ancestors", STEPS, "parent >= node) return outside;",
     "parent >= node) return Ancestry{-1, found.words};", "plain", "", LINK_TESTS),
    ("tree-mask-without-ancestors", STEPS, "found.words |= node_bit(node, word);",
     "found.words |= node_bit(node, 0);", "plain", "", LINK_TESTS),
    ("tree-second-root-accepted", STEPS, "if (parent < 0 || parent >= node) return outside;",
     "if (parent < 0) break;\n        if (parent >= node) return outside;", "plain", "", LINK_TESTS),
    # Links.
    ("tree-root-has-siblings", STEPS, "bool want_sibling = node > 0;", "bool want_sibling = true;",
     "plain", "", LINK_TESTS),
    ("tree-last-child-first", STEPS, "for (int i = kAtOnce - 1; i >= 0; --i) {",
     "for (int i = 0; i < kAtOnce; ++i) {", "plain", "", LINK_TESTS),
    ("tree-links-past-the-request", STEPS, "j + i < num_nodes ? *parents", "true ? *parents", "hooks",
     "", LINK_TESTS),
    ("tree-links-found-again", STEPS, "want_child && links.first_child < 0;", "want_child;", "plain",
     "", LINK_TESTS),
    # Rows of requests and of none.
    ("tree-rows-not-clamped", ROWS, "clamp_row(cu_rows[b + 1], num_rows);", "cu_rows[b + 1];", "hooks",
     BOUNDS, LINK_TESTS),
    ("tree-padding-before-forgotten", ROWS, "num_rows - (end - begin)};", "num_rows - end};", "plain",
     "", LINK_TESTS),
    ("tree-bits-below-a-word", TREE, "n >= kMaskBits ?", "n > kMaskBits ?", "plain", "", MASK_TESTS),
    # tree_links.
    ("links-words-skipped", LINKS, "word += lanes;\n    } while", "word += 2 * lanes;\n    } while",
     "plain", "", LINK_TESTS),
    ("links-every-lane-writes", LINKS, "    if (lane == 0) {\n        const Links", "    {\n        const Links",
     "hooks", RACE, LINK_TESTS),
    ("links-bad-root-unnoticed", LINKS, " || (node == 0 && *p.parents.at(row) != -1);", ";", "plain", "",
     LINK_TESTS),
    ("links-status-of-one-thread", LINKS, "bad = __syncthreads_or(bad) != 0;", "__syncthreads();",
     "plain", "", LINK_TESTS),
    ("links-padding-twice", LINKS, "blockIdx.x * slots + slot;", "slot;", "hooks", RACE, LINK_TESTS),
    # tree_from_mask.
    ("from-mask-parents-read-early", FROM_MASK, "        __syncthreads();\n", "", "hooks", RACE,
     MASK_TESTS),
    ("from-mask-parents-taken-early", FROM_MASK, "__syncthreads_or(write_links(p, rows)) != 0;",
     "write_links(p, rows);", "hooks", RACE, MASK_TESTS),
    ("from-mask-parent-of-one-word", FROM_MASK,
     "parent = max(parent, __shfl_xor_sync(kFullMask, parent, distance));", "", "plain", "",
     MASK_TESTS),
    ("from-mask-one-word-compared", FROM_MASK,
     "good = min(good, __shfl_xor_sync(kFullMask, good, distance));", "", "plain", "", MASK_TESTS),
    ("from-mask-own-bit-unchecked", FROM_MASK, "== (inherited | node_bit(node, word));",
     "== inherited || (mask_word(p, rows, node, word) == (inherited | node_bit(node, word)));",
     "plain", "", MASK_TESTS),
    ("from-mask-bad-root-taken", FROM_MASK, "return good ? parent : kBadRow;",
     "return good ? parent : kNoParent;", "plain", "", MASK_TESTS),
    ("from-mask-lost-parent-kept", FROM_MASK, "if (p.depth[rows.first + node] < 0) p.parents",
     "if (p.parents[rows.first + node] == kBadRow) p.parents", "plain", "", MASK_TESTS),
    ("from-mask-foreign-bits", MASK_WORD, " & bits_below(rows.count, word);", ";", "plain", "",
     MASK_TESTS),
    ("from-mask-node-without-word", FROM_MASK, "node < rows.count && node < num_words * kMaskBits;",
     "node < rows.count;", "plain", "", MASK_TESTS),
]  # fmt: skip
