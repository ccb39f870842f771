import re

import pytest

from specjax.data import Document, read_folder, split, standard_library


@pytest.fixture(scope="module")
def documents():
    return standard_library()


def test_the_standard_library_is_real_text_in_order(documents):
    names = [d.name for d in documents]
    assert names == sorted(set(names))
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert sum(len(d.text) for d in documents) > 5_000_000
    excluded = "test|tests|idle_test|encodings|site-packages|pydoc_data|__pycache__"
    assert not [n for n in names if re.search(rf"(^|/)({excluded})/", n)]


def test_a_limit_keeps_the_same_documents_every_time(documents):
    few = standard_library(max_chars=300_000)
    assert few == standard_library(max_chars=300_000)
    assert 200_000 < sum(len(d.text) for d in few) <= 300_000
    assert {d.name for d in few} < {d.name for d in documents}
    assert len({d.name[0] for d in few}) > 5  # not only the start of the alphabet


def test_an_installation_without_sources_says_so(tmp_path):
    (tmp_path / "os.pyc").write_bytes(b"0")
    with pytest.raises(ValueError, match="has no standard library sources in"):
        standard_library(root=tmp_path)
    with pytest.raises(ValueError, match="has no standard library sources in"):
        standard_library(root=tmp_path / "absent")


def test_the_split_goes_by_name_only(documents):
    training, held_out = split(documents, 0.05)
    assert {d.name for d in training}.isdisjoint(d.name for d in held_out)
    assert len(training) + len(held_out) == len(documents)
    assert 0.02 < len(held_out) / len(documents) < 0.09
    some = [Document(d.name, "other text") for d in documents[::3]]
    held = {d.name for d in held_out}
    assert {d.name for d in split(some)[1]} == {d.name for d in some} & held
    assert split(documents, 0.0)[1] == []
    assert split(documents, 1.0)[0] == []


def test_the_split_is_the_same_on_every_machine():
    names = [f"{i}.py" for i in range(40)]
    _, held_out = split([Document(n, "x") for n in names], 0.1)
    assert [d.name for d in held_out] == HELD_OUT


# sha256 of the name, as a share, below 0.1.
HELD_OUT = ["8.py", "13.py", "14.py", "27.py", "35.py"]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ValueError, match="held_out must be a share"):
        split([], share)


def test_read_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "no.txt").write_text("no")
    (tmp_path / "sub" / "b.md").write_bytes(b"two\r\nlines")
    (tmp_path / "a.txt").write_text("é", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "image.png").write_bytes(b"")
    assert read_folder(tmp_path) == [
        Document("a.txt", "é"),
        Document("latin.py", "# coding: latin-1\n# é"),
        Document("sub/b.md", "two\nlines"),
    ]
    with pytest.raises(ValueError, match=r"holds no text in files named \*\.rst"):
        read_folder(tmp_path, suffixes=[".rst"])
    with pytest.raises(ValueError, match="does not exist"):
        read_folder(tmp_path / "absent")
