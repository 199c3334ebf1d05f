"""The wheel holds what the tree holds, and the tree's linked folders are importable under one name only."""

import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def package_files(root: Path) -> set[str]:
    """Every file of the package as an installed r3_pass would name it, the linked folders followed."""
    folders = {"r3_pass": root / "r3_pass", "r3_pass/passes": root / "passes", "r3_pass/registry": root / "registry"}
    return {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_through_the_sdist_holds_every_package_file(tmp_path: Path) -> None:
    """A subpackage that pyproject.toml does not list works in the editable install and is missing from the wheel."""
    # Built from a copy: an egg-info folder left in the tree would tell setuptools which files there are.
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("r3_pass", "passes", "registry"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", tree],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr

    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        entry_points = ConfigParser()
        entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())

    assert {name for name in names if not name.startswith(info)} == package_files(ROOT)
    assert f"{info}/licenses/LICENSE" in names
    assert dict(entry_points["torch_dynamo_backends"]) == {"r3_pass": "r3_pass.backend:r3_pass"}
    assert dict(entry_points["vllm.general_plugins"]) == {"r3_pass": "r3_pass.runtime.engines.vllm_plugin:register"}


@pytest.mark.parametrize("folder", ["passes", "registry"])
def test_a_linked_folder_is_no_top_level_package(folder: str) -> None:
    """`import passes` from the root would make a second copy of r3_pass.passes, with its own state."""
    run = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert f"ImportError: import r3_pass.{folder}, not {folder}" in run.stderr
