"""`wlb doctor`: sound here; and it sees what is wrong."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import wlb
from wlb.integrations.versions import OLDEST

for package in ("cyclopts", "jinja2", "rich", "matplotlib", "plotly"):
    pytest.importorskip(package)
from wlb_tools.command import checkup  # noqa: E402


@pytest.fixture(autouse=True)
def _release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever build the tests are run with."""
    monkeypatch.setattr(wlb, "BUILD_PROFILE", "release")


def test_a_debug_build_is_wrong(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wlb, "BUILD_PROFILE", "debug")
    found = run("doctor")
    assert (found.code, "Wrong: This is a debug build" in found.out) == (1, True)


def test_nothing_is_wrong_here(run: Any) -> None:
    found = run("doctor", "--json").json
    assert found["wrong"] == []
    assert found["plans"] == checkup.PLANS
    packages = {one["name"]: one for one in found["packages"]}
    assert packages["numpy"] | {"needed": ""} == {
        "name": "numpy",
        "installed": np.__version__,
        "needed": "",
        "use": "wlb",
        "works": True,
    }
    assert packages["cyclopts"]["use"] == "wlb[cli]"
    assert {"torch", "megatron-core", "transformers"} <= set(packages)


def test_the_oldest_trainers_are_those_that_are_installed_for_tests() -> None:
    """`OLDEST` refuses, pyproject.toml installs: two lists that must say the same."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    groups = {**project["project"]["optional-dependencies"], **project["dependency-groups"], "peers": []}
    needed = [Requirement(text) for group in groups.values() for text in group if isinstance(text, str)]
    said = {(one.name, str(one.specifier)) for one in needed if one.name in OLDEST}
    assert {name for name, _ in said} >= {"transformers", "megatron-core", "lightning"}
    for name, specifier in said:
        assert Version(specifier.removeprefix(">=")) == Version(OLDEST[name]), name


def test_the_report_names_what_was_tried(run: Any) -> None:
    shown = run("doctor")
    assert shown.code == 0
    for text in (f"wlb {wlb.__version__}", f"Digest of its plans: {checkup.PLANS[:16]}.", "Nothing is wrong."):
        assert text in shown.out


def test_plans_that_differ_are_wrong(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "PLANS", "0" * 64)
    found = run("doctor", "--quiet")
    assert found.code == 1
    assert "Wrong: Plans differ from those of wlb" in run("doctor").out


def test_a_package_that_is_too_old_is_wrong_and_a_trainer_is_shown(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"rich": "12.0", "transformers": "4.57.0"}
    monkeypatch.setattr(checkup, "version", lambda name: old.get(name) or version(name))
    found = run("doctor")
    assert found.code == 1
    assert 'Wrong: rich 12.0: >=13.6 is needed; run: pip install "rich>=13.6"' in " ".join(found.out.split())
    assert "4.57.0" in found.out
    assert "Wrong: transformers" not in found.out


def test_attention_is_right_and_a_wrong_kernel_is_seen(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from wlb.torch.attention import kernels

    tried = run("doctor", "--json").json["attention"]
    found = {(one["device"], one["kernel"], one["dtype"]) for one in tried}
    assert {("cpu", kernel, "float32") for kernel in ("CpuFlashKernel", "ReferenceKernel")} <= found
    assert all(one["right"] and 0 < one["forward"] < one["allowed"] for one in tried)

    right = kernels.ReferenceKernel.forward

    def shifted(self: Any, q: Any, k: Any, v: Any, call: Any) -> Any:
        out, lse = right(self, q, k, v.roll(1, 0), call)
        return out, lse

    monkeypatch.setattr(kernels.ReferenceKernel, "forward", shifted)
    found = run("doctor")
    assert found.code == 1
    assert "Wrong: ReferenceKernel on cpu in float32 is off by" in found.out


def test_attention_that_fails_is_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from wlb.torch.attention import kernels

    def fails(*_: object) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(kernels.CpuFlashKernel, "forward", fails)
    found = " ".join(run("doctor").out.split())
    assert "Wrong: Attention failed after 0 kernels: RuntimeError: no kernel image is available" in found


@pytest.mark.parametrize("broken", ["raise ImportError('undefined symbol: x')", "import wlb_no_such_package"])
def test_a_kernel_that_cannot_be_imported_is_wrong(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "flash_attn_interface.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    [found] = [text for text in checkup.broken_kernels() if text.startswith("flash_attn_interface")]
    assert "is installed and cannot be imported" in found


def test_flash_attn_4_is_no_broken_flash_attn_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    assert not list(checkup.broken_kernels())
    sys.modules.pop("flash_attn", None)


def test_flash_attn_4_without_its_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 4 puts files into the package of flash-attn 2. That flash-attn 2 then does not run is no fault."""
    pytest.importorskip("torch")
    interface = tmp_path / "flash_attn" / "cute" / "interface.py"
    interface.parent.mkdir(parents=True)
    interface.write_text("import a_compiler_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    assert not list(checkup.broken_kernels())
    found = tmp_path / "flash_attn_4-4.0.0b36.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n")
    [named] = checkup.broken_kernels()
    assert named.startswith("flash_attn.cute.interface is installed and cannot be imported: No module named 'a_comp")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        sys.modules.pop(name)
