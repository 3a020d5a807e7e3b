"""`python -m paxcli` is `pax`."""

from paxcli.cli.main import main

if __name__ == "__main__":
    main()
