import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import emulator  # noqa: E402


@pytest.fixture(params=emulator.flavours())
def emu(request):
    return emulator.get(request.param)


@pytest.fixture
def hooks():
    if "hooks" not in emulator.flavours():
        pytest.skip("needs the hooks build")
    emu = emulator.get("hooks")
    emu.lib.emu_stats_reset()
    return emu


SCHEDULES = [("forward", 1), ("reverse", 1)] + [
    (order, seed) for order in ("random", "skewed") for seed in range(1, 7)
]


@pytest.fixture(params=SCHEDULES, ids=lambda s: f"{s[0]}-{s[1]}")
def schedule(request, emu):
    order, seed = request.param
    with emu.settings(order=order, seed=seed):
        yield f"{order} {seed}"
