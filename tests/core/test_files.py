"""Only regular files up to a limit are opened, and no open waits for a writer."""

import os
import signal
import socket
import stat

import pytest

from onchip.core.files import check_folder, create_private, open_regular, read_regular


@pytest.fixture(autouse=True)
def soon():
    """Interrupt an open that waits."""

    def late(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["fifo", "link to a fifo", "socket", "device", "folder"])
def other(request, tmp_path, monkeypatch):
    """Anything but a regular file."""
    path = tmp_path / "other"
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "link to a fifo":
        os.mkfifo(tmp_path / "fifo")
        path.symlink_to(tmp_path / "fifo")
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            monkeypatch.chdir(tmp_path)  # the path of a socket must be short
            listening.bind("other")
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


def test_only_regular_files_are_opened(other, tmp_path):
    for call in (open_regular, lambda file: read_regular(file, 100)):
        with pytest.raises(ValueError, match="other"):
            call(other)
    if other.is_dir():
        check_folder(tmp_path)
    else:
        with pytest.raises(ValueError, match="is not a regular file"):
            check_folder(tmp_path)


def test_a_folder_is_checked_one_level_down(tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    check_folder(tmp_path)
    os.mkfifo(tmp_path / "inside" / "fifo")
    with pytest.raises(ValueError, match="inside.fifo is not a regular file"):
        check_folder(tmp_path)


def test_regular_files_are_read_up_to_a_limit(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"12345")
    link.symlink_to(file)
    assert read_regular(file, 5) == read_regular(link, 9) == b"12345"
    with pytest.raises(ValueError, match="file has 5 bytes, more than 4"):
        read_regular(file, 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 4)


def test_a_private_file_is_readable_by_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        with create_private(tmp_path / "new") as file:
            file.write(b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        create_private(tmp_path / "new")
