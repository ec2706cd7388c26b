"""Every detector reports its bug at the right line, and is silent about the same kernel without it."""

import ctypes
import pathlib
import re

import emulator
import numpy as np
import pytest

SOURCE = pathlib.Path(__file__).with_name("detectors.cu")

# Without any barrier the reader may also come first, and then finds no data yet.
TOO_EARLY = r"race on shared memory|uninitialised shared memory|with a cp.async in flight"

# What each case must be called (a regular expression). The first group needs the hooks; the rest every build reports.
HOOKS = {
    "raw_without_barrier": TOO_EARLY,
    "war_on_refill": "race on shared memory",
    "same_value_twice": "race on shared memory",
    "lanes_without_syncwarp": TOO_EARLY,
    "shuffle_is_no_fence": "race on shared memory",
    "half_warps_apart": TOO_EARLY,
    "warps_without_block_barrier": TOO_EARLY,
    "plain_read_of_atomic": "race on shared memory",
    "plain_instead_of_atomic": "race on shared memory",
    "named_barrier_not_waited": TOO_EARLY,
    "reduction_scratch_reused": "race on shared memory",
    "bytes_of_wide_words": "race on shared memory",
    "neighbour_block": "race on global memory",
    "block_barrier_on_global": "race on global memory",
    "ticket_without_fence": "race on global memory",
    "ticket_fence_after_barrier": "race on global memory",
    "flag_without_release": "race on global memory",
    "flag_seen_by_one_thread": "race on global memory",
    "flag_not_waited_for": "race on global memory",
    "grid_without_barrier": "race on global memory",
    "uninitialised_shared": "uninitialised shared memory",
    "uninitialised_atomic": "uninitialised shared memory",
    "copy_in_flight": "read of shared memory with a cp.async in flight",
    "write_to_copy_in_flight": "write of shared memory with a cp.async in flight",
    "copy_without_barrier": TOO_EARLY,
    "copy_over_data_in_use": "race on shared memory",
    "read_past_the_end": "out of bounds: read of 4 bytes",
    "write_past_the_end": "out of bounds: write of 4 bytes",
    "read_before_the_start": "out of bounds: read of 4 bytes",
    "write_to_read_only": "which is read-only",
    "shared_array_end": r"shared array first \(512 bytes",
    "dynamic_shared_end": r"shared array dynamic \(512 bytes",
    "misaligned_vector": "misaligned access: 16 bytes",
    "stack_of_another_thread": "stack of another thread",
}
ALWAYS = {
    "copy_not_waited_for": "never waited for",
    "copy_not_committed": "never waited for",
    "shared_arrays_overlap": "overlaps",
    "shared_beyond_launch": "the launch gave",
    "misaligned_copy": "not aligned to 16 bytes",
    "misaligned_atomic": "not aligned to 4 bytes",
    "misaligned_ldmatrix": "not aligned to 16 bytes",
    "divergent_barrier": "divergent barrier",
    "barrier_after_return": "returned",
    "lane_outside_its_mask": "leaves it out",
    "source_outside_mask": "not in the mask",
    "lanes_that_left": "returned",
    "barrier_against_shuffle": "wait",
    "masks_that_cross": "wait for this lane",
    "grid_barrier_after_return": "returned",
    "grid_barrier_not_cooperative": "cooperative",
    "named_barrier_counts": "barrier 1|deadlock",
    "named_barrier_too_few": "deadlock",
    "endless_spin": "livelock",
    "trap": r"__trap\(\)",
}
MESSAGES = {**HOOKS, **ALWAYS}


def case_names(emu):
    emu.lib.detector_case.restype = ctypes.c_char_p
    names = []
    while (name := emu.lib.detector_case(len(names))) is not None:
        names.append(name.decode())
    return names


def marked_lines(case):
    """Where the report may point: lines marked with the case, or any line of block.cuh for a bug whose
    symptom is inside a collective."""
    text = SOURCE.read_text().splitlines()
    return {i for i, line in enumerate(text, 1) if re.search(rf"@{case}\b", line)}


def run(emu, case, bug):
    rng = np.random.default_rng(0)
    room = 4096  # neighbours of the arrays are mapped: only a detector can notice
    data, words, constant = (np.zeros(room, np.float32) for _ in range(3))
    words = words.view(np.uint32)
    middle = slice(1024, 2048)
    constant[:] = rng.random(room)
    number = case_names(emu).index(case)
    return emu.call(
        "detector_run", data[middle], words[middle], constant[middle], number, bug, read_only=[2]
    )


def test_every_case_has_a_message():
    assert sorted(case_names(emulator.get(emulator.flavours()[0]))) == sorted(MESSAGES)


@pytest.fixture(params=["forward-1", "reverse-1", "random-1", "random-2", "skewed-1", "skewed-2"])
def few_schedules(request):
    order, seed = request.param.split("-")
    return {"order": order, "seed": int(seed)}


@pytest.mark.parametrize("case", MESSAGES)
def test_clean_kernel_is_not_reported(emu, few_schedules, case):
    with emu.settings(**few_schedules):
        assert run(emu, case, 0) == ""


@pytest.mark.parametrize("case", ALWAYS)
def test_reported_by_every_build(emu, few_schedules, case):
    with emu.settings(**few_schedules):
        check(run(emu, case, 1), case)


@pytest.mark.parametrize("case", HOOKS)
def test_reported_by_hooks(hooks, few_schedules, case):
    with hooks.settings(**few_schedules):
        check(run(hooks, case, 1), case)


def check(error, case):
    assert re.search(MESSAGES[case], error), error
    lines = {int(n) for n in re.findall(r"detectors\.cu:(\d+)", error)}
    if case == "lanes_that_left":
        assert "block.cuh:" in error, error
    else:
        assert lines & marked_lines(case), error


@pytest.mark.parametrize(
    "shape, text",
    [
        ((0, 1, 32, 0, 0), "empty grid"),
        ((1, 1, 0, 0, 0), "empty grid"),
        ((1, 1, 1025, 0, 0), "1025 threads per block"),
        ((1, 65536, 32, 0, 0), "65536"),
        ((1, 1, 32, 300000, 0), "300000 bytes of dynamic shared memory"),
        ((265, 1, 32, 0, 1), "cooperative grid of 265 blocks"),
    ],
)
def test_launches_that_cuda_refuses(emu, shape, text):
    assert text in emu.call("detector_launch", *shape)


def test_launch_works_after_an_error(emu):
    assert "divergent" in run(emu, "divergent_barrier", 1)
    assert run(emu, "divergent_barrier", 0) == ""


def test_unknown_setting_is_refused(emu):
    assert emu.lib.emu_set(b"no such key", ctypes.c_longlong(1)) == -1
    assert emu.lib.emu_set(b"order", ctypes.c_longlong(9)) == -1


def test_race_detector_can_be_switched_off(hooks):
    hooks.lib.emu_hooks_config(0, 0)
    try:
        assert run(hooks, "war_on_refill", 1) == ""
        assert "out of bounds" in run(hooks, "read_past_the_end", 1)
    finally:
        hooks.lib.emu_hooks_config(1, 1)
