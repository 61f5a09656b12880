"""The package holds what users call: every room is named here, and nothing lies in one but code and its data.

Run against an installed wheel, as `make test` does, this says what is in the wheel.
"""

from pathlib import Path

import wlb

PACKAGE = Path(wlb.__file__).parent
ROOMS = {"_results", "cli", "cluster", "integrations", "profile", "simulation", "torch"}
FILES = {
    "__init__.py",
    "_attach.py",
    "_arrays.py",
    "_choices.py",
    "_core.pyi",
    "_errors.py",
    "_seal.py",
    "audit.py",
    "filling.py",
}
FILES |= {"ledger.py", "py.typed", "testing.py", "timings.py"}
TEMPLATES = Path("cli", "output", "templates")


def test_every_room_is_named() -> None:
    found = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    engine = {name for name in found if name.startswith("_core.") and not name.endswith(".pyi")}
    assert len(engine) == 1
    assert found - engine == ROOMS | FILES


def test_rooms_hold_code_and_shipped_data_alone() -> None:
    files = [path.relative_to(PACKAGE) for room in ROOMS for path in (PACKAGE / room).rglob("*") if path.is_file()]
    others = {path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts}
    profiles = {path for path in others if path.suffix == ".json" and path.parts[0] == "profile"}
    assert {path for path in others - profiles if path.parent != TEMPLATES} == set()
