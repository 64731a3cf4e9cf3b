"""What the parts need: packages, as `pyproject.toml` declares them, and a CUDA device.

python -m scripts.gpu_lib.needs fetch DIR --python 3.12 --have LIST    # where there is a network
python -m scripts.gpu_lib.needs install DIR                            # on a machine without one
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.processes import ROOT

CUDA = "cuda"

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "any")
"""Of wheels."""


def _declared(project: str, *extras: str) -> tuple[str, ...]:
    """Return the requirements of a distribution and of some of its extras."""
    document = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]
    optional = document.get("optional-dependencies", {})
    return (*document["dependencies"], *(line for extra in extras for line in optional[extra]))


def _of_tests(*names: str) -> tuple[str, ...]:
    """Return the requirements of these names among those for development."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    declared = {Requirement(line).name: line for group in groups.values() for line in group}
    return tuple(declared[name] for name in names)


SERVER = _declared(".")
CLIENT = _declared("client", "torch", "tools")
TESTS = _of_tests("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil", "pyarrow", "pillow")
BENCHES = _of_tests("psutil")


def wanted() -> list[str]:
    """Return all requirements but torch, which comes with the machine, in the build for its CUDA."""
    return [line for line in dict.fromkeys((*SERVER, *CLIENT, *TESTS)) if Requirement(line).name != "torch"]


def missing(needs: Iterable[str]) -> str:
    """Return what is not here in one sentence, or "". What a package needs itself is looked at, too."""
    needs = set(needs)
    reasons = list(dict.fromkeys(_absent(sorted(needs - {CUDA}), set())))
    sentences = [f"Python packages are missing: {', '.join(reasons)}"] if reasons else []
    if (
        CUDA in needs
        and not any(reason.startswith("torch") for reason in reasons)
        and (without := _without_cuda())
    ):
        sentences.append(without)
    return "; ".join(sentences)


def _absent(lines: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Yield each requirement that is not met; seen: what was looked at already."""
    for line in lines:
        wish = Requirement(line)
        extras = wish.extras or {""}
        if line in seen or (
            wish.marker and not any(wish.marker.evaluate({"extra": extra}) for extra in extras)
        ):
            continue
        seen.add(line)
        try:
            found = metadata.distribution(wish.name)
        except metadata.PackageNotFoundError:
            yield f"{wish.name}{wish.specifier}"
            continue
        if not wish.specifier.contains(found.version, prereleases=True):
            yield f"{wish.name}{wish.specifier} (here is {found.version})"
        if wish.name != "torch":  # its own come with the machine, some not as packages
            yield from _absent((each for each in found.requires or () if "extra ==" not in each), seen)


def _without_cuda() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    build = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    if torch.version.cuda is None:
        build = f"torch {torch.__version__} is a build without CUDA"
    driver = "nvidia-smi is here, so the driver probably is"
    if shutil.which("nvidia-smi") is None:
        driver = "nvidia-smi is not on the PATH, so there is no NVIDIA driver, or no GPU in this container"
    return f"torch sees no CUDA device ({build}; {driver})"


def fetch(folder: Path, python: str, have: Mapping[str, str]) -> list[Path]:
    """Download wheels for another machine; return those that it lacks, the only ones that are kept.

    Args:
        python: its version, as `3.12`.
        have: versions of its packages by name.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    command += ["--only-binary=:all:", "--python-version", python]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command += ["--constraint", str(ROOT / "scripts" / "constraints.txt"), *wanted()]
    subprocess.run(command, check=True)
    wheels = {canonicalize_name(path.name.partition("-")[0]): path for path in folder.glob("*.whl")}
    wishes = [Requirement(line) for line in wanted()]
    wishes += [wish for path in wheels.values() for wish in requirements_of(path)]
    for name in wheels.keys() & have.keys():
        its = [wish for wish in wishes if canonicalize_name(wish.name) == name]
        if all(wish.specifier.contains(have[name], prereleases=True) for wish in its):
            wheels.pop(name).unlink()
    return sorted(wheels.values())


def requirements_of(wheel: Path) -> list[Requirement]:
    """Return what a wheel needs, its extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    return [Requirement(line) for line in lines if "extra ==" not in line]


def read_list(path: Path | None) -> dict[str, str]:
    """Return versions by name of what `pip list --format=freeze` wrote, as far as it names versions."""
    text = path.read_text() if path else ""
    return {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    }


def install(folder: Path) -> None:
    """Install packages one by one: what the folder lacks costs only the parts that need it."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(folder)]
    for line in wanted():
        if missing([line]):
            done = subprocess.run([*pip, line], capture_output=True, text=True, check=False)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                print(f"scripts/gpu: {line} was not installed: {last}", file=sys.stderr)


def main() -> None:
    """Fetch or install."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_lib.needs", description=__doc__)
    parser.add_argument("what", choices=("fetch", "install"))
    parser.add_argument("folder", type=Path, help="of wheels")
    parser.add_argument(
        "--python", default="{}.{}".format(*sys.version_info), help="version on the other machine"
    )
    parser.add_argument("--have", type=Path, help="what `pip list --format=freeze` writes there")
    chosen = parser.parse_args()
    if chosen.what == "install":
        install(chosen.folder)
        return
    wheels = fetch(chosen.folder, chosen.python, read_list(chosen.have))
    size = sum(path.stat().st_size for path in wheels)
    print(f"{len(wheels)} wheels of {size / 1e6:.1f} MB are in {chosen.folder}")


if __name__ == "__main__":
    main()
