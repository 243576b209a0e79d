"""Say in one line what a machine lacks, before anything is imported or downloaded: packages, a GPU, its driver.

    python needs.py [flags of train_gpt.py]     which wheels of torch suit this machine: for environment.sh

Every command imports this first. It takes no packages, and a Python that is too old can read it. Exit codes: 0;
2 gpt2 cannot train here, the line says why, and the flags do not ask for a CPU.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NANO = "nano trains on the CPU: --preset nano --device cpu"
CAPABILITY = "gpt2 needs a GPU of compute capability 8.0 or newer (A100, RTX 30)"
OLD_NAMES = r"Quadro|TITAN|GTX?\b|MX[1-5][0-5]|RTX 20[678]|\b[KMPTV]\d"  # below 8.0; RTX 2050 and MX570 are not
LISTED = r"(?m)^(.+), (\d{3}[\d.]*)\s*$"  # what nvidia-smi prints: name and driver
DRIVER_FILE = "/proc/driver/nvidia/version"  # where nvidia-smi is missing, as in some containers
AMD_FILE = "/dev/kfd"
# The best NVIDIA GPU, the wheels of torch that suit (empty: the default ones), what is wrong, if that has to be mended
Gpu = namedtuple("Gpu", "name driver wheels trouble is_serious", defaults=("", "", "", "", False))


def typed(path: Path | str) -> str:
    """Return a path as it can be typed here."""
    text, here = str(path), f"{os.getcwd()}/"
    text = text[len(here) :] if text.startswith(here) else text
    return shlex.quote(text if "/" in text else f"./{text}")


PYTHON = typed(sys.executable)
PIP = f"{PYTHON} -m pip install"


def how_to_get(files: tuple[str, ...]) -> str:
    """Return what to type to start this program with a Python that has its packages, or to get them for this one."""
    venv, again = ROOT / ".venv", shlex.join(getattr(sys, "orig_argv", ["", *sys.argv])[1:])
    has_venv = (venv / "bin/python").exists() and not (venv / "unfinished").exists()
    if has_venv and Path(sys.prefix).resolve() != venv.resolve():
        return f"{typed(venv / 'bin/python')} {again}"
    is_managed = sys.prefix == sys.base_prefix and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
    if is_managed or sys.version_info < (3, 11):  # the former: pip would refuse
        return f"{typed(ROOT / 'run.sh')} --check && {typed(venv / 'bin/python')} {again}"
    return " ".join([PIP, *(f"-r {typed(ROOT / file)}" for file in files)])


@contextlib.contextmanager
def packages(*files: str) -> Iterator[None]:
    """Let imports that fail end the program with code 2 and a line. files: requirements that name the packages."""
    path = Path(sys.argv[0])
    program = f"python -m {path.parent.name}" if path.name == "__main__.py" else path.name
    try:
        if sys.platform == "win32":
            raise OSError("Windows is not supported: start this in WSL")
        if sys.version_info < (3, 11):  # noqa: UP036
            raise ImportError(f"Python {platform.python_version()} is older than 3.11")
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (ImportError, OSError) as error:  # the latter: a shared library is missing
        fix = "" if sys.platform == "win32" else f"; {how_to_get(files)}"
        print(f"{program}: {' '.join(str(error).split())}{fix}", file=sys.stderr)
        sys.exit(2)


def wheels_for(driver: str) -> str:
    """Return the folder of wheels for a driver: torch 2.13 comes for CUDA 13, which needs 580, and for 12.6: 525."""
    return "cu126" if "525" <= driver < "580" else ""


def find_gpu() -> Gpu:
    """Ask nvidia-smi for the best NVIDIA GPU."""
    if sys.platform == "darwin":
        return Gpu(trouble="GPUs of Macs are not supported")
    if shutil.which("nvidia-smi") is None:
        has_amd = os.path.exists(AMD_FILE) or shutil.which("rocm-smi")
        why = "AMD GPUs are not supported" if has_amd else "there is no NVIDIA GPU"
        if not os.path.exists(DRIVER_FILE):
            return Gpu(wheels="cpu", trouble=why)
        driver = "".join(re.findall(r" (\d{3}\.[\d.]+) ", Path(DRIVER_FILE).read_text())[:1])
        return Gpu(driver=driver, wheels=wheels_for(driver), trouble=why)
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
        text = (done.stdout + done.stderr).strip() or "No devices"
    except (OSError, subprocess.SubprocessError) as error:
        text = str(error)
    gpus = [(re.search(OLD_NAMES, name) is not None, name, driver) for name, driver in re.findall(LISTED, text)]
    if text.startswith("No devices"):
        return Gpu(trouble="nvidia-smi finds no GPU")
    if not gpus:
        return Gpu(trouble=f"nvidia-smi fails: {text.splitlines()[0][:200]}", is_serious=True)
    is_old, name, driver = min(gpus)
    if is_old or driver < "525":
        why = f"{name} is too old: {CAPABILITY}" if is_old else f"driver {driver} is too old: update it to 580 or newer"
        return Gpu(name, driver, "cpu", why, True)
    return Gpu(name, driver, wheels_for(driver))


def main(argv: list[str]) -> int:
    gpu, is_for_cpu = find_gpu(), re.search(r"--(preset[= ](nano|mini)|device[= ]cpu)", " ".join(argv))
    refusal = f"{gpu.trouble}; {NANO}" if gpu.is_serious and not is_for_cpu else ""
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        refusal = "PyTorch has no builds for Macs with Intel processors since 2.3"
    if "not supported" in gpu.trouble:
        print(f"note: {gpu.trouble}", file=sys.stderr)
    print(refusal or gpu.wheels)
    return 2 if refusal else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
