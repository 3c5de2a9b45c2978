"""What importing mfload brings in, and what it gives out."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mfload
from mfload import extras, frameworks

MODULES = {"compat", "errors", "ondemand"}  # Of the public names, those that are modules.
FRAMEWORKS = ("jax", "jaxlib", "torch", "tensorflow", "paddle", "cupy", "flax", "keras")


def _run(code: str, *arguments: str) -> str:
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_importing_mfload_imports_no_framework_and_little_else() -> None:
    loaded = set(_run("import sys, mfload; print('\\n'.join(sys.modules))").split())
    assert not loaded & {*FRAMEWORKS, "tqdm", "safetensors", "numpy", "ml_dtypes"}
    assert {name for name in loaded if name.startswith("mfload")} == {"mfload"}


def test_the_public_names_import_no_framework() -> None:
    code = """
        import sys, mfload
        for name in mfload.__all__:
            getattr(mfload, name)
        print("\\n".join(sys.modules))
    """
    loaded = set(_run(code).split())
    assert not loaded & {*FRAMEWORKS, "tqdm", "safetensors"}
    assert "mfload.api" in loaded


def test_the_names_of_ondemand_import_no_framework() -> None:
    code = """
        import sys, mfload
        for name in mfload.ondemand.__all__:
            assert callable(getattr(mfload.ondemand, name))
        assert dir(mfload.ondemand) == sorted(mfload.ondemand.__all__)
        assert set(mfload.ondemand._WHERE) == set(mfload.ondemand.__all__)
        try:
            mfload.ondemand.nonsense
        except AttributeError as error:
            assert "nonsense" in str(error)
        print("\\n".join(sys.modules))
    """
    loaded = set(_run(code).split())
    assert not loaded & {*FRAMEWORKS, "tqdm", "safetensors", "matplotlib"}
    assert "mfload.ondemand.report" in loaded


def test_numpy_needs_numpy_alone(tmp_path: Path) -> None:
    import numpy as np
    import samples

    path = samples.save(tmp_path / "a.safetensors", {"a": np.arange(5)})
    code = """
        import sys, mfload
        assert mfload.load(sys.argv[1], framework="numpy")["a"].sum() == 10
        print("\\n".join(sys.modules))
    """
    loaded = set(_run(code, str(path)).split())
    assert not loaded & {*FRAMEWORKS, "tqdm", "safetensors"}
    # What joins processes has no part in a load without a mesh.
    assert not [name for name in loaded if name.startswith("mfload.mesh.")]


# What a load imports beside the adapter: each module costs some 0.15 ms, a dataclass 0.5 to 1, a
# named tuple 0.1.
ROOMS = {
    "formats": ("checkpoint", "discovery", "safetensors", "strict_json"),
    "frameworks": ("base",),
    "io": ("buffers", "engine", "pread", "route"),
    "loading": ("allocate", "execute", "session"),
    "planning": ("blocks", "layout", "memory", "plan", "reads", "request"),
    "sources": ("base", "local"),
}
ROOT = ("api", "dlpack", "dtypes", "errors", "index", "options", "runtime")
PLAIN = {"mfload", *(f"mfload.{name}" for name in (*ROOT, *ROOMS))} | {
    f"mfload.{room}.{name}" for room, names in ROOMS.items() for name in names
}
ALREADY = ("copy", "dataclasses")  # By most frameworks.
ADAPTERS = {
    "numpy": ("numpy_adapter",),
    "torch": ("torch_adapter", "private_api", "traits"),
    "jax": ("jax_adapter", "jax_memory", "private_api", "traits"),
}


@pytest.mark.parametrize("framework", ADAPTERS)
def test_a_load_imports_what_it_uses(tmp_path: Path, framework: str) -> None:
    """Without options: no module of devices, meshes, checks, saving, key maps or reports."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"no {framework}")
    safetensors = pytest.importorskip("safetensors.numpy")
    import numpy as np

    path = str(tmp_path / "a.safetensors")
    safetensors.save_file({"a": np.arange(5, dtype=np.float32)}, path, {"format": "pt"})
    code = """
        import importlib, sys, numpy, ml_dtypes
        path, framework = sys.argv[1:]
        importlib.import_module({"jax": "jax.numpy"}.get(framework, framework))
        before = set(sys.modules)
        import mfload
        assert mfload.load(path, framework)["a"].sum() == 10
        print("\\n".join(set(sys.modules) - before))
    """
    loaded = set(_run(code, path, framework).split())
    own = {name for name in loaded if name.startswith("mfload")}
    assert own == PLAIN | {f"mfload.frameworks.{name}" for name in ADAPTERS[framework]}
    if framework == "numpy":
        roots = {name.partition(".")[0].lstrip("_") for name in loaded - own}
        assert roots <= {
            "array",
            "copy",
            "dataclasses",
            "errno",
            "future__",
            "gc",
            "importlib",
            "mmap",
        }


