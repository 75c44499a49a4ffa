"""Make a checkout ready for PyPI, in place: `python .ci/release.py URL TAG`, before it is built.

PyPI shows the README alone, so its links and pictures become absolute, at the tag; the package gets its
addresses. The URL is where the repository is, as in https://github.com/OWNER/NAME; the tag is `v` and the
version.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def absolute(text: str, url: str, tag: str) -> str:
    """A page whose links and pictures lead to the repository from anywhere."""
    return LINK.sub(lambda m: f"{m[1]}[{m[2]}]({url}/{'raw' if m[1] else 'blob'}/{tag}/{m[3]})", text)


def addresses(url: str, tag: str) -> str:
    """The table of pyproject.toml with the project's URLs."""
    pages = {"Repository": url, "Documentation": f"{url}/blob/{tag}/docs/index.md", "Issues": f"{url}/issues"}
    pages["Changelog"] = f"{url}/blob/{tag}/CHANGELOG.md"
    return "\n[project.urls]\n" + "".join(f'{name} = "{page}"\n' for name, page in pages.items())


def main(url: str, tag: str) -> None:
    found = re.search(
        r'^__version__ = "(.+)"$', (ROOT / "attngraph/__init__.py").read_text("utf-8"), re.MULTILINE
    )
    if found is None or tag != f"v{found[1]}":
        raise SystemExit(f"the tag is {tag}, the version {found and found[1]}")
    if f"\n## {found[1]} (unreleased)" in (ROOT / "CHANGELOG.md").read_text("utf-8"):
        raise SystemExit(f"CHANGELOG.md calls {found[1]} unreleased")
    readme, project = ROOT / "README.md", ROOT / "pyproject.toml"
    readme.write_text(absolute(readme.read_text("utf-8"), url, tag), "utf-8")
    project.write_text(project.read_text("utf-8") + addresses(url, tag), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
