"""What is proven once is proven again as soon as anything about it differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.proven import Proven, files_in


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a" / "inner").mkdir(parents=True)
    (tmp_path / "a" / "weights").write_bytes(b"12")
    (tmp_path / "a" / "inner" / "state").write_bytes(b"34")
    return tmp_path


def proofs(proven: Proven[bytes], root: Path, name: str = "a") -> int:
    """How many proofs one question takes."""
    made: list[bytes] = []

    def prove() -> bytes:
        made.append(b"".join(path.read_bytes() for path in sorted(files_in(root))))
        return made[-1]

    found = proven.of(files_in(root / "a"), root, name, prove)
    assert not made or found == made[0]
    return len(made)


def test_the_same_files_are_proven_once(root: Path) -> None:
    proven: Proven[bytes] = Proven()
    assert [proofs(proven, root), proofs(proven, root)] == [1, 0]
    (root / "beside").write_bytes(b"5")
    assert proofs(proven, root) == 0


def test_a_byte_a_name_or_a_file_more_is_proven_again(root: Path) -> None:
    proven: Proven[bytes] = Proven()
    inner = root / "a" / "inner"
    assert proofs(proven, root) == 1
    (inner / "state").write_bytes(b"35")
    assert proofs(proven, root) == 1
    (inner / "state").rename(inner / "other")
    assert proofs(proven, root) == 1
    (inner / "more").touch()
    assert proofs(proven, root) == 1
    (root / "a" / "weights").write_bytes(b"123")
    assert proofs(proven, root) == 1
    assert proofs(proven, root, "b") == 1


def test_a_proof_that_fails_is_made_again(root: Path) -> None:
    proven: Proven[bytes] = Proven()

    def fail() -> bytes:
        raise AssertionError

    for _ in range(2):
        with pytest.raises(AssertionError):
            proven.of(files_in(root / "a"), root, "a", fail)
    assert proofs(proven, root) == 1
