"""Install this package with the TorchRec and FBGEMM builds that fit the machine.

TorchRec requires the distribution `fbgemm-gpu`. Without a GPU its place is taken by
`fbgemm-gpu-cpu`, which brings the same module under another name, so that pip would install both,
one over the other. Hence TorchRec is installed without its dependencies, exactly one FBGEMM beside
it, and the rest of TorchRec's needs by name. Makefile, README and users install in one of two ways:

    python torchrec_checknrun/install.py               # in a checkout or an unpacked source archive

    pip install torchrec_checknrun-0.1.0-*.whl         # or the source archive
    python -m torchrec_checknrun.install               # what pip could not choose

A GPU is looked for; `--device cpu` and `--device cuda` say which build to take. A torch that is
installed stays: TorchRec and FBGEMM are chosen to match; without one, torch 2.13 is installed.
Which index the packages come from is pip's own setting (see README). Only the standard library is
used here, since nothing else need be installed.
"""

import argparse
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

NAME = "torchrec_checknrun"
ROOT = Path(__file__).resolve().parents[1]
"""The sources, if this file is among them; else the folder that packages are installed in."""

BUILD = ["setuptools>=77.0.3", "wheel"]
FBGEMM = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}


class Stack(NamedTuple):
    """Versions that fit each other: FBGEMM loads beside the torch it was compiled for only."""

    torch: str
    fbgemm: str
    torchrec: str

    @property
    def series(self) -> str:
        """Return the torch release without the patch: "2.13"."""
        return ".".join(self.torch.split(".")[:2])


# The stacks whose tests `make versions` ran, see recipes/results/versions.json. The torch that
# setup.py requires is one of these.
STACKS = {
    stack.series: stack
    for stack in (
        Stack("2.9.1", "1.4.2", "1.4.0"),
        Stack("2.10.0", "1.5.0", "1.5.1"),
        Stack("2.11.0", "1.6.0", "1.6.1"),
        Stack("2.12.1", "1.7.0", "1.7.0"),
        Stack("2.13.0", "1.8.0", "1.8.0"),
        Stack("2.14.1", "1.9.0", "1.9.2"),
    )
}
DEFAULT = STACKS["2.13"]
# What TorchRec imports besides torch and FBGEMM; iopath is needed by torchrec.datasets.
TORCHREC_NEEDS = [
    "tensordict>=0.8,<0.16",  # each release wants its own torch or a newer one
    "torchmetrics==1.0.3",
    "tqdm>=4.66,<5",
    "pyre-extensions==0.0.32",
    "iopath==0.1.10",
]

# Run in a fresh interpreter, since a package just installed is not seen by this one.
CHECK = """
import sys
sys.path[:] = filter(None, sys.path)  # what is installed, not what lies in this folder
import torch, fbgemm_gpu, torchrec
from torchrec_checknrun.native import build_command, has_extension
torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(torch.zeros(1, 4))
if sys.argv[1] == "cuda" and torch.version.cuda is None:
    sys.exit(
        f"torch {torch.__version__} is built without CUDA. Run `pip uninstall torch`, set pip to an"
        " index with PyTorch's CUDA packages (PIP_INDEX_URL; https://pytorch.org names them) and"
        " install again; or choose --device cpu."
    )
compiled = has_extension()  # a warning says why not
kernel = "with" if compiled else "without"
print(
    f"torch {torch.__version__}, torchrec {torchrec.__version__}, {kernel} the compiled kernel:"
    f" ready for {sys.argv[1]}."
)
if not compiled:
    print(f"To build the kernel, which is several times faster: {build_command()}")
"""


