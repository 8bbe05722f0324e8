from __future__ import annotations

import json
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbtide.__main__ import main
from ebbtide.platform import signals

Ebbtide = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ebbtide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ebbtide]:
    """``ebbtide data prepare ARGUMENTS`` in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ebbtide", "data", "prepare", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    with signals.kept():
        yield run


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "tests").mkdir(parents=True)
    for number in range(20):
        (folder / f"{number}.py").write_text(f"print({number})\n" * 5)
    (folder / "tests/test_it.py").write_text("assert True\n")
    (folder / "notes.md").write_text("# Notes\n")
    (folder / "broken.py").write_bytes(b"\xff\xfe")
    return folder


def test_prepare(corpus: Path, tmp_path: Path, ebbtide: Ebbtide) -> None:
    out = str(tmp_path / "out")
    arguments = [str(corpus), "--glob", "**/*.py", "--exclude", "tests", "--vocab-size", "270"]
    code, stdout, stderr = ebbtide(*arguments, "--out", out, "--json")
    assert code == 0
    report = json.loads(stdout)
    assert report["uri"] == out
    assert not report["already_prepared"]
    assert report["documents"] == 20
    assert report["skipped"] == {"not_utf8": 1}
    assert report["splits"]["validation"]["documents"] >= 1
    assert "broken.py: is not valid UTF-8: skipped" in stderr

    code, stdout, _ = ebbtide(*arguments, "--out", out)
    assert code == 0
    assert "was already prepared" in stdout

    code, stdout, stderr = ebbtide(*arguments, "--out", out, "--seed", "1")
    assert (code, stdout) == (4, "")
    assert "already holds a dataset of other text or settings" in stderr

    code, _, stderr = ebbtide(*arguments, "--out", str(tmp_path / "strict"), "--strict")
    assert code == 3
    assert "--strict" in stderr


def test_usage(tmp_path: Path, ebbtide: Ebbtide) -> None:
    out = ["--out", str(tmp_path / "out")]
    code, _, stderr = ebbtide(str(tmp_path / "nothing"), *out)
    assert code == 3
    assert "nothing: is not there" in stderr
    code, _, stderr = ebbtide(str(tmp_path), *out, "--validation-fraction", "1")
    assert code == 2
    assert "--validation-fraction" in stderr
    assert ebbtide(*out)[0] == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--out", ""),
        ("--seed", "9" * 23),
        ("--vocab-size", "9" * 23),
        ("--vocab-size", str(2**20 + 1)),
        ("--tokenizer", ""),
        ("--tokenizer", "gs://b/x"),
        ("--glob", ""),
        ("--exclude", ""),
        ("--text-column", ""),
        ("--validation-fraction", "nan"),
        ("SOURCE", ""),
        ("SOURCE", "gs://b/x"),
    ],
)
def test_an_impossible_option_is_named_and_nothing_written(
    corpus: Path, tmp_path: Path, ebbtide: Ebbtide, flag: str, value: str
) -> None:
    given = [value] if flag == "SOURCE" else [flag, value]
    code, stdout, stderr = ebbtide(str(corpus), "--out", str(tmp_path / "out"), *given)
    assert (code, stdout) == (2, "")
    assert ("'gs' is not known" if value.startswith("gs") else flag) in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()


def test_help_has_an_example(ebbtide: Ebbtide) -> None:
    code, stdout, _ = ebbtide("--help")
    assert code == 0
    assert "Example" in stdout


def test_as_a_process(corpus: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ebbtide", "data", "prepare", str(corpus)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "--vocab-size", "270"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "nats/token" in done.stdout


def test_ctrl_c_while_the_tokenizer_is_trained(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stdlib = sysconfig.get_path("stdlib")
    command = [sys.executable, "-m", "ebbtide", "data", "prepare", stdlib, "--glob", "*.py"]
    process = subprocess.Popen(
        [*command, "--exclude", "site-packages", "--max-bytes", "6000000", "--out", str(out)],
        stderr=subprocess.PIPE,
    )
    try:
        deadline_s = time.monotonic() + 60
        while not (out / "prepare.incomplete").exists():
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert not (out / "index.json").exists()
