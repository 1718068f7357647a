"""The command `hpcdist`, and `python -m hpcdist`."""

import sys

from hpcdist.errors import ConfigError


def main() -> None:
    """Run the command line; say what it needs where hpcdist was installed without that."""
    try:
        from hpcdist.tools import cli
    except ConfigError as error:
        sys.exit(f"hpcdist: error: {error}")
    cli.main()


if __name__ == "__main__":
    main()
