#!/usr/bin/env python3
"""Release: from a clean commit to dist/VERSION, a tag, and images in a registry.

    .venv/bin/python scripts/release.py VERSION --cut         writes the version everywhere
    .venv/bin/python scripts/release.py VERSION --rehearse    all but the tag and the push
    .venv/bin/python scripts/release.py VERSION [--registry HOST/ME --key FILE]

Steps that were done for this commit are not done again, so a release that broke off goes on.
Nothing leaves this machine without --registry, and no tag is pushed. docs/releases.md tells more.
Exit status: 0 released, 1 a step failed, 2 refused.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from packaging.version import Version
from release_texts import Refused, check_texts, cut, require_version

from cog_triton.errors import ModelUnavailable
from cog_triton.oci.reference import Reference

ROOT = Path(__file__).resolve().parents[1]
_NIX = ["nix", "--extra-experimental-features", "nix-command flakes"]
_SYSTEM = "x86_64-linux"


class Failed(Exception):
    """A command that failed, with its log."""


class Step(NamedTuple):
    """A step: its name, what does it, and what its result depends on besides the commit.

    With None it is done each time.
    """

    name: str
    run: Callable[[], None]
    depends_on: tuple[str, ...] | None = ()


class Release:
    """One release of the commit that is checked out."""

    def __init__(self, given: argparse.Namespace, root: Path = ROOT) -> None:
        self.given = given
        self.root = root
        self.version = require_version(given.version)
        self.tag = f"v{self.version}"
        self.dist = root / "dist" / self.version
        self.commit = self.output("git", "rev-parse", "HEAD")
        self.log = self.dist / ".steps" / "log"
        stamp = self.output("git", "show", "-s", "--format=%ct", "HEAD")
        self.environment = {**os.environ, "SOURCE_DATE_EPOCH": stamp}
        # What `make release` was given is not for the targets that it runs.
        for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"):
            self.environment.pop(name, None)

    def output(self, *command: str) -> str:
        """Standard output of a command that must work."""
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"{shlex.join(command)}:\n{done.stderr.strip()}")
        return done.stdout.strip()

    def run(self, *command: str | Path, into: Path | None = None) -> None:
        """Run a command: its output into a file, what it tells into the log."""
        words = [str(word) for word in command]
        with self.log.open("a") as log:
            log.write(f"$ {shlex.join(words)}\n")
            log.flush()
            begin = self.log.stat().st_size
            done = subprocess.run(
                words, cwd=self.root, env=self.environment, stdin=subprocess.DEVNULL, text=True,
                stdout=subprocess.PIPE if into else log, stderr=log,
            )  # fmt: skip
        if done.returncode:
            last = self.log.read_bytes()[begin:].decode(errors="replace").splitlines()[-25:]
            raise Failed("\n".join([f"{shlex.join(words)}: exit status {done.returncode}", *last]))
        if into:
            into.write_text(done.stdout, "utf-8")

    # Checks, which are made each time.

    def check(self) -> None:
        """Raise `Refused` unless this commit may be the version."""
        if changed := self.output("git", "status", "--porcelain"):
            raise Refused(f"the tree is not clean:\n{changed}", "commit or stash it")
        self.notes = check_texts(self.root, self.version)
        tags = self.output("git", "tag", "--list", "v[0-9]*").split()
        if self.tag in tags:
            tagged = self.output("git", "rev-list", "-n1", self.tag)
            if tagged != self.commit:
                raise Refused(
                    f"{self.tag} is the tag of {tagged[:12]}, and this is {self.commit[:12]}",
                    "a version that was released does not change: release the next one",
                )
        released = [Version(tag[1:]) for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
        if released and Version(self.version) < max(released):
            raise Refused(
                f"{self.version} is not higher than {max(released)}, which was released",
                "take a higher version",
            )
        if not self.given.without_nix and shutil.which("nix") is None:
            raise Refused(
                "no Nix here, which makes the images, their SBOMs, provenance and binary cache",
                "install it (docs/images.md), or say --without-nix to release the rest",
            )
        if self.given.registry and self.given.without_nix:
            raise Refused(
                "--registry with --without-nix: there are no images to push", "leave one out"
            )
        for name in ("osv", "cache_key", "key", "public_key"):
            path = getattr(self.given, name)
            if path is not None and not path.exists():
                option = f"--{name.replace('_', '-')}"
                raise Refused(f"{option} {path}: there is no such file", "give one that is there")
        if self.given.registry:
            try:
                Reference.parse(f"{self.given.registry}/image:{self.version}")
            except ModelUnavailable as error:
                raise Refused(
                    f"--registry {self.given.registry}: {error.detail}", "give HOST/ME"
                ) from None
        if self.given.registry and self.given.key is None and not self.given.unsigned:
            raise Refused(
                f"images for {self.given.registry} need a signature: no --key",
                "KEY=cosign.key, or --unsigned",
            )

    # Steps.

    def steps(self) -> list[Step]:
        """What is to be done, in order; what leaves this machine is last."""
        given, images = self.given, self.images()
        origin = str(given.stand_ins)
        found = [
            Step("lint and quick tests", self.test, (os.environ.get("TESTS", ""),)),
            Step("wheel and sdist", self.build_python),
            Step("chart", self.build_chart),
            *(Step(f"image {one}", partial(self.build_image, one), (origin,)) for one in images),
        ]
        if images:
            key = str(given.cache_key)
            found.append(Step("binary cache", self.fill_cache, (*images, origin, key)))
        found += [Step("known vulnerabilities", self.look, None), Step("sums", self.sum_up, None)]
        if not given.rehearse:
            found.append(Step(f"tag {self.tag}", self.make_tag, None))
            if given.registry:
                place = (given.registry, str(given.key))
                found += [Step(f"push {one}", partial(self.push, one), place) for one in images]
        return found

    def images(self) -> list[str]:
        """The names of the images: those that were asked for, or all of the flake."""
        if self.given.without_nix or self.given.image:
            return [] if self.given.without_nix else list(self.given.image)
        attribute = f".#packages.{_SYSTEM}"
        names = self.output(*_NIX, "eval", "--json", attribute, "--apply", "builtins.attrNames")
        return [name for name in json.loads(names) if name != "default"]

    def link(self, name: str) -> Path:
        """Where an image's executable file is linked."""
        return self.dist / ".steps" / name

    def sboms(self) -> list[Path]:
        """The images' SBOMs."""
        return sorted(self.dist.glob("*.spdx.json"))

    def test(self) -> None:
        """ruff, mypy, quick tests."""
        tests = os.environ.get("TESTS")
        if tests and not self.given.rehearse:
            raise Refused(f"TESTS={tests}: a release runs them all", "only with --rehearse")
        self.run("make", "--no-print-directory", "test-quick")

    def build_python(self) -> None:
        """The wheel and the sdist, whose times are the commit's."""
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist"]
        self.run(*build, "-d", self.dist)
        names = [f"cog_triton-{self.version}-py3-none-any.whl", f"cog_triton-{self.version}.tar.gz"]
        for name in names:
            if not (self.dist / name).is_file():
                raise Failed(f"hatchling made no {name}")

    def build_chart(self) -> None:
        """The chart's package, by Helm as a library."""
        self.run("scripts/setup-tools")
        sys.path.append(str(self.root / ".work" / "tools"))
        import helm_python

        chart = self.root / "deploy" / "helm"
        for example in sorted((chart / "examples").glob("*.yaml")):
            report = helm_python.chart.lint(chart, yaml.safe_load(example.read_text("utf-8")))
            if report["errors"]:
                raise Failed(f"helm lint, {example.name}: {report['errors']}")
        made = Path(helm_python.chart.package(chart, destination=self.dist))
        with helm_python.Chart.load(made) as loaded:
            if loaded.version != self.version:
                raise Failed(f"{made.name} has version {loaded.version}")

    def build_image(self, name: str) -> None:
        """An image, its SBOM and its provenance."""
        link = self.link(name)
        if self.given.stand_ins:
            path = os.pathsep.join(str(self.root / one) for one in ("tests", "tests/nix"))
            self.environment["PYTHONPATH"] = path
            try:
                self.run(sys.executable, "tests/nix/build.py", name, link)
            finally:
                del self.environment["PYTHONPATH"]
        else:
            self.run(*_NIX, "build", "--out-link", link, f".#{name}")
        for verb, ending in (("sbom", "spdx.json"), ("provenance", "provenance.json")):
            self.run(link, verb, into=self.dist / f"{name}.{ending}")

    def fill_cache(self) -> None:
        """A binary cache of the images, for nix copy --from file://DIR or any web server."""
        options = "compression=zstd"
        if self.given.cache_key:
            options += f"&secret-key={self.given.cache_key.resolve()}"
        links = [self.link(name) for name in self.images()]
        cache = self.dist / "nix-cache"
        self.run(*_NIX, "copy", "--to", f"file://{cache}?{options}", *links)

    def look(self) -> None:
        """Locks and SBOMs against known vulnerabilities."""
        command = [sys.executable, self.root / "scripts" / "vulnerabilities.py"]
        command += ["--osv", self.given.osv.resolve()] if self.given.osv else []
        command += [word for sbom in self.sboms() for word in ("--sbom", sbom)]
        done = subprocess.run(
            [str(word) for word in command], cwd=self.root, capture_output=True, text=True
        )
        told = (done.stdout + done.stderr).strip()
        (self.dist / "vulnerabilities.txt").write_text(told + "\n", "utf-8")
        if done.returncode == 2 and self.given.without_vulnerabilities:
            print("  NOT LOOKED, as --without-vulnerabilities says")
        elif done.returncode == 2:
            raise Refused(told, "give OSV=FILE, or say --without-vulnerabilities")
        elif done.returncode:
            raise Refused(told, "no release has a known vulnerability that affects it")

    def sum_up(self) -> None:
        """Release notes and SHA256SUMS of every file but the cache's, whose narinfo has its own."""
        (self.dist / "NOTES.md").write_text(
            f"# cog-triton {self.version}\n\n{self.notes}\n", "utf-8"
        )
        sums = self.dist / "SHA256SUMS"
        files = [path for path in sorted(self.dist.iterdir()) if path.is_file()]
        lines = [
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
            for path in files
            if not path.name.startswith("SHA256SUMS")
        ]
        sums.write_text("".join(lines))
        if key := self.signing_key():
            self.run("gpg", "--batch", "--yes", "--armor", "--detach-sign", "-u", key, sums)

    def signing_key(self) -> str:
        """The OpenPGP key of tags, as git has it; empty without one."""

        def setting(name: str) -> str:
            command = ["git", "config", "--get", name]
            done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
            return done.stdout.strip()

        return setting("user.signingkey") if setting("gpg.format") in ("", "openpgp") else ""

    def make_tag(self) -> None:
        """The annotated tag, signed where git has a key."""
        if self.output("git", "tag", "--list", self.tag):
            return
        signed = "--sign" if self.signing_key() else "--annotate"
        text = f"cog-triton {self.version}\n\n{self.notes.partition('### Upgrade')[0]}"
        message = self.dist / ".steps" / "tag"
        message.write_text(text, "utf-8")
        self.run("git", "tag", signed, "--cleanup=whitespace", "--file", message, self.tag)

    def push(self, name: str) -> None:
        """An image with its SBOM and provenance, signed; then what the registry has is verified."""
        reference = f"{self.given.registry}/{name}:{self.version}"
        options = ["--key", self.given.key.resolve()] if self.given.key else []
        plain = ["--dest-tls-verify=false"] if self.given.plain_http else []
        self.run(self.link(name), "push", reference, *options, *plain)
        if self.given.public_key:
            plain = ["--tls-verify=false"] if self.given.plain_http else []
            public = self.given.public_key.resolve()
            self.run(self.link(name), "verify", "--key", public, *plain, reference)

    def leave_no_other_images(self) -> None:
        """Remove what an earlier run left of other images: sums are of all files."""
        stamp = self.log.with_name("images")
        wanted = "\n".join((str(self.given.stand_ins), *self.images()))
        if not stamp.exists() or stamp.read_text() != wanted:
            for pattern in ("*.spdx.json", "*.provenance.json", ".steps/*.done"):
                for path in self.dist.glob(pattern):
                    path.unlink()
            shutil.rmtree(self.dist / "nix-cache", ignore_errors=True)
            stamp.write_text(wanted)

    def make(self) -> None:
        """Check, then do the steps that were not done for this commit."""
        self.check()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        what = "rehearsed" if self.given.rehearse else "released"
        print(f"release: {self.version} of {self.commit[:12]}, to be {what}, into {self.dist}")
        if self.given.without_nix:
            print("release: --without-nix: no images, SBOMs, provenance or binary cache")
        self.leave_no_other_images()
        steps = self.steps()
        for number, step in enumerate(steps, 1):
            stamp = self.log.with_name(re.sub(r"\W+", "-", step.name) + ".done")
            wanted = "\n".join((self.commit, *(step.depends_on or ())))
            title = f"[{number}/{len(steps)}] {step.name}"
            if step.depends_on is not None and stamp.exists() and stamp.read_text() == wanted:
                print(f"{title}: done before", flush=True)
                continue
            print(f"{title} ...", flush=True)
            begin = time.monotonic()
            step.run()
            stamp.write_text(wanted)
            print(f"{title}: {time.monotonic() - begin:.0f} s", flush=True)
        for path in sorted(self.dist.iterdir()):
            if not path.name.startswith("."):
                size = path.stat().st_size if path.is_file() else _size(path)
                print(f"  {size / 1e6:9.1f} MB  {path.name}")
        print(f"release: {self.version} is {what}. Next: {self.next()}")

    def next(self) -> str:
        """What is left to a person."""
        if self.given.rehearse:
            return f"make release VERSION={self.version}"
        rest = (
            "" if self.given.registry or self.given.without_nix else "; REGISTRY= pushes the images"
        )
        return f"git push REMOTE {self.tag}; hand out {self.dist.relative_to(self.root)}{rest}"


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Release this commit.", allow_abbrev=False)
    parser.add_argument("version", metavar="X.Y.Z")
    parser.add_argument("--cut", action="store_true", help="write the version everywhere, no more")
    parser.add_argument("--rehearse", action="store_true", help="all but the tag and the push")
    parser.add_argument(
        "--without-nix", action="store_true", help="no images and what comes of them"
    )
    parser.add_argument("--without-vulnerabilities", action="store_true",
                        help="go on where no database can be had")  # fmt: skip
    parser.add_argument("--osv", type=Path, metavar="FILE", help="OSV's export")
    parser.add_argument(
        "--image", action="append", metavar="NAME", help="default: all of the flake"
    )
    parser.add_argument("--stand-ins", action="store_true",
                        help="images of look-alikes of nixpkgs, to try")  # fmt: skip
    parser.add_argument(
        "--cache-key", type=Path, metavar="FILE", help="nix-store's, signs the cache"
    )
    parser.add_argument("--registry", metavar="HOST/ME", help="where images go; default: nowhere")
    parser.add_argument("--key", type=Path, metavar="FILE", help="signs images: cosign's or PEM")
    parser.add_argument("--public-key", type=Path, metavar="FILE", help="to verify what was pushed")
    parser.add_argument("--unsigned", action="store_true", help="push without a signature")
    parser.add_argument("--plain-http", action="store_true", help="a registry over HTTP")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Cut, rehearse or release."""
    given: Any = parse(arguments)
    try:
        if given.cut:
            cut(root, require_version(given.version), datetime.date.today())
        else:
            Release(given, root).make()
    except Refused as refusal:
        print(f"release: refused: {refusal}", file=sys.stderr)
        return 2
    except (Failed, OSError) as failure:
        print(f"release: failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nrelease: stopped: run it again, what is done stays done", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
