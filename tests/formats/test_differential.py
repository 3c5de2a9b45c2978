"""mfload against the reference: what that loads loads the same, what it refuses is refused.

CI mutates some hundreds of files; MFLOAD_SLOW=1 many more.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import hypothesis
import mutations
import pytest
import reference
import safetensors
from hypothesis import strategies as st

import mfload
from mfload import dtypes, errors

SLOW = bool(os.environ.get("MFLOAD_SLOW"))


def _settings(examples: int, slow: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=slow if SLOW else examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("differential") / "f.safetensors"


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def tensors(draw: st.DrawFn) -> reference.Tensor:
    dtype = draw(st.sampled_from(sorted(reference.WRITTEN)))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    if dtype == "F4":
        shape.append(draw(st.integers(0, 3)) * 2)
    nbytes = dtypes.TABLE[dtype].size_of(shape) or 0
    seed = draw(st.integers(0, 2**16))
    return reference.Tensor(dtype, tuple(shape), random.Random(seed).randbytes(nbytes))


@st.composite
def checkpoints(draw: st.DrawFn) -> bytes:
    """A file by the reference writer."""
    held = draw(st.dictionaries(names, tensors(), max_size=4))
    strings = draw(st.none() | st.dictionaries(names, names, min_size=not held, max_size=2))
    return reference.write(held, strings)


@_settings(100, 4500)
@hypothesis.given(raw=checkpoints())
def test_what_the_reference_writes_loads_to_the_same_bytes(raw: bytes, scratch: Path) -> None:
    scratch.write_bytes(raw)
    assert reference.ours(scratch) == reference.read(raw)
    with safetensors.safe_open(scratch, "numpy") as theirs, mfload.open(scratch) as opened:
        assert opened.metadata() == theirs.metadata()
        assert opened.keys() == sorted(theirs.keys())


@pytest.mark.timeout(1800 if SLOW else 100)
@_settings(500, 60_000)
@hypothesis.given(raw=checkpoints(), rng=st.randoms(use_true_random=False))
def test_damaged_headers_are_judged_as_the_reference_judges(
    raw: bytes, rng: random.Random, scratch: Path
) -> None:
    assert reference.disagreement(mutations.mutate(rng, raw), scratch) is None


@pytest.mark.parametrize("mutation", mutations.STRUCTURE, ids=lambda f: f.__name__)
def test_each_mutation_both_spoils_files_and_leaves_some_whole(
    mutation: object, tmp_path: Path
) -> None:
    """A mutation that never got past the first check would test nothing behind it."""
    outcomes: set[bool] = set()
    for seed in range(400):
        rng = random.Random(seed)
        raw = reference.write(
            {
                name: reference.Tensor("F32", (n,), rng.randbytes(4 * n))
                for n, name in enumerate("abc")
            },
            {"k": "v"},
        )
        header = mutations.parse(raw[8 : 8 + raw[0]].decode())
        mutation(rng, header)  # type: ignore[operator]
        damaged = reference.join(mutations.dump(header), raw[8 + raw[0] :])
        assert reference.disagreement(damaged, tmp_path / "f") is None
        try:
            reference.read(damaged)
            outcomes.add(True)
        except safetensors.SafetensorError:
            outcomes.add(False)
        if len(outcomes) == 2:
            return
    # Some can't spoil a file (order never matters), and `offsets` can't leave one whole.
    assert outcomes == {mutation is mutations.shuffle}


class TestTheJudgeSeesWhatItShould:
    """`disagreement` itself, with an mfload that is wrong on purpose."""

    FILE = reference.join('{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab")

    def judge(self, raw: bytes, tmp_path: Path) -> str | None:
        return reference.disagreement(raw, tmp_path / "f.safetensors")

    def test_other_bytes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.judge(self.FILE, tmp_path) is None
        true = reference.ours
        monkeypatch.setattr(
            reference, "ours", lambda *a: {n: t._replace(data=b"ba") for n, t in true(*a).items()}
        )
        assert "differs" in str(self.judge(self.FILE, tmp_path))

    def test_too_strict(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise errors.HeaderError("no")

        monkeypatch.setattr(mfload, "open", refuse)
        assert "mfload refuses" in str(self.judge(self.FILE, tmp_path))

    def test_too_kind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        good, true = tmp_path / "good", mfload.open
        good.write_bytes(self.FILE)
        monkeypatch.setattr(mfload, "open", lambda _: true(good))
        assert "the reference refuses" in str(self.judge(self.FILE + b"!", tmp_path))

    def test_too_kind_beside_an_unknown_dtype(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unknown = self.FILE.replace(b"U8", b"U7")
        assert self.judge(unknown, tmp_path) is None
        good, true = tmp_path / "good", mfload.open
        good.write_bytes(unknown)
        monkeypatch.setattr(mfload, "open", lambda _: true(good))
        assert "malformed beside" in str(self.judge(unknown + b"!", tmp_path))
