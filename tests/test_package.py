"""The wheel holds what users call: every room is named here, and nothing lies in one but code and its data.

Run against an installed wheel, as `make test` does, this says what is in the wheel.
"""

from pathlib import Path

import pytest

import wlb
import wlb_tools

LIBRARY, TOOLS = (Path(house.__file__).parent for house in (wlb, wlb_tools))
ROOMS = {
    LIBRARY: {"_results", "integrations", "models", "profiles", "reading", "torch"},
    TOOLS: {"cluster", "command", "profiling", "simulation"},
}
FILES = {
    LIBRARY: {
        "__init__.py",
        "_arrays.py",
        "_choices.py",
        "_core.pyi",
        "_errors.py",
        "_named.py",
        "_seal.py",
        "_shown.py",
        "_warned.py",
        "ledger.py",
        "py.typed",
        "rl.py",
        "testing.py",
        "timings.py",
    },
    TOOLS: {"__init__.py", "__main__.py", "audit.py", "plotting.py", "py.typed"},
}
TEMPLATES = Path("command", "output", "templates")
houses = pytest.mark.parametrize("house", [LIBRARY, TOOLS], ids=lambda house: house.name)


@houses
def test_every_room_is_named(house: Path) -> None:
    found = {path.name for path in house.iterdir() if path.name != "__pycache__"}
    engine = {name for name in found if name.startswith("_core.") and not name.endswith(".pyi")}
    assert len(engine) == (house == LIBRARY)
    assert found - engine == ROOMS[house] | FILES[house]


@houses
def test_rooms_hold_code_and_shipped_data_alone(house: Path) -> None:
    files = [path.relative_to(house) for room in ROOMS[house] for path in (house / room).rglob("*") if path.is_file()]
    others = {path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts}
    profiles = {path for path in others if path.suffix == ".json" and path.parts[0] == "profiles"}
    assert {path for path in others - profiles if path.parent != TEMPLATES} == set()
