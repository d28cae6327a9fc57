"""Result files are written whole or not at all, and refused where they cannot be written."""

from __future__ import annotations

import errno

import pytest

from draftsmith.inference.console import user_errors
from draftsmith.inference.whole_file import check_writable, write_whole
from draftsmith.speculators.errors import ConfigError
from tests.support.disks import full_disk
from tests.support.errors import raises_at


def test_write_whole_without_room_keeps_the_old_file_and_leaves_nothing_beside(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with full_disk(), pytest.raises(OSError) as error:
        write_whole(path, "x" * 1000)
    assert error.value.filename == str(path)
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_check_writable_without_room_is_refused(tmp_path):
    path = tmp_path / "a.json"
    with full_disk(), raises_at(ConfigError, f"--out {path}"):
        check_writable("--out", path)
    assert not [*tmp_path.iterdir()]


def test_files_beside_a_result_are_kept(tmp_path):
    neighbour = tmp_path / "a.json.tmp"
    neighbour.write_text("of the user")
    check_writable("--out", tmp_path / "a.json")
    write_whole(tmp_path / "a.json", "new")
    assert neighbour.read_text() == "of the user"
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "a.json.tmp"}


@pytest.mark.parametrize("place", ["folder", "file/a.json", "file/folder/a.json"])
def test_check_writable_of_what_cannot_be_a_file_is_refused(tmp_path, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with raises_at(ConfigError, f"--out {tmp_path / place}"):
        check_writable("--out", tmp_path / place)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EISDIR])
def test_user_errors_of_a_file_name_its_path(number, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"), user_errors():
        raise OSError(number, "a reason", f"{tmp_path / 'a.json'}")
    printed = capsys.readouterr().err
    assert f"{tmp_path / 'a.json'}: a reason" in printed
    assert ("MB free" in printed) == (number in (errno.ENOSPC, errno.EROFS))


def test_user_errors_leave_errors_of_a_network_their_traceback():
    with pytest.raises(ConnectionResetError), user_errors():
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
