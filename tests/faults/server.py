"""A process that has imported everything and forks a child for each command: a start takes seconds, a fork none.

It reads orders as lines of JSON and answers each with one. See `machine.Machine.run` for what is in them.
"""

import ctypes
import gc
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

NEW_NAMESPACE = 0x00020000  # CLONE_NEWNS: mounts that nobody else sees, and that go with the process
CANNOT_MOUNT = 77


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import scenes

    scenes.warm_up()
    os.fsync = lambda handle: None  # `Disk` counts the calls; waiting for a real disk would only take time
    gc.freeze()  # else each child would look through all that was imported, again and again
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answers(json.loads(line))), flush=True)
    os._exit(0)  # taking down all that was imported takes seconds


def _answers(orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Children for all orders, at the same time."""
    children = []
    for order in orders:
        for name in ("out", "err", "facts"):
            (Path(order["told"]) / name).unlink(missing_ok=True)
        children.append(os.fork())
        if children[-1] == 0:
            _be_child(order, Path(order["told"]))
    return [_answer(order, child) for order, child in zip(orders, children, strict=True)]


def _answer(order: dict[str, Any], child: int) -> dict[str, Any]:
    told = Path(order["told"])
    if order["after"] is not None:
        time.sleep(order["after"])
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    facts = json.loads((told / "facts").read_text()) if (told / "facts").exists() else {}
    out, err = ((told / name).read_text() if (told / name).exists() else "" for name in ("out", "err"))
    return {"code": code, "out": out, "err": err, **facts}


def _be_child(order: dict[str, Any], told: Path) -> None:
    """Run the command, and leave without what the parent would do at its end."""
    code = 1
    try:
        for handle, place in ((1, order.get("out") or told / "out"), (2, told / "err")):
            os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), handle)
        folder = Path(order["folder"])
        if order.get("disk") is not None and not _mounted(folder, **order["disk"]):
            os._exit(CANNOT_MOUNT)
        os.chdir(folder)
        code = _run(order, told)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = code or 120  # as Python itself ends then
        os._exit(code)


def _run(order: dict[str, Any], told: Path) -> int:
    import scenes
    from disk import Disk

    disk = Disk(order.get("watched") or order["folder"], order.get("fault"), order.get("at", 0))
    if order.get("watched"):
        disk.watch()
    warnings.simplefilter("default")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if order.get("limit") is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"], unlimited[1]))
    try:
        code = scenes.command(order["arguments"])
    finally:
        disk.fault = None
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        facts = {"operations": disk.count, "tree": tree(Path(order["folder"])) if order.get("tree") else {}}
        (told / "facts").write_text(json.dumps(facts))
    return code


def tree(folder: Path) -> dict[str, str]:
    """All files below a folder with a checksum."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "filler")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _mounted(folder: Path, room: int = 0, size: int = 8 << 20, read_only: bool = False) -> bool:
    """Lay a small disk over a folder, with what is in there and so many bytes of room; False if that is refused."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(NEW_NAMESPACE) != 0:
        return False
    kept = folder.with_name(folder.name + ".copy")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept)
    mount = [["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]]
    for command in mount:
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return False
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    free = os.statvfs(folder)
    with (folder / "filler").open("wb") as file:
        file.write(bytes(max(0, free.f_bavail * free.f_frsize - room)))
    if read_only:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    return True


if __name__ == "__main__":
    main()