def detect_device() -> str:
    """Tell whether the driver sees a GPU."""
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if found.returncode == 0 and "GPU" in found.stdout else "cpu"


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution in this environment; None where pip has none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def choose_stack() -> Stack:
    """Return the stack of the installed torch, with that torch's patch release, or the default."""
    installed = installed_version("torch")
    if installed is None:
        return DEFAULT
    torch = installed.split("+")[0]
    stack = STACKS.get(Stack(torch, "", "").series)
    if stack is None:
        sys.exit(
            f"install.py: torch {installed} is installed; FBGEMM and TorchRec are known for torch "
            f"{', '.join(STACKS)}. Install into an environment with one of these or without torch, "
            "or name versions that fit this torch: --stack TORCH,FBGEMM,TORCHREC."
        )
    return stack._replace(torch=torch)


def pip(*arguments: str) -> None:
    """Run this interpreter's pip; its own message says what went wrong."""
    command = [sys.executable, "-m", "pip", *arguments]
    if returncode := subprocess.call(command):
        sys.exit(f"install.py: failed with exit status {returncode}: {' '.join(command)}")


def requested(extras: str, editable: bool) -> list[str]:
    """Return pip's arguments that install this package from its sources, or extras of the package
    that is installed already.
    """
    wanted = f"[{extras}]" if extras else ""
    if (ROOT / "setup.py").is_file() and (ROOT / NAME / "csrc").is_dir():
        return [*(["--editable"] if editable else []), f"{ROOT}{wanted}"]
    if editable:
        sys.exit(
            "install.py: --editable needs the sources: run install.py in a checkout, as "
            f"`python {NAME}/install.py --editable`"
        )
    # Exactly the installed version, so that no index need have it.
    return [f"{NAME}{wanted}=={importlib.metadata.version(NAME)}"] if extras else []


def install(device: str, extras: str, editable: bool, stack: Stack | None = None) -> None:
    """Install torch, then this package and what TorchRec needs, then TorchRec with its FBGEMM."""
    package = requested(extras, editable)
    stack = stack or choose_stack()
    # The two builds own the same files: taking one away beside the other would leave a torn module.
    if any(installed_version(name) for flavour, name in FBGEMM.items() if flavour != device):
        pip("uninstall", "--yes", *FBGEMM.values())
    torch = f"torch=={stack.torch}"  # an installed build of this version, "+cpu" say, meets that
    pip("install", *BUILD, torch)
    # Not isolated: a build environment of its own would fetch another torch to build against.
    pip("install", "--no-build-isolation", torch, *TORCHREC_NEEDS, *package)
    # Last, or pip would remark at every later step that TorchRec's requirement is not met.
    fbgemm = f"{FBGEMM[device]}=={stack.fbgemm}"
    pip("install", "--no-deps", f"torchrec=={stack.torchrec}", fbgemm)
    if returncode := subprocess.call([sys.executable, "-c", CHECK, device]):
        sys.exit(f"install.py: the installed packages do not work (exit status {returncode}).")


def main() -> None:
    """Read the command line and install."""
    parser = argparse.ArgumentParser(
        description="Install torchrec_checknrun and its needs into this interpreter's environment."
    )
    parser.add_argument(
        "--device",
        choices=["auto", *FBGEMM],
        default="auto",
        help="build of FBGEMM to install; auto: cuda if nvidia-smi lists a GPU, else cpu",
    )
    parser.add_argument(
        "--extras", default="", help="extras of setup.py, with commas: recipes, s3, test"
    )
    parser.add_argument(
        "--stack",
        type=lambda text: Stack(*text.split(",")),
        metavar="TORCH,FBGEMM,TORCHREC",
        help="versions to install, such as 2.13.0,1.8.0,1.8.0; default: those that match the "
        f"installed torch, {','.join(DEFAULT)} without one",
    )
    parser.add_argument(
        "--editable", action="store_true", help="use the sources in place (for development)"
    )
    arguments = parser.parse_args()
    device = detect_device() if arguments.device == "auto" else arguments.device
    print(f"install.py: installing for {device} into {sys.prefix}", flush=True)
    install(device, arguments.extras, arguments.editable, arguments.stack)


if __name__ == "__main__":
    main()
