"""Wire the cffi build of the C core; everything else is in pyproject.toml."""

import sysconfig

from setuptools import setup

# One wheel serves every CPython from 3.10 (cffi builds against the limited API), except the free-threaded ones, which
# have no limited API yet.
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

setup(
    cffi_modules=["csrc/build_core.py:ffibuilder"],
    options={} if free_threaded else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
