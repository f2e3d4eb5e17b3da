"""Texts of a release: where the version is written, and its section of the changelog."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

CHANGELOG = "CHANGELOG.md"
PLACES = (
    ("cog_triton/__init__.py", r'^__version__ = "(.+)"$'),
    ("deploy/helm/Chart.yaml", r"^version: (\S+)$"),
    ("deploy/helm/Chart.yaml", r'^appVersion: "(.+?)"'),
    ("README.md", r"^cog-triton (\d\S*): starting"),
)
"""Files that have the version, and where. pyproject.toml and nix/ read the first."""

_VERSION = re.compile(r"(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})")


class Refused(Exception):
    """Reason for which there is no release of this commit; `way_out` is what to do."""

    def __init__(self, reason: str, way_out: str) -> None:
        super().__init__(f"{reason}\n  {way_out}")


def written_versions(root: Path) -> dict[str, str]:
    """Each place that has the version, and the one that it has."""
    found = {}
    for pattern, expression in PLACES:
        for path in sorted(root.glob(pattern)):
            for match in re.finditer(expression, path.read_text("utf-8"), re.MULTILINE):
                line = match.string.count("\n", 0, match.start()) + 1
                found[f"{path.relative_to(root)}:{line}"] = match[1]
    return found


def sections(changelog: str) -> dict[str, str]:
    """The changelog's sections by their headings."""
    parts = re.split(r"^## (.+)$", changelog, flags=re.MULTILINE)
    return {
        title.strip(): text.strip() for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def require_version(text: str) -> str:
    """Raise `Refused` for what is no version of ours."""
    if not _VERSION.fullmatch(text):
        raise Refused(f"VERSION={text}: must be X.Y.Z", "for example VERSION=0.3.0")
    return text


def check_texts(root: Path, version: str) -> str:
    """The version's section of the changelog; raises `Refused` where texts do not agree on it."""
    others = {place: one for place, one in written_versions(root).items() if one != version}
    if others:
        listed = ", ".join(f"{place} ({one})" for place, one in others.items())
        cut = f"scripts/release.py {version} --cut writes it everywhere; commit that"
        raise Refused(f"these have another version than {version}: {listed}", cut)
    found = sections((root / CHANGELOG).read_text("utf-8"))
    titles = [title for title in found if title.split()[0] == version]
    if not titles:
        raise Refused(
            f"{CHANGELOG} has no section {version}", f"scripts/release.py {version} --cut"
        )
    dated = re.fullmatch(rf"{re.escape(version)} - (\d{{4}}-\d\d-\d\d)", titles[0])
    try:
        datetime.date.fromisoformat(dated[1] if dated else "")
    except ValueError:
        raise Refused(
            f'{CHANGELOG}: "## {titles[0]}" has no date', f"as ## {version} - 2026-11-23"
        ) from None
    if not found[titles[0]]:
        raise Refused(f"{CHANGELOG}: section {version} is empty", "say what a user gains")
    if found.get("Unreleased"):
        raise Refused(
            f"{CHANGELOG} has lines under Unreleased, which would be in no release",
            f"move them to {version}, or release the next version",
        )
    return found[titles[0]]


def cut(root: Path, version: str, today: datetime.date) -> None:
    """Write the version everywhere, and give the changelog's Unreleased its name and date."""
    titles = [title.split()[0] for title in sections((root / CHANGELOG).read_text("utf-8"))]
    released = [tuple(map(int, one.split("."))) for one in titles if _VERSION.fullmatch(one)]
    if tuple(map(int, version.split("."))) < max(released, default=()):
        newest = ".".join(map(str, max(released)))
        raise Refused(f"{version} is not higher than {newest} of {CHANGELOG}", "take a higher one")
    for pattern, expression in PLACES:
        for path in root.glob(pattern):
            text = path.read_text("utf-8")
            new = re.sub(
                expression,
                lambda found: found[0].replace(found[1], version, 1),
                text,
                flags=re.MULTILINE,
            )
            if new != text:
                path.write_text(new, "utf-8")
                print(f"{path.relative_to(root)}: {version}")
    path = root / CHANGELOG
    text = path.read_text("utf-8")
    if any(title.split()[0] == version for title in sections(text)):
        print(f"{CHANGELOG}: has a section {version}, which stays as it is")
        return
    heading = "## Unreleased\n"
    if text.count(heading) != 1 or not sections(text)["Unreleased"]:
        raise Refused(f"{CHANGELOG} has nothing under Unreleased", "say what a user gains")
    path.write_text(text.replace(heading, f"{heading}\n## {version} - {today}\n"), "utf-8")
    print(f"{CHANGELOG}: Unreleased is {version} now; put its ten lines and upgrade notes on top")
