"""Two saved runs side by side, in words: ``python -m explorer.compare first.cutaway second.cutaway``. Exit status 1: they differ."""

import argparse
import sys

from engine.events.log import EventLog
from explorer.compare.comparison import compare
from explorer.compare.words import report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m explorer.compare", description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("first", help="a saved run (.cutaway)")
    parser.add_argument("second")
    args = parser.parse_args(arguments)
    try:
        result = compare(EventLog.load(args.first), EventLog.load(args.second))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report(result)))
    return 0 if result.same else 1


if __name__ == "__main__":
    sys.exit(main())
