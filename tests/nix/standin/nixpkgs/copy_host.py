"""Copy programs of this machine and their libraries into a self-contained prefix.

    copy_host.py OUT GLIBC PROGRAM...
    copy_host.py OUT GLIBC --libraries NAME... [--with-libc]
    copy_host.py OUT GLIBC --python EXECUTABLE

Every ELF file gets OUT/lib and GLIBC/lib as its run path and GLIBC's loader.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_LIBC = re.compile(
    r"(ld-linux-x86-64|lib(c|m|dl|pthread|rt|util|resolv|anl|nss_files|nss_dns))\.so\.\d+"
)
_UNWANTED = {"test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"}
_UNWANTED |= {"site-packages", "dist-packages", "__pycache__"}


def needed(path: Path) -> dict[str, Path]:
    """Libraries of an ELF file that the loader finds, by name."""
    lines = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
    return {name: Path(at) for name, at in re.findall(r"(\S+) => (/\S+)", lines)}


def is_elf(path: Path) -> bool:
    """Whether the file is a regular ELF file."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def adopt(out: Path, glibc: Path) -> None:
    """Copy the libraries of everything in `out` to its lib, and set all RPATHs to it."""
    lib = out / "lib"
    lib.mkdir(parents=True, exist_ok=True)
    done: set[Path] = set()
    while todo := {path for path in out.rglob("*") if is_elf(path)} - done:
        for path in todo:
            for name, source in needed(path).items():
                if not _LIBC.fullmatch(name) and not (lib / name).exists():
                    shutil.copy(source, lib / name)
        done |= todo
    for path in done:
        path.chmod(0o755)
        subprocess.run(["patchelf", "--set-rpath", f"{lib}:{glibc}/lib", path], check=True)
        if path.parent.name == "bin":
            loader = f"{glibc}/lib/ld-linux-x86-64.so.2"
            subprocess.run(["patchelf", "--set-interpreter", loader, path], check=True)


def copy_programs(out: Path, names: list[str]) -> None:
    """Copy programs of PATH into bin."""
    (out / "bin").mkdir(parents=True)
    for name in names:
        found = shutil.which(name)
        if found is None:
            raise SystemExit(f"{name}: not on this machine")
        shutil.copy(Path(found).resolve(), out / "bin" / name)


def copy_libraries(out: Path, names: list[str], glibc: Path, with_libc: bool) -> None:
    """Copy libraries of the loader's cache into lib; the C library's own as links, if wanted."""
    (out / "lib").mkdir(parents=True)
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    for name in names:
        found = re.search(rf"\b{re.escape(name)} \(libc6,x86-64.*=> (\S+)", cache)
        if found is None:
            raise SystemExit(f"{name}: not on this machine")
        shutil.copy(found[1], out / "lib" / name)
    for path in (glibc / "lib").iterdir() if with_libc else ():
        (out / "lib" / path.name).symlink_to(path)


def copy_python(out: Path) -> None:
    """Copy this interpreter, without installed packages."""
    version = sysconfig.get_python_version()
    (out / "bin").mkdir(parents=True)
    target = out / "bin" / f"python{version}"
    shutil.copy(Path(sys.executable).resolve(), target)
    for alias in ("python", "python3"):
        (out / "bin" / alias).symlink_to(target.name)
    stdlib = out / "lib" / f"python{version}"
    shutil.copytree(
        sysconfig.get_path("stdlib"),
        stdlib,
        symlinks=False,
        ignore=lambda _, names: {n for n in names if n in _UNWANTED or n.startswith("config-")},
    )
    (stdlib / "site-packages").mkdir(exist_ok=True)
    headers = Path(sysconfig.get_path("include"))
    shutil.copytree(headers, out / "include" / headers.name)
    library = f"libpython{version}.so.1.0"
    where = Path(sysconfig.get_config_var("LIBDIR")) / library
    shutil.copy(where if where.exists() else _found(library), out / "lib" / library)
    for path in stdlib.glob("_sysconfigdata*.py"):
        path.write_text(re.sub(r"'LIBDIR': '[^']*'", f"'LIBDIR': '{out}/lib'", path.read_text()))
    # Without it, root would write bytecode into the store, and the layer would change.
    options = ["-q", "--invalidation-mode", "unchecked-hash", "-s", out]
    subprocess.run([sys.executable, "-I", "-m", "compileall", *options, stdlib], check=True)


def _found(library: str) -> Path:
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    return Path(re.search(rf"{re.escape(library)} .*=> (\S+)", cache)[1])


def main(out: Path, glibc: Path, arguments: list[str]) -> None:
    """Command line."""
    match arguments:
        case ["--python", _]:
            copy_python(out)
        case ["--libraries", *names]:
            with_libc = names[-1] == "--with-libc"
            copy_libraries(out, names[: -1 if with_libc else None], glibc, with_libc)
        case names:
            copy_programs(out, names)
    adopt(out, glibc)


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
