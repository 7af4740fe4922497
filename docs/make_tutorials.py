"""Put what programs printed into docs/tutorials/*.md, from the files beside them.

    python docs/make_tutorials.py            # write
    python docs/make_tutorials.py --check    # is every page what would be written?

A page has lines ``<!-- output NAME -->`` and ``<!-- /output -->``; what stands between them is
replaced by the content of docs/tutorials/NAME, whose first line is the command.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

TUTORIALS = Path(__file__).parent / "tutorials"
BLOCK = re.compile(r"(<!-- output (\S+) -->\n).*?(<!-- /output -->)", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(argv)
    stale = []
    for page in sorted(TUTORIALS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = BLOCK.sub(_filled, before)
        if after == before:
            continue
        stale.append(page.name)
        if not options.check:
            page.write_text(after, encoding="utf-8")
    if options.check and stale:
        print(f"not what docs/make_tutorials.py writes: {', '.join(stale)}")
        return 1
    return 0


def _filled(block: re.Match[str]) -> str:
    output = (TUTORIALS / block[2]).read_text(encoding="utf-8").rstrip()
    return f"{block[1]}```text\n{output}\n```\n{block[3]}"


if __name__ == "__main__":
    sys.exit(main())
