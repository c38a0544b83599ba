"""The layout: imports point to the left only, MPI is touched in one file, heavy libraries keep to
their rooms.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hpcvfl

ROOT = Path(hpcvfl.__file__).parent
LAYERS = ("base", "kernels", "codecs", "transport", "data", "models", "engine", "report", "cli")
MAY_IMPORT = {
    "base": {"base"},
    "kernels": {"base", "kernels"},
    "codecs": {"base", "kernels", "codecs"},
    "transport": {"base", "kernels", "transport"},
    "data": {"base", "kernels", "data"},
    "models": {"base", "kernels", "data", "models"},
    "engine": {"base", "kernels", "codecs", "transport", "data", "models", "engine"},
    "report": {"base", "report"},
    "cli": set(LAYERS) | {"benchmarks"},
    "benchmarks": set(LAYERS) | {"benchmarks"},
}
ROOMS = {
    "mpi4py": {"transport/mpi.py"},
    "torch": {"codecs", "transport", "data", "models", "engine", "benchmarks"},
    "numba": {"kernels", "benchmarks"},
    "matplotlib": {"report"},
    "tqdm": {"report"},
    "tyro": {"overrides.py"},
    "sklearn": {"data"},
    "safetensors": {"engine"},
}


def layer_of(module):
    """ "hpcvfl.codecs.base" -> "codecs"; modules at the top are base, except the command line."""
    parts = module.split(".")[1:]
    if not parts or parts[0] in ("cli", "__main__", "everywhere", "overrides"):
        return "cli" if parts else "base"
    return parts[0] if parts[0] in MAY_IMPORT else "base"


def imports(path):
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files():
    return sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_to_the_left(path):
    module = "hpcvfl." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
    here = layer_of(module)
    for name in imports(path):
        if name.split(".")[0] == "hpcvfl":
            assert layer_of(name) in MAY_IMPORT[here], f"{module} ({here}) imports {name}"


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_libraries_keep_to_their_rooms(path):
    relative = str(path.relative_to(ROOT))
    for name in imports(path):
        rooms = ROOMS.get(name.split(".")[0])
        if rooms:
            assert any(relative == r or relative.startswith(r + "/") for r in rooms), (
                relative,
                name,
            )


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import hpcvfl", ["mpi4py", "torch", "numba", "numpy"]),
        ("import hpcvfl.cli", ["mpi4py", "torch", "numba"]),
        ("import hpcvfl.report.tables, hpcvfl.report.plots", ["mpi4py", "torch"]),
        ("import hpcvfl.codecs.table, hpcvfl.engine.run", ["mpi4py.MPI", "matplotlib"]),
    ],
)
def test_import_stays_light(statement, absent):
    code = f"import sys; {statement}; print([m for m in {absent!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr


def test_no_file_is_longer_than_400_lines():
    long = {
        str(p.relative_to(ROOT)): n for p in files() if (n := len(p.read_text().splitlines())) > 400
    }
    assert long == {}
