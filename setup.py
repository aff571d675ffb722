"""What the package is called, what it needs and what goes into its wheel.

TorchRec and FBGEMM are missing from the requirements on purpose: TorchRec's own metadata asks for
the CUDA build of FBGEMM, which a machine without a GPU must not have. recipes/install.py brings
both, in the build that fits the machine.
"""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

REQUIRES = [
    "torch>=2.13,<2.14",  # the tensors, the collectives and the distributed checkpoint protocol
    "numpy>=1.26,<3",  # arrays in checkpointed state, bytes to and from files
    "fsspec>=2024.6",  # one interface to folders and object stores
    "xxhash>=3.4,<5",  # the checksum of every stored chunk
    "hydra-core>=1.3.2,<1.4",  # the config group `checkpoint`
    "omegaconf>=2.3,<2.4",  # the structured configs behind it
]

EXTRAS = {
    "recipes": [
        "rich>=13.7,<16",  # tables in the terminal
        "tensorboard>=2.16,<3",  # curves of a run
        "torchmetrics==1.0.3",  # AUC and logloss; the version that TorchRec 1.8 insists on
        "tqdm>=4.66,<5",  # progress bars
    ],
    "figures": [
        "kmeans1d>=0.4,<1",  # the codec that others are compared with
        "matplotlib>=3.8,<4",  # draws recipes/figures
    ],
    "s3": [
        "s3fs>=2024.6",  # fsspec's driver for s3:// and what speaks its protocol
    ],
    "test": [
        "hypothesis>=6.100,<7",  # property tests
        "mypy==2.4.1",  # types; exact, since another version finds other errors
        "packaging>=23",  # compares version requirements in the tests
        "pytest>=8.3,<10",  # the test runner
        "pytest-timeout>=2.3,<3",  # a hanging rank fails its test and not the whole run
        "ruff==0.17.5",  # lint and format; exact, since another version formats differently
        "types-setuptools>=75",  # types of setup.py
        "types-tqdm>=4.66,<5",  # types of tqdm
    ],
}

setup(
    name="torchrec_checknrun",
    version=runpy.run_path(str(ROOT / "torchrec_checknrun" / "version.py"))["__version__"],
    description="Differential, quantized checkpoints for TorchRec models, after Check-N-Run",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="torchrec_checknrun authors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    # `hydra_plugins` is a namespace that packages share: Hydra looks there for plugins.
    packages=[*find_packages(include=["torchrec_checknrun*"]), "hydra_plugins"],
    package_dir={"hydra_plugins": "torchrec_checknrun/hydra_plugin"},
    package_data={"torchrec_checknrun": ["py.typed"]},
    zip_safe=False,
)
