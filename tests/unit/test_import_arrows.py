"""Who may import whom, and what the core costs to import."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPOSITION_ROOT = {"accelerator.py", "audit_command.py", "cli.py", "demo.py", "rollout_command.py"}
CORE_MAY_IMPORT = {"rlspec", "numpy", "packaging", "pydantic", "yaml", "prometheus_client"}
OPTIONAL = {"rich", "matplotlib", "jinja2", "scipy"}
"""Imported inside functions of the core that print, draw or test; the extras `report` and `audit`."""
MAX_IMPORT_SECONDS = 0.3

BLOCKED = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {"torch", "vllm", "ray", "transformers", "rollout", "rich", "matplotlib"}:
            raise ImportError(name + " must not be imported by the core")
sys.meta_path.insert(0, Refuse())
"""


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def third_party(names: set[str]) -> set[str]:
    return {name for name in names if name not in sys.stdlib_module_names}


@pytest.mark.parametrize("path", sorted((ROOT / "rlspec").rglob("*.py")), ids=lambda path: path.name)
def test_core_imports_only_what_it_may(path: Path) -> None:
    if path.name in COMPOSITION_ROOT:
        allowed = CORE_MAY_IMPORT | {"rollout"}
        assert third_party(imports(path, top_level_only=True)) <= CORE_MAY_IMPORT
    else:
        allowed = CORE_MAY_IMPORT | OPTIONAL
        assert third_party(imports(path, top_level_only=True)) <= CORE_MAY_IMPORT
    assert third_party(imports(path)) <= allowed


def test_rollout_never_imports_the_composition_root_or_the_trainer() -> None:
    for path in (ROOT / "rollout").rglob("*.py"):
        text = path.read_text()
        assert not imports(path) & {"drafter_updates", "integrations"}, path
        for name in COMPOSITION_ROOT:
            assert f"rlspec.{name.removesuffix('.py')} import" not in text, path


def test_core_loads_where_torch_and_vllm_cannot_be_imported() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "rlspec").rglob("*.py"))
    ]
    script = (
        BLOCKED + f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\nprint('loaded')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "loaded", done.stderr


def test_import_is_fast_and_loads_no_engine() -> None:
    script = (
        "import sys, time; started = time.perf_counter(); import rlspec; "
        "seconds = time.perf_counter() - started; "
        "assert not {'torch', 'vllm'} & set(sys.modules); print(seconds)"
    )
    seconds = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
        for _ in range(11)
    ]
    assert statistics.median(seconds[1:]) <= MAX_IMPORT_SECONDS


def test_public_names() -> None:
    import rlspec

    assert set(rlspec.__all__) == {
        "Accelerator",
        "Config",
        "Prompt",
        "RlspecError",
        "Rollout",
        "load_config",
        "parse_config",
    }
    for name in rlspec.__all__:
        assert getattr(rlspec, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = rlspec.nothing


def test_files_say_what_they_own() -> None:
    for folder in ("rlspec", "rollout"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.read_text().startswith('"""'), path
