"""mfload in the place of the package safetensors, and the original back again."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import safetensors
import safetensors.numpy as original

import mfload
from mfload.compat import patch
from mfload.compat.safetensors import SafetensorError, numpy, safe_open


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that has imported the original in all ways."""
    made = ModuleType("some_library")
    code = """
import safetensors
import safetensors.numpy as by_module
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as renamed
"""
    exec(code, vars(made))
    monkeypatch.setitem(sys.modules, "some_library", made)
    return made


def test_names_that_were_imported_before_are_mfloads_and_then_the_originals(
    library: ModuleType,
) -> None:
    former = dict(vars(library))
    with patch():
        assert library.renamed is library.by_module.load_file is numpy.load_file
        assert library.safe_open is library.safetensors.safe_open is safe_open
        assert sys.modules["safetensors.numpy"] is numpy
        assert pickle.loads(pickle.dumps(library.renamed)) is library.renamed  # For pools.
    assert vars(library) == former
    assert sys.modules["safetensors"] is safetensors is former["safetensors"]
    assert sys.modules["safetensors.numpy"] is original
    assert numpy.__spec__.name == "mfload.compat.safetensors.numpy"


def test_what_is_imported_meanwhile_is_mfloads_and_then_the_originals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_library.py").write_text("from safetensors.numpy import load_file, save_file")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("safetensors", "safetensors.numpy"):
        monkeypatch.delitem(sys.modules, name)
    with patch():
        import late_library  # pyright: ignore

        assert late_library.load_file is numpy.load_file
        assert "safetensors" in sys.modules
    assert late_library.load_file.__module__ == "safetensors.numpy"
    del sys.modules["late_library"]


def test_names_that_are_bound_meanwhile_are_the_originals_again(library: ModuleType) -> None:
    with patch():
        exec("from safetensors.numpy import save_file as late", vars(library))
        assert library.late is numpy.save_file
        library.mine = numpy.load_file  # pyright: ignore
    assert library.late is original.save_file
    exec("from mfload.compat.safetensors.numpy import load_file as kept", vars(library))
    with patch():
        pass
    assert library.kept is numpy.load_file  # It was there before.


def test_other_threads_import_while_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, wrong = threading.Event(), list[BaseException]()

    def work() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            sys.modules[f"some_library_{number}"] = ModuleType("some_library")
            if number % 500 == 0:
                for each in range(number - 499, number + 1):
                    del sys.modules[f"some_library_{each}"]

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(30):
            with patch():
                pass
    except RuntimeError as error:
        wrong.append(error)
    ended.set()
    thread.join()
    for name in [name for name in sys.modules if name.startswith("some_library_")]:
        del sys.modules[name]
    assert not wrong
    assert sys.modules["safetensors.numpy"] is original


def test_the_module_of_the_originals_code(library: ModuleType, tmp_path: Path) -> None:
    exec("import safetensors._safetensors_rust as rust", vars(library))
    former = dict(vars(library))
    (tmp_path / "x").write_bytes(b"nothing of the kind")
    with patch():
        import safetensors._safetensors_rust as imported
        from safetensors._safetensors_rust import SafetensorError as by_name

        assert library.rust is imported is sys.modules["safetensors"]._safetensors_rust  # pyright: ignore
        assert imported.safe_open is safe_open
        names = {name for name in vars(former["rust"]) if not name.startswith("__")}
        assert names <= vars(imported).keys()
        for kind in (by_name, imported.SafetensorError, former["rust"].SafetensorError):
            with pytest.raises(kind):
                library.safe_open(tmp_path / "x", "np")
        assert library.safetensors.__version__ == imported.__version__ == safetensors.__version__
    assert vars(library) == former


def test_the_version_is_that_of_what_is_installed(tmp_path: Path) -> None:
    """Of another one than mfload stands for, too; without the package, it is that one."""
    code = """
import sys
from mfload.compat import patch
with patch():
    import safetensors
    import safetensors._safetensors_rust
    print(safetensors.__version__, safetensors._safetensors_rust.__version__)
"""
    fake = tmp_path / "safetensors"
    fake.mkdir()
    text = "class SafetensorError(Exception): ...\n__version__ = '0.99.1'\n"
    for source, wanted in ((text, "0.99.1 0.99.1"), ("raise ImportError", "0.8.0 0.8.0")):
        (fake / "__init__.py").write_text(source)
        given = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        command = [sys.executable, "-B", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=given)
        assert done.stdout.strip() == wanted


def test_patches_nest_and_end_in_any_order(library: ModuleType) -> None:
    former = library.safe_open
    first, second = patch(), patch()
    first.undo()
    first.undo()
    assert library.safe_open is safe_open
    with second:
        pass
    assert library.safe_open is former
    assert not any("_Finder" in repr(finder) for finder in sys.meta_path)


def test_threads_patch_at_once(library: ModuleType) -> None:
    former, wrong = library.safe_open, list[object]()

    def work() -> None:
        for _ in range(5):
            with patch():
                if library.safe_open is not safe_open:
                    wrong.append(library.safe_open)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert library.safe_open is former


def test_the_originals_error_catches_mfloads(library: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nothing of the kind")
    with patch():
        for kind in (library.SafetensorError, safetensors.SafetensorError, mfload.MfloadError):
            with pytest.raises(kind) as caught:
                library.safe_open(tmp_path / "x", "np")
    assert type(caught.value) is SafetensorError
    assert caught.value.file == str(tmp_path / "x")
    assert np.__version__
