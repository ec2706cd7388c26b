"""Fixtures. `backend` runs a test once per backend that is here (see backends.py)."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import backends  # noqa: E402


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", backends.available(), indirect=True)


@pytest.fixture
def backend(request):
    return backends.get(request.param)


def pytest_report_header(config):
    return f"backends: {', '.join(backends.available())}"