def test_only_the_framework_asked_for_is_imported(tmp_path: Path) -> None:
    """Even where others are at hand: whatever else is asked for fails on import."""
    import numpy as np
    import samples

    path = samples.save(tmp_path / "a.safetensors", {"a": np.arange(5)})
    code = """
        import sys
        for name in ("jax", "torch", "tensorflow", "paddle", "cupy"):
            sys.modules[name] = None
        import mfload
        with mfload.open(sys.argv[1]) as opened:
            assert opened.get_tensor("a").sum() == 10
        print("done")
    """
    assert _run(code, str(path)) == "done"


IMPORTED = {"annotations", "importlib", "sys", "TYPE_CHECKING", "Any"}


def test_all_is_exact() -> None:
    public = {name for name in dir(mfload) if not name.startswith("_") and name not in IMPORTED}
    # Modules become attributes of their package once somebody has imported them.
    submodules = {path.stem for path in Path(mfload.__path__[0]).iterdir()}
    assert public - (submodules - set(mfload.__all__)) == set(mfload.__all__)
    assert sorted(mfload.__all__) == mfload.__all__
    assert mfload._WHERE.keys() == set(mfload.__all__) - MODULES


def test_what_is_typed_is_what_there_is() -> None:
    """The names under TYPE_CHECKING, which tools see, are those that __getattr__ gives."""
    tree = ast.parse(inspect.getsource(mfload))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            seen[alias.name] = node.module or ""
    assert seen == {**mfload._WHERE, **dict.fromkeys(MODULES, "mfload")}
    for name, module in mfload._WHERE.items():
        public = inspect.unwrap(getattr(mfload, name))
        assert public is getattr(importlib.import_module(module), name)


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        mfload.nonsense  # pyright: ignore


@pytest.mark.parametrize("name", frameworks.NAMES)
def test_a_missing_framework_says_how_to_get_it(name: str) -> None:
    code = """
        import sys
        name, module = sys.argv[1:]
        import mfload, mfload.api, mfload.frameworks as frameworks
        real = frameworks.importlib.util.find_spec
        frameworks.importlib.util.find_spec = lambda x: None if x == module else real(x)
        try:
            frameworks.get(name)
        except mfload.errors.FrameworkMissingError as error:
            assert isinstance(error, ImportError)
            print(error)
    """
    said = _run(code, name, name)
    command = extras.install("cuda13" if name == "cupy" else name)
    assert f"{name} is not installed; {command} [" in said


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy", "numpy"),
        ("torch.nn", "torch"),
        ("jax.numpy", "jax"),
        ("flax.nnx", "jax"),
        ("paddle", "paddle"),
        ("tensorflow.keras", "tensorflow"),
    ],
)
def test_a_framework_is_named_by_its_module(module: str, name: str) -> None:
    assert frameworks.resolve(ModuleType(module)) == name


def test_a_module_that_is_no_framework() -> None:
    with pytest.raises(mfload.errors.UsageError, match=r"unknown framework.*found: pytest"):
        frameworks.resolve(pytest)


def _documented() -> list[Any]:
    found: list[Any] = []
    for name in mfload.__all__:
        thing = getattr(mfload, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            found.append(pytest.param(thing, id=name))
    opened = importlib.import_module("mfload.loading.lazy")
    for kind in (opened.LazyCheckpoint, opened.TensorSlice):
        for name, method in vars(kind).items():
            if callable(method) and (not name.startswith("_") or name == "__getitem__"):
                found.append(pytest.param(method, id=f"{kind.__name__}.{name}"))
    return found


@pytest.mark.parametrize("thing", _documented())
def test_public_names_are_documented(thing: Any) -> None:
    doc = inspect.getdoc(thing)
    assert doc
    if inspect.isfunction(thing) and thing.__module__ == "mfload.api":
        for section in ("Returns:", "Raises:"):
            assert section in doc
        if thing.__name__ in ("load", "save"):  # The others refer to `load`.
            for name in inspect.signature(thing).parameters:
                assert f"    {name}: " in doc, name
