"""Prints where torch's headers and libraries are, without importing torch (0.05 s, not 3 s).

Output, one per line: package folder, version, "cuda" or "cpu".
SPECDEC_TORCH_DIR names the package folder when torch is not importable from this interpreter.
"""

import importlib.util
import os
import pathlib
import re
import sys


def main():
    folder = os.environ.get("SPECDEC_TORCH_DIR")
    if not folder:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            sys.exit("torch is not installed for " + sys.executable)
        folder = os.path.dirname(spec.origin)
    text = pathlib.Path(folder, "version.py").read_text()
    version = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text).group(1)
    cuda = re.search(r"^cuda(?::[^=]*)?\s*=\s*['\"]", text, re.MULTILINE)
    print(folder)
    print(version)
    print("cuda" if cuda else "cpu")


main()
