"""PEP 517 backend: setuptools', plus build requirements only where they are missing.

Inside pip's isolated environment sys.prefix is still the environment the user installs into, so a
torch that is already there is used (its headers are all that is needed) instead of downloading one.
"""

import glob
import os
import shutil
import sys

from setuptools import build_meta as _setuptools
from setuptools.build_meta import *  # noqa: F401,F403

_TORCH_PIN = "torch==2.13.0"  # a plain "torch" may fetch gigabytes of CUDA libraries


def _torch_folder():
    if os.environ.get("SPECDEC_TORCH_DIR"):
        return os.environ["SPECDEC_TORCH_DIR"]
    for pattern in ("lib/python*/site-packages/torch", "Lib/site-packages/torch"):
        for folder in glob.glob(os.path.join(sys.prefix, pattern)):
            if os.path.exists(os.path.join(folder, "version.py")):
                return folder
    return None


def _missing():
    needed = []
    folder = _torch_folder()
    if folder:
        os.environ["SPECDEC_TORCH_DIR"] = folder
    else:
        needed.append(_TORCH_PIN)
    needed += [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    return needed


def get_requires_for_build_wheel(config_settings=None):
    return _setuptools.get_requires_for_build_wheel(config_settings) + _missing()


def get_requires_for_build_editable(config_settings=None):
    return _setuptools.get_requires_for_build_editable(config_settings) + _missing()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _missing()  # names SPECDEC_TORCH_DIR for find_torch.py
    return _setuptools.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _missing()
    return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)
