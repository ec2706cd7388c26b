"""Fixtures. `backend` runs a test once per backend that is here (see backends.py)."""

import os
import pathlib
import sys

import pytest

# Several test runs share the cores: threads of OpenMP that spin while they wait (the default) take most of the
# time of small tensors from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import backends  # noqa: E402


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        here = backends.available()
        if metafunc.definition.get_closest_marker("slow"):
            here = [name for name in here if name not in ("emu_hooks", "emu_asan")]
        metafunc.parametrize("backend", here, indirect=True)


@pytest.fixture
def backend(request):
    return backends.get(request.param)


def pytest_report_header(config):
    return f"backends: {', '.join(backends.available())}"
