"""Seeded bugs of the keys of random numbers: another purpose, place, round or request; see mutations.py.

(id, file, old text, new text, build, objects)
"""

WALK_CPU = "csrc/kernels/common/verify_walk.h"
SAMPLE_CPU = "csrc/kernels/sample/cpu.cpp"
CHAIN = "csrc/kernels/verify_chain/cuda.cu"
JUDGE = "csrc/kernels/verify_chain/judge.cuh"
SAMPLE = "csrc/kernels/sample/cuda.cu"
WALK = "csrc/kernels/verify_tree/walk.cuh"
NODE = "csrc/kernels/verify_tree/node.cuh"
PHILOX = "csrc/kernels/common/philox.h"
TESTS = "python_tests/test_random_streams.py::keys"

BUGS = [
    # Purposes.
    ("keys-cpu-bonus-is-residual", WALK_CPU, "coin(at.u, Purpose::kBonus)", "coin(at.u, Purpose::kResidual)", "cpu", ""),
    ("keys-cpu-residual-is-accept", WALK_CPU, "const float u = coin(at.u + 1, Purpose::kResidual);",
     "const float u = coin(at.u + 1, Purpose::kAccept);", "cpu", ""),
    ("keys-cpu-sampled-is-bonus", WALK_CPU, "request_.position + at.u, 0, Purpose::kSample",
     "request_.position + at.u, 0, Purpose::kBonus", "cpu", "verify_chain"),
    ("keys-cpu-typical-is-bonus", WALK_CPU, "*token = at.p.draw(coin(at.u + 1, Purpose::kResidual));",
     "*token = at.p.draw(coin(at.u + 1, Purpose::kBonus));", "cpu", "verify_chain"),
    ("keys-cpu-one-coin-is-residual", WALK_CPU, "coin(at.u + 1, Purpose::kAccept)",
     "coin(at.u + 1, Purpose::kResidual)", "cpu", ""),
    ("keys-cpu-climb-is-bonus", WALK_CPU, "coin(at.u, Purpose::kAccept) <", "coin(at.u, Purpose::kBonus) <", "cpu", ""),
    ("keys-cpu-sample-is-bonus", SAMPLE_CPU, "Purpose::kSample", "Purpose::kBonus", "cpu", "sample"),
    ("keys-chain-accept-is-residual", JUDGE, "node, Purpose::kAccept", "node, Purpose::kResidual", "plain", ""),
    ("keys-chain-sampled-is-bonus", CHAIN, "position + d.row, 0, Purpose::kSample",
     "position + d.row, 0, Purpose::kBonus", "plain", ""),
    ("keys-chain-typical-is-bonus", CHAIN, "rejected ? Purpose::kResidual : Purpose::kBonus",
     "Purpose::kBonus", "plain", ""),
    ("keys-tree-accept-is-residual", WALK, "w.child(at.next).node, Purpose::kAccept",
     "w.child(at.next).node, Purpose::kResidual", "plain", ""),
    ("keys-tree-climb-is-bonus", WALK, "w.shared.depth == 0 || w.number(at.node, Purpose::kAccept)",
     "w.shared.depth == 0 || w.number(at.node, Purpose::kBonus)", "plain", ""),
    ("keys-tree-residual-is-accept", WALK, "w.number(at.node + 1, Purpose::kResidual)",
     "w.number(at.node + 1, Purpose::kAccept)", "plain", ""),
    ("keys-tree-bonus-is-residual", WALK, "w.number(at.node, Purpose::kBonus)",
     "w.number(at.node, Purpose::kResidual)", "plain", ""),
    ("keys-tree-one-coin-is-bonus", NODE, "w.number(at.node + 1, Purpose::kAccept)",
     "w.number(at.node + 1, Purpose::kBonus)", "plain", ""),
    # Places of the walk.
    ("keys-cpu-siblings-share", WALK_CPU, "coin(c, Purpose::kAccept)", "coin(at.u + 1, Purpose::kAccept)", "cpu",
     "verify_tree"),
    ("keys-cpu-residual-of-the-row-before", WALK_CPU, "const float u = coin(at.u + 1, Purpose::kResidual);",
     "const float u = coin(at.u, Purpose::kResidual);", "cpu", ""),
    ("keys-chain-block-coin-of-the-next-row", CHAIN, "coin_of(p, r, end.row) < alpha_of_end",
     "coin_of(p, r, end.row + 1) < alpha_of_end", "plain", ""),
    ("keys-chain-bonus-of-the-next-row", CHAIN, "rejected ? d.row + 1 : d.row,", "d.row + 1,", "plain", ""),
    ("keys-tree-siblings-share", WALK, "w.child(at.next).node, Purpose::kAccept",
     "at.node + 1, Purpose::kAccept", "plain", ""),
    # Rounds.
    ("keys-cpu-sampled-rows-share", WALK_CPU, "request_.position + at.u, 0,", "request_.position, 0,", "cpu",
     "verify_chain"),
    ("keys-cpu-rounds-share", WALK_CPU, "request_.position, index, purpose", "0, index, purpose", "cpu", ""),
    ("keys-sample-rounds-share", SAMPLE, "p.positions[row], 0,", "0, 0,", "plain", ""),
    ("keys-chain-sampled-rows-share", CHAIN, "position + d.row, 0,", "position, 0,", "plain", ""),
    ("keys-chain-accept-rounds-share", JUDGE, "p.positions[r.index], node", "0, node", "plain", ""),
    ("keys-chain-residual-rounds-share", CHAIN, "p.positions[b], end.row + 1", "0, end.row + 1", "plain", ""),
    ("keys-tree-rounds-share", NODE, "p.positions[b], index", "0, index", "plain", ""),
    ("keys-position-of-32-bits", PHILOX, "8u * static_cast<uint32_t>(p >> 32)", "8u * static_cast<uint32_t>(p >> 63)",
     "plain", "sample/cuda|verify_tree/cuda"),
    # Requests.
    ("keys-cpu-slots-share", WALK_CPU, "uniform_at(request_.seed, request_.position, index",
     "uniform_at(request_.seed * 0, request_.position, index", "cpu", ""),
    ("keys-chain-accept-slots-share", JUDGE, "p.seeds[r.index]", "p.seeds[0]", "plain", ""),
    ("keys-chain-residual-slots-share", CHAIN, "uniform_at(p.seeds[b]", "uniform_at(p.seeds[0]", "plain", ""),
    ("keys-tree-slots-share", NODE, "uniform_at(p.seeds[b]", "uniform_at(p.seeds[0]", "plain", ""),
    ("keys-slot-enters", NODE, "p.positions[b], index", "p.positions[b] + b, index", "plain", ""),
    ("keys-seed-of-32-bits", PHILOX, "static_cast<uint32_t>(s >> 32));", "0u);", "plain",
     "sample/cuda|verify_chain/cuda"),
]  # fmt: skip
