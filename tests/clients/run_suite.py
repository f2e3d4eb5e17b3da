"""Run released clients against a real server, and write what came out to docs/clients.md."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "integration"))
from suite import client_list, client_runs, clients_page
from suite.environments import EnvironmentFailed
from suite.suite_servers import Servers

_EPILOG = """
Python's clients run in two environments, .work/clients/clients-openai-2 and -3, of the locks
of these names in requirements/: packages are installed when a lock has changed, and nothing
else is fetched. Clients for Node share one, of npm's lock. The servers are `cog-triton
serve` on free ports of 127.0.0.1, with the demo model (ENGINE_TAR, else built as `make test` does)
and with the mock engine; each is started when the first client asks for it. A client is a runner,
tests/clients/suite/runners/run_NAME, whose functions are its checks. Rows of docs/clients.md that
did not run stay as they are.

examples:
  make test-clients                           all, as the page has them
  make test-clients CLIENT=openai             one
  make test-clients CLIENT=common             those of `make test-all`; `rest` are the other ones
  make test-clients CLIENT="openai litellm" ARGS="-k stream -v"
  make test-clients ARGS=--list
"""


def main() -> int:
    """Exit code 0: all is well."""
    parser = argparse.ArgumentParser(
        prog="run_suite.py",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "clients", nargs="*", metavar="CLIENT", help="names or groups of --list; all without any"
    )
    parser.add_argument("--list", action="store_true", help="groups, names and versions, then end")
    parser.add_argument(
        "-k", dest="only", default="", help="checks with this in their names; writes no page"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for each check")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # closing the servers
    if options.list:
        for client in client_list.CLIENTS:
            print(f"{client.group:7} {client.name:22} {client.version()}")
        return 0
    try:
        chosen = client_list.chosen(options.clients)
    except ValueError as error:
        parser.error(str(error))
    rows = []
    with Servers() as servers:
        for client in chosen:
            try:
                row = client_runs.run(client, servers, options.only, options.verbose)
            except EnvironmentFailed as error:
                print(f"{client.name}: {error}", file=sys.stderr)
                return 1
            rows.append(row)
    if not options.only:
        clients_page.write(rows)
    return 0 if all(row.well for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
